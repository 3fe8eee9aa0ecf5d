"""One module's class for another: the module stays the same object, with its weights, names, hooks and device.

And what the classes that take the place of others share.
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
from attention_priors.models.masks import keys_of_layer, past_tokens
from attention_priors.priors import Prior


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


# ---- what replacements share


def refuse_attention_weights(module: Any, output_attentions: Any) -> None:
    """Attention weights are a dense matrix that is never made here.

    Raises:
        ValueError: if they are asked for, by argument or by config.
    """
    if output_attentions if output_attentions is not None else module.config.output_attentions:
        raise ValueError(
            f"output_attentions=True: {type(module).__name__} with priors makes no attention weights; call "
            "restore_attention(model) first"
        )


def prior_for(module: nn.Module, device: torch.device) -> Prior:
    """Return an attention layer's prior, on ``device``: a prior outside the model's state does not follow the model."""
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
    mask: Tensor,
    cache: Cache | None,
    layer: int | None,
    *,
    positions: Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention of new tokens to themselves and to those in a cache, which takes them in.

    Args:
        query: ``(B, H, L, D)``, of the new tokens.
        key: likewise.
        value: likewise.
        prior: over the distance between tokens.
        mask: as for :func:`keys_of_layer`.
        cache: of the tokens before, or None.
        layer: index of this layer in the cache.
        positions: as for :func:`keys_of_layer`.
        softmax_scale: as for :func:`attend`.
        dropout_p: as for :func:`attend`.

    Returns:
        ``(B, L, H · D)``.
    """
    past = past_tokens(cache, layer)
    if cache is not None:
        assert layer is not None
        key, value = cache.update(key, value, layer)
    keys = keys_of_layer(mask, query, key, past, positions=positions)
    options = keys.options(prior) | {"softmax_scale": softmax_scale, "dropout_p": dropout_p}
    return attend(query, *keys.trim(key, value), prior, **options).transpose(1, 2).flatten(-2)
