"""T5's relative bias as a prior, through the attention interface.

Without this module, ``compute_bias`` makes a dense bias ``(1, H, Lq, Lk)`` before transformers calls the attention
interface. Here ``compute_bias`` returns the scalars of the buckets, ``(H, num_buckets)``. Layers pass them on like the
bias, and :func:`attention_forward` builds a prior from them. The attention classes remain those of transformers: T5,
mT5, umT5, Switch Transformers, Pop2Piano, and the decoders of LongT5, Pix2Struct and UDOP.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.hf.attach import has_buckets, take_own_configs
from attention_priors.hf.interface import IMPLEMENTATION, PAST, register

BEFORE = "_implementation_before_priors"
"""Attribute of modules with a changed config: name of the previous attention implementation."""


def use_buckets(model: nn.Module) -> None:
    """Make the layers of :func:`has_buckets` return the scalars of buckets instead of a dense bias."""
    take_own_configs(model)
    register()
    layers: list[Any] = [module for module in model.modules() if has_buckets(module)]
    kinds = tuple({type(layer.config) for layer in layers})
    parts: list[Any] = [module for module in model.modules() if isinstance(vars(module).get("config"), kinds)]
    for part in parts:
        setattr(part, BEFORE, part.config._attn_implementation)
    for part in parts:
        part.config._attn_implementation = IMPLEMENTATION
    for layer in layers:
        layer.compute_bias = partial(_scalars_of, layer)
        # Cross-attention has no bias; without this flag, transformers makes a dense bias of zeros.
        layer.has_relative_attention_bias = True


def restore_bias(model: nn.Module) -> None:
    """Undo :func:`use_buckets`."""
    parts: list[Any] = [module for module in model.modules() if BEFORE in vars(module)]
    for part in parts:
        part.config._attn_implementation = vars(part).pop(BEFORE)
        if has_buckets(part):
            del part.compute_bias
            part.has_relative_attention_bias = hasattr(part, "relative_attention_bias")


def _scalars_of(
    module: Any, *lengths: int, device: torch.device | None = None, past_seen_tokens: int | Tensor = 0
) -> Tensor:
    """Return the scalars of a layer's buckets, ``(H, num_buckets)``; ``(H, 0)`` for cross-attention.

    Args:
        module: the attention layer.
        lengths: numbers of queries and keys, which are ignored.
        device: device of the queries.
        past_seen_tokens: number of tokens before the queries, set as an attribute of the scalars.

    Raises:
        RuntimeError: another attention implementation is in use, which would read the scalars as a dense bias.
    """
    implementation = module.config._attn_implementation
    if implementation != IMPLEMENTATION:
        raise RuntimeError(
            f"the attention implementation {implementation!r} does not support the prior of use_priors(): call "
            f"model.set_attn_implementation({IMPLEMENTATION!r}) to use the prior, or restore_attention(model) to "
            "remove it"
        )
    if not hasattr(module, "relative_attention_bias"):
        return torch.empty(module.n_heads, 0, device=device)
    # Call the table instead of reading its weight: hooks load offloaded or sharded weights.
    buckets = torch.arange(module.relative_attention_num_buckets, device=device)
    scalars = module.relative_attention_bias(buckets).T
    scalars = scalars.to(torch.promote_types(scalars.dtype, torch.float32))
    setattr(scalars, PAST, past_seen_tokens)
    return scalars
