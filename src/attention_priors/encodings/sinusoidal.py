"""Sinusoidal positions."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_priors.checks import check_above
from attention_priors.encodings.base import AdditiveEncoding


class Sinusoidal(AdditiveEncoding):
    """``p_i = [sin(i ω_0), cos(i ω_0), sin(i ω_1), ...]`` with ``ω_r = base^(-2r / width)``.

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.5.

    Args:
        width: of the embeddings; even.
        base: ratio of the longest to the shortest period.
    """

    name = "sinusoidal"

    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        if not isinstance(width, int) or width < 2 or width % 2:
            raise ValueError(f"width must be a positive even integer, got {width!r}")
        check_above(1, base=base)
        self.width = width
        self.base = float(base)

    def forward(self, positions: Tensor) -> Tensor:
        """``(..., L, width)``; phases in float64, since float32 loses them at far positions."""
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.width
        phase = positions.double().unsqueeze(-1) * self.base**-exponents
        return torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(-2).float()
