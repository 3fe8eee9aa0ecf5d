"""Numbers of keys that are added to the log-prior, and how float32 holds them however large they are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import Geometry, document_bounds
from attention_priors.precision import can_be_read
from attention_priors.priors.base import LOG_PRIOR_FLOOR


def checked_key_bias(key_bias: Any, query: Tensor, key: Tensor) -> Tensor:
    """Return it with a row for each head of the queries, ``(B, H, Lk)``.

    Raises:
        ValueError: naming the shape, dtype or value, and what was expected. Numbers are looked at on the CPU in eager
            mode alone.
    """
    if not isinstance(key_bias, Tensor) or key_bias.dtype not in (torch.float32, torch.float64):
        got = key_bias.dtype if isinstance(key_bias, Tensor) else type(key_bias).__name__
        raise ValueError(
            f"key_bias must be a tensor of float32 or float64, got {got}; sums over long texts need float64"
        )
    batch, heads, kv_heads, num_keys = *query.shape[:2], *key.shape[1:3]
    if tuple(key_bias.shape) not in ((batch, heads, num_keys), (batch, kv_heads, num_keys)):
        raise ValueError(
            f"key_bias must have shape {(batch, heads, num_keys)} or {(batch, kv_heads, num_keys)}, got "
            f"{tuple(key_bias.shape)}"
        )
    if key_bias.device != query.device:
        raise ValueError(f"key_bias is on {key_bias.device}, but query is on {query.device}")
    plain = key_bias.detach()
    if can_be_read(plain) and not bool(plain.isfinite().all()):
        raise ValueError("key_bias must be finite; hide keys by key_padding_mask, not by -inf")
    return key_bias.repeat_interleave(heads // key_bias.shape[1], dim=1) if key_bias.shape[1] < heads else key_bias


def best_seen(key_bias: Tensor, geometry: Geometry) -> Tensor:
    """About the best number ``(1 or B, H, Lk)`` that each query sees, ``(1 or B, H, Lq)``, without a gradient.

    It is known where documents are runs of tokens and positions are not given: no value is looked at, so that no device
    is waited for. Elsewhere it is the best of all keys.
    """
    numbers, documents = key_bias.detach(), geometry.key_documents
    if geometry.key_padding_mask is not None:
        numbers = numbers.masked_fill(geometry.key_padding_mask.unsqueeze(1), LOG_PRIOR_FLOOR)
    slots = torch.arange(geometry.num_keys, device=numbers.device).view(1, 1, -1)
    last, best = torch.full_like(slots, geometry.num_keys - 1), numbers.cummax(-1).values
    if documents is not None:
        first, end = (bounds.unsqueeze(1) for bounds in document_bounds(documents))
        last, best, step = end - 1, numbers, 1
        while step < geometry.num_keys:
            # The best of twice as many keys each time, all of the same document.
            before = pad(best[..., :-step], (step, 0), value=-math.inf)
            best, step = torch.where(slots - step >= first, torch.maximum(best, before), best), 2 * step
    own = slots if geometry.causal and not geometry.has_given_positions else last
    # Queries end at the last key: where there are more of them, the first ones lie before all keys.
    queries = torch.arange(geometry.num_keys - geometry.num_queries, geometry.num_keys, device=numbers.device)
    places = own.expand_as(last)[..., queries.clamp(min=0)]
    shape = max(len(best), len(places)), best.shape[1], -1
    found = best.expand(shape).gather(-1, places.expand(shape))
    # Where documents are no runs, a query may find nothing but padding in its own.
    return torch.where(found > LOG_PRIOR_FLOOR, found, numbers.amax(-1, keepdim=True))


def in_two(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 numbers for each, whose sum it is; the gradient is the first one's."""
    high = numbers.float()
    return high, (numbers.detach() - high.detach().double()).float()
