"""Positions that are added to embeddings: sinusoidal, learned, and a toy that adds the position itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention_priors.checks import check_above, check_positive_integers
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


class LearnedTable(AdditiveEncoding):
    """A learned vector per position, ``p_i = table[i]``, as in GPT-2 and BERT.

    Args:
        width: of the embeddings.
        max_length: number of positions in the table; a position beyond it is an error.
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
        """Start anew: N(0, 0.02²), as GPT-2."""
        with torch.no_grad():
            self.table.normal_(std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """``(..., L, width)``.

        Raises:
            ValueError: at a position that the table does not have.
        """
        # What is compiled does not look at values; there the indexing below fails.
        looks = positions.numel() and not torch.compiler.is_compiling()
        if looks and int(positions.max()) >= self.max_length:
            raise ValueError(
                f"position {int(positions.max())} lies past the learned table's {self.max_length} positions; a "
                "learned table cannot extrapolate: use a longer max_length in training, or a prior"
            )
        # Positions before 0 are left padding, which nothing attends to.
        return self.table[positions.clamp(min=0)]


class LinearToy(AdditiveEncoding):
    """``p_i = i · 1``: the position, added to every coordinate.

    A toy whose logits split into four terms that can be read: content, a drift linear in ``j``, a term
    linear in ``i``, and ``i·j``. It shows why such an encoding cannot extrapolate.

    Args:
        width: of the embeddings.
    """

    name = "linear"

    def __init__(self, width: int) -> None:
        super().__init__()
        check_positive_integers(width=width)
        self.width = width

    def forward(self, positions: Tensor) -> Tensor:
        """``(..., L, width)``."""
        return positions.to(torch.float32).unsqueeze(-1).expand(*positions.shape, self.width)
