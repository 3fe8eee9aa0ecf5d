"""Base classes of encodings: position that enters embeddings, queries, keys or values.

A prior adds to the logit. An encoding changes the vectors from which the logit's content part is made, so
content and position are entangled in it; the two compose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from attention_priors.config import Described


class Encoding(Described, nn.Module):
    """An encoding of positions. The three kinds below enter a model at three different places."""


class AdditiveEncoding(Encoding, ABC):
    """Added to the token embeddings, once, before the first layer."""

    @abstractmethod
    def forward(self, positions: Tensor) -> Tensor:
        """The vectors to add.

        Args:
            positions: integers ``(..., L)``, in tokens.

        Returns:
            ``(..., L, width)``, floating point.
        """
