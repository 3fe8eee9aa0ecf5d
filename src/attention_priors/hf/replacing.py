"""One module's class for another: the module stays the same object, with its weights, names, hooks and device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY


def check_replaceable(modules: Iterable[nn.Module], replacements: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Modules that are to be replaced must have transformers' own code, and be called by it.

    Raises:
        ValueError: if one is of another class derived from theirs, or has a ``forward`` of its own.
    """
    known = [module for module in modules if isinstance(module, tuple(replacements))]
    for module in known:
        if type(module) not in replacements:
            raise ValueError(
                f"a module of this model is a {type(module).__module__}.{type(module).__qualname__}, whose code is not "
                "transformers' own"
            )
    check_not_wrapped(known)


def check_not_wrapped(modules: Iterable[nn.Module]) -> None:
    """A ``forward`` of a module's own would go on being called, whatever class the module has.

    Raises:
        ValueError: if a module has one.
    """
    for module in modules:
        if "forward" in vars(module):
            raise ValueError(
                f"a {type(module).__name__} of this model has its forward wrapped (by accelerate, for a device_map or "
                "offloading, or by another package); call use_priors() and restore_attention() before it is wrapped"
            )


def replace(module: nn.Module, replacement: type[nn.Module]) -> None:
    """Give a module the class ``replacement``, whose last base is the class it has."""
    assert replacement.__bases__[-1] is type(module)
    module.__class__ = replacement
    if isinstance(module, PreTrainedModel):
        # Which outputs it can record (output_hidden_states) transformers keeps by class, from when a model is made.
        _CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def restore(module: Any) -> None:
    """Undo :func:`replace`."""
    module.__class__ = type(module).__bases__[-1]
