"""Replacing the class of a module in place, and code shared by replacement classes.

The module stays the same object, with its weights, names, hooks and device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from attention_priors.attention import attend
from attention_priors.models.masks import Keys
from attention_priors.priors import Prior


def check_replaceable(modules: Iterable[nn.Module], replacements: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Raise a ValueError unless all modules that would be replaced run transformers' own code.

    Raises:
        ValueError: a module is of a derived class, or has a wrapped ``forward``.
    """
    known = [module for module in modules if isinstance(module, tuple(replacements))]
    for module in known:
        if type(module) not in replacements:
            raise ValueError(
                f"this model has a module of class {type(module).__module__}.{type(module).__qualname__}, which does "
                "not run transformers' own code"
            )
    check_not_wrapped(known)


def check_not_wrapped(modules: Iterable[nn.Module]) -> None:
    """Raise a ValueError if a module's ``forward`` is wrapped: the wrapper would bypass a replaced class."""
    for module in modules:
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of a {type(module).__name__} of this model is wrapped (by accelerate, for a device_map "
                "or offloading, or by another package); call use_priors() and restore_attention() before wrapping"
            )


def replace(module: nn.Module, replacement: type[nn.Module]) -> None:
    """Replace the class of ``module`` by ``replacement``, whose last base is the module's class."""
    assert replacement.__bases__[-1] is type(module)
    module.__class__ = replacement
    if isinstance(module, PreTrainedModel):
        # transformers registers the outputs that a model can record (output_hidden_states) when it is built.
        _CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def restore(module: Any) -> None:
    """Undo :func:`replace`."""
    module.__class__ = type(module).__bases__[-1]


# ---- code shared by replacements


def refuse_attention_weights(module: Any, output_attentions: Any) -> None:
    """Raise a ValueError if attention weights are requested, because the dense matrix is never computed."""
    if output_attentions if output_attentions is not None else module.config.output_attentions:
        raise ValueError(
            f"output_attentions=True is not supported: {type(module).__name__} with priors computes no attention "
            "weights; call restore_attention(model) first"
        )


def prior_for(module: nn.Module, device: torch.device) -> Prior:
    """Return an attention layer's prior on ``device``: a prior outside the state dict does not follow the model."""
    prior = module.prior
    assert isinstance(prior, Prior)
    if "prior" in vars(module) and next(prior.parameters()).device != device:
        prior = module.__dict__["prior"] = copy.deepcopy(prior).to(device)
    return prior


def attend_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior,
    keys: Keys,
    cache: Cache | None,
    layer: int | None,
    *,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Update the cache with new keys and values, and compute attention of the new tokens.

    Args:
        query: queries of the new tokens. ``(B, H, L, D)``.
        key: keys in the shape of ``query``.
        value: values in the shape of ``query``.
        prior: prior over distance.
        keys: all keys so far, with those of the new tokens.
        cache: cache of the previous tokens, or None.
        layer: index of this layer in the cache. Required with a cache.
        softmax_scale: as for :func:`attend`.
        dropout_p: as for :func:`attend`.

    Returns:
        Output, ``(B, L, H · D)``.
    """
    if cache is not None:
        assert layer is not None
        key, value = cache.update(key, value, layer)
    options = keys.options(prior) | {"softmax_scale": softmax_scale, "dropout_p": dropout_p}
    return attend(query, *keys.trim(key, value), prior, **options).transpose(1, 2).flatten(-2)
