"""The uniform prior (NoPE)."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_priors.priors.base import Lanes, Prior, Structure


class Uniform(Prior):
    """Every visible position is as likely as any other: ``K(i, j) = 0``.

    This is attention without a positional prior (NoPE); under a causal mask the prior is uniform over
    ``0..i`` (BAM, Lemma 1).

    Args:
        num_heads: ``H``.
    """

    name = "uniform"
    over_grid = None
    structure = Structure.STATIONARY | Structure.FACTORED

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros, ``(H, *distance.shape)``."""
        return torch.zeros(self.num_heads, *distance.shape, dtype=dtype, device=distance.device)

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """No lanes at all: ``R = 0``."""
        return uniform_lanes(self.num_heads, query_positions, key_positions, dtype)


def uniform_lanes(num_heads: int, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype) -> Lanes:
    """No features: ``(..., H, Lq, 0)`` and ``(..., Lk, 0)``."""
    query_shape = (*query_positions.shape[:-1], num_heads, query_positions.shape[-1], 0)
    query = torch.zeros(query_shape, dtype=dtype, device=query_positions.device)
    key = torch.zeros(*key_positions.shape, 0, dtype=dtype, device=key_positions.device)
    return Lanes(query, key, None)
