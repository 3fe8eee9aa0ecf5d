"""The uniform prior (NoPE)."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_priors.priors.base import Lanes, Prior, Structure


class Uniform(Prior):
    """Equal log-prior of every visible key: ``K(i, j) = 0``.

    This is attention without a positional prior. Under a causal mask the prior is uniform over ``0..i``.

    Source: NoPE (Kazemnejad et al. 2023); BAM, Lemma 1.

    Args:
        num_heads: number of heads, ``H``.
    """

    name = "uniform"
    over_grid = None
    structure = Structure.STATIONARY | Structure.FACTORED

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return zeros, ``(H, *distance.shape)``."""
        return torch.zeros(self.num_heads, *distance.shape, dtype=dtype, device=distance.device)

    def is_zero_within(self, distance: int) -> bool:
        """Return True: the log-prior is 0 at every distance."""
        return True

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """Return empty lanes, ``R = 0``."""
        *leading, number = query_positions.shape
        empty = torch.zeros(0, dtype=dtype, device=query_positions.device)
        return Lanes(empty.new_zeros(*leading, self.num_heads, number, 0), empty.new_zeros(*key_positions.shape, 0))
