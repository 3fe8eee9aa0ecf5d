"""Key biases, which are added to the log-prior, and their exact representation in float32."""

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
    """Check ``key_bias`` and return one row for each query head, ``(B, H, Lk)``.

    Raises:
        ValueError: the type, dtype, shape, device or a value is invalid. Values are checked only on the CPU in eager
            mode.
    """
    if not isinstance(key_bias, Tensor) or key_bias.dtype not in (torch.float32, torch.float64):
        got = key_bias.dtype if isinstance(key_bias, Tensor) else type(key_bias).__name__
        raise ValueError(
            f"key_bias must be a tensor of float32 or float64, got {got}; use float64 for sums over long texts"
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
        raise ValueError("key_bias must be finite; hide keys with key_padding_mask, not with -inf")
    return key_bias.repeat_interleave(heads // key_bias.shape[1], dim=1) if key_bias.shape[1] < heads else key_bias


def best_seen(key_bias: Tensor, geometry: Geometry) -> Tensor:
    """Return about the highest key bias that each query sees, ``(1 or B, H, Lq)``, without a gradient.

    The result is exact if documents are runs of tokens and the caller gave no positions. Otherwise, it is the highest
    bias of all keys. The function reads no values, so it does not synchronize with the device.

    Args:
        key_bias: ``(1 or B, H, Lk)``.
        geometry: positions and masks.
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
            # Each step doubles the number of keys, all of the same document.
            before = pad(best[..., :-step], (step, 0), value=-math.inf)
            best, step = torch.where(slots - step >= first, torch.maximum(best, before), best), 2 * step
    own = slots if geometry.causal and not geometry.has_given_positions else last
    # The last query is at the last key: if there are more queries than keys, the first queries lie before all keys.
    queries = torch.arange(geometry.num_keys - geometry.num_queries, geometry.num_keys, device=numbers.device)
    places = own.expand_as(last)[..., queries.clamp(min=0)]
    shape = max(len(best), len(places)), best.shape[1], -1
    found = best.expand(shape).gather(-1, places.expand(shape))
    # If documents are not runs, a query may find only padding in its document.
    return torch.where(found > LOG_PRIOR_FLOOR, found, numbers.amax(-1, keepdim=True))


def in_two(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Split float64 numbers into two float32 terms. The gradient flows through the first term."""
    high = numbers.float()
    return high, (numbers.detach() - high.detach().double()).float()
