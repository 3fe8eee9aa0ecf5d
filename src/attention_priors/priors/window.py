"""Local attention as a prior."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_priors.checks import check_positive_integers
from attention_priors.priors.base import Prior, Structure


class Window(Prior):
    """Local attention: ``K(i, j) = 0`` where ``|i - j| < size``, ``-inf`` elsewhere.

    ``size`` counts the query's own position, as ``sliding_window`` does in transformers: under a causal
    mask a query sees itself and the ``size - 1`` keys before it. The window is a mask: a logit scale does
    not multiply it, and it does not reduce the number of visible keys that SSMax counts.

    Args:
        num_heads: ``H``.
        size: in tokens.
    """

    name = "window"
    structure = Structure.STATIONARY

    def __init__(self, num_heads: int, size: int) -> None:
        super().__init__(num_heads)
        check_positive_integers(size=size)
        self.size = size

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros: what the window hides is in :meth:`visible_at`."""
        return torch.zeros(self.num_heads, *distance.shape, dtype=dtype, device=distance.device)

    def visible_at(self, distance: Tensor) -> Tensor:
        """``|d| < size``."""
        return distance.abs() < self.size
