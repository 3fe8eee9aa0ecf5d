"""Sliding-window attention as a prior."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_priors.checks import check_positive_integers
from attention_priors.priors.base import Prior, Structure


class Window(Prior):
    """Local attention: ``K(i, j) = 0`` where ``|i - j| < size``, ``-inf`` elsewhere.

    ``size`` counts the query's own position, as ``sliding_window`` does in transformers: under a causal mask a query
    sees itself and the ``size - 1`` keys before it. The window is a mask, so a logit scale does not multiply it. The
    window does not reduce the number of visible keys that SSMax counts.

    Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer" (2020), section 3.1.

    Args:
        num_heads: number of heads, ``H``.
        size: size of the window in tokens, the query's own included.
    """

    name = "window"
    structure = Structure.STATIONARY

    def __init__(self, num_heads: int, size: int) -> None:
        super().__init__(num_heads)
        check_positive_integers(size=size)
        self.size = size

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return a small window."""
        return (cls(num_heads, 4),)

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return zeros: :meth:`visible_at` hides the keys outside the window."""
        return torch.zeros(self.num_heads, *distance.shape, dtype=dtype, device=distance.device)

    def visible_at(self, distance: Tensor) -> Tensor:
        """Return ``|d| < size``."""
        return distance.abs() < self.size

    def is_zero_within(self, distance: int) -> bool:
        """Return whether the window covers ``distance``."""
        return distance < self.size
