"""One module's class for another: the module stays the same object, with its weights, names, hooks and device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def check_replaceable(modules: Iterable[nn.Module]) -> None:
    """Modules that are to be replaced must have no ``forward`` of their own, which would go on being called.

    Raises:
        ValueError: if one has.
    """
    for module in modules:
        if "forward" in vars(module):
            raise ValueError(
                f"a {type(module).__name__} of this model has its forward wrapped (by accelerate, for a device_map or "
                "offloading, or by another package); call use_priors(model) before it is wrapped"
            )


def replace(module: nn.Module, replacement: type[nn.Module]) -> None:
    """Give a module the class ``replacement``, whose last base is the class it has."""
    assert replacement.__bases__[-1] is type(module)
    module.__class__ = replacement


def restore(module: Any) -> None:
    """Undo :func:`replace`."""
    module.__class__ = type(module).__bases__[-1]
