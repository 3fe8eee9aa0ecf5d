"""T5's relative bias through the attention interface.

Before transformers calls the attention interface, ``compute_bias`` makes a dense bias ``(1, H, Lq, Lk)``. Here
``compute_bias`` returns the scalars of the buckets, ``(H, num_buckets)``. The layers hand them on as they handed on the
bias, and :func:`attention_forward` makes a prior of them. The attention classes stay those of transformers: T5, mT5,
umT5, Switch Transformers, Pop2Piano, and the decoders of LongT5, Pix2Struct and UDOP.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.hf.attach import has_buckets, take_own_configs
from attention_priors.hf.interface import IMPLEMENTATION, PAST, register

BEFORE = "_implementation_before_priors"
"""Attribute of modules with a changed config: name of the attention implementation before the change."""


def use_buckets(model: nn.Module) -> None:
    """Let the layers of :func:`has_buckets` hand over scalars of buckets in place of a dense bias."""
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
        # Cross-attention has no bias: without this flag, transformers makes a dense one of zeros.
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
        lengths: numbers of queries and keys, which the scalars do not depend on.
        device: of the queries.
        past_seen_tokens: number of tokens before the queries, an attribute of the scalars.

    Raises:
        RuntimeError: if another attention implementation is in use, which would take the scalars for a dense bias.
    """
    implementation = module.config._attn_implementation
    if implementation != IMPLEMENTATION:
        raise RuntimeError(
            f"the attention implementation is {implementation!r}, which cannot read the prior of use_priors(): "
            f"model.set_attn_implementation({IMPLEMENTATION!r}) brings the prior back, restore_attention(model) takes "
            "it off"
        )
    if not hasattr(module, "relative_attention_bias"):
        return torch.empty(module.n_heads, 0, device=device)
    # The table is called, not read: hooks on the call bring weights that are offloaded or sharded.
    buckets = torch.arange(module.relative_attention_num_buckets, device=device)
    scalars = module.relative_attention_bias(buckets).T
    scalars = scalars.to(torch.promote_types(scalars.dtype, torch.float32))
    setattr(scalars, PAST, past_seen_tokens)
    return scalars
