"""The toy encoding that adds the position itself."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_priors.checks import check_positive_integers
from attention_priors.encodings.base import AdditiveEncoding


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
