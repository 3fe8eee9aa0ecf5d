"""A learned table of positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention_priors.checks import check_positive_integers
from attention_priors.encodings.base import AdditiveEncoding


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
