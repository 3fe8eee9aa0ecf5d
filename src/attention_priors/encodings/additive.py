"""Encodings added to embeddings: sinusoidal, learned, and a toy that adds the position itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention_priors.checks import check_above, check_positive_integers
from attention_priors.encodings.base import AdditiveEncoding


class Sinusoidal(AdditiveEncoding):
    """Sines and cosines of the position: ``p_i = [sin(i ω_0), cos(i ω_0), sin(i ω_1), ...]``.

    ``ω_r = base^(-2r / width)`` in radians per token.

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.5.

    Args:
        width: width of the embeddings, even.
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
        """Return the encoding of each position, ``(..., L, width)``.

        Phases are computed in float64, because float32 loses them at far positions.
        """
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.width
        phase = positions.double().unsqueeze(-1) * self.base**-exponents
        return torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(-2).float()


class LearnedTable(AdditiveEncoding):
    """Learned vector per position, ``p_i = table[i]``, as in GPT-2 and BERT.

    Args:
        width: width of the embeddings.
        max_length: number of positions in the table; a position beyond it raises an error.
    """

    name = "learned"

    def __init__(self, width: int, max_length: int) -> None:
        super().__init__()
        check_positive_integers(width=width, max_length=max_length)
        self.width = width
        self.max_length = max_length
        self.table = nn.Parameter(torch.empty(max_length, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the table to N(0, 0.02²), as GPT-2 does."""
        with torch.no_grad():
            self.table.normal_(std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the vector of each position, ``(..., L, width)``.

        Raises:
            ValueError: a position is past the end of the table.
        """
        # Compiled code cannot read values; there the indexing below raises an error.
        looks = positions.numel() and not torch.compiler.is_compiling()
        if looks and int(positions.max()) >= self.max_length:
            raise ValueError(
                f"position {int(positions.max())} is past the end of the learned table of {self.max_length} positions; "
                "train with a longer max_length, or use a prior instead"
            )
        # Negative positions are left padding, which no query attends to.
        return self.table[positions.clamp(min=0)]


class LinearToy(AdditiveEncoding):
    """Position added to every coordinate: ``p_i = i · 1``.

    The logits of this toy split into four readable terms: content, a drift linear in ``j``, a term linear in ``i``, and
    ``i·j``. The terms show why such an encoding cannot extrapolate.

    Args:
        width: width of the embeddings.
    """

    name = "linear"

    def __init__(self, width: int) -> None:
        super().__init__()
        check_positive_integers(width=width)
        self.width = width

    def forward(self, positions: Tensor) -> Tensor:
        """Return the encoding of each position, ``(..., L, width)``."""
        return positions.to(torch.float32).unsqueeze(-1).expand(*positions.shape, self.width)
