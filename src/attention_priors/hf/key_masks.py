"""Padding, handed down to each attention layer by models of transformers, and attention over their caches.

Their models make a dense mask of queries and keys, unless they are given one of four dimensions: that one they pass on
untouched. So the padding mask itself travels, as ``(B, 1, 1, L)``, and nothing as large as queries times keys is made.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from attention_priors.attention import attend
from attention_priors.priors import Prior


def key_mask(attention_mask: Tensor | None, embeddings: Tensor) -> Tensor:
    """The padding mask in a form that is passed on as it is.

    Args:
        attention_mask: ``(B, L)``, not 0 for tokens; or None; or of four dimensions, which stays what it is.
        embeddings: token ids or embeddings ``(B, ...)``, for the batch and the device.

    Returns:
        Boolean ``(B, 1, 1, L)``, True for tokens; ``(1, 1, 1, 0)`` if there is no padding.
    """
    device = embeddings.device
    if attention_mask is None:
        return torch.ones(1, 1, 1, 0, dtype=torch.bool, device=device)
    if attention_mask.dim() == 4:
        return attention_mask.to(device)
    if attention_mask.dim() != 2 or len(attention_mask) != len(embeddings):
        raise ValueError(
            f"attention_mask must have shape ({len(embeddings)}, length), 1 for tokens and 0 for padding, got "
            f"{tuple(attention_mask.shape)}"
        )
    tokens = attention_mask.to(device) != 0
    # What is compiled does not look at values.
    if not torch.compiler.is_compiling() and bool(tokens.all()):
        tokens = tokens[:1, :0]
    return tokens[:, None, None]


def is_padding(mask: Tensor) -> bool:
    """Whether a mask of four dimensions is about keys alone."""
    return mask.dtype == torch.bool and mask.shape[1:3] == (1, 1)


def split_mask(mask: Tensor, batch: int, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
    """The ``key_padding_mask`` or the ``attn_mask`` that a mask of four dimensions is to :func:`attend`."""
    if not is_padding(mask):
        mask = mask[..., :num_keys]
        return None, ~mask if mask.dtype == torch.bool else mask
    if mask.shape[-1] == 0:
        return None, None
    return ~_fit(mask[:, 0, 0], num_keys, False).expand(batch, -1), None


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
    """The prior of an attention layer. What is no part of the model's state has not followed it to its device."""
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
    layer_index: int | None,
    *,
    causal: bool = True,
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
        mask: from :func:`key_mask`, of all tokens so far; or a mask of queries and keys ``(B, 1 or H, L, Lk)``, boolean
            (True = visible) or added to the logits.
        cache: of the tokens before, or None.
        layer_index: of this layer in the cache.
        causal: whether a query sees only keys up to its own place.
        positions: of all tokens so far, ``(B, >= Lk)``, where they are not those of their slots.
        softmax_scale: of the content; ``1/sqrt(D)`` by default.
        dropout_p: probability with which attention weights are dropped.

    Returns:
        ``(B, L, H · D)``.
    """
    length = query.shape[2]
    past: Any = 0
    if cache is not None:
        assert layer_index is not None
        past = cache.get_seq_length(layer_index)
        if isinstance(past, Tensor):
            # A static cache counts in place. What is compiled cannot look.
            past = past.clone() if torch.compiler.is_compiling() else int(past)
        key, value = cache.update(key, value, layer_index)
    query_positions = key_positions = None
    if isinstance(past, Tensor):
        # All slots take part; those after the last token are in every query's future.
        query_positions = torch.arange(length, device=query.device) + past
        key_positions = torch.arange(key.shape[2], device=key.device)
    else:
        # A static cache has room after the last token.
        key, value = key[:, :, : past + length], value[:, :, : past + length]
    num_keys = key.shape[2]
    if positions is not None:
        key_positions = _fit(positions, num_keys, 0)
        slots = torch.arange(length, device=query.device) + past
        query_positions = key_positions[:, slots]
    if is_padding(mask) and not isinstance(past, Tensor) and 0 < mask.shape[-1] < num_keys:
        raise ValueError(f"attention_mask covers {mask.shape[-1]} tokens; with those in the cache there are {num_keys}")
    padding, dense = split_mask(mask, len(query), num_keys)
    out = attend(
        query,
        key,
        value,
        prior,
        causal=causal,
        softmax_scale=softmax_scale,
        query_positions=query_positions,
        key_positions=key_positions,
        key_padding_mask=padding,
        attn_mask=dense,
        dropout_p=dropout_p,
    )
    return out.transpose(1, 2).flatten(-2)


def _fit(values: Tensor, length: int, filling: int | bool) -> Tensor:
    values = values[:, :length]
    return torch.nn.functional.pad(values, (0, length - values.shape[1]), value=filling)
