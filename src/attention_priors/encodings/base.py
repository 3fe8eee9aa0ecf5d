"""Base classes of encodings: positions that enter embeddings, queries, keys or values.

A prior adds to the logit. An encoding changes the vectors of the content score, and so mixes content and position.
Priors and encodings can be combined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from attention_priors.config import Described


class Encoding(Described, nn.Module):
    """Encoding of positions. Additive, rotary and relative encodings enter a model at different places."""


class AdditiveEncoding(Encoding, ABC):
    """Encoding added to the token embeddings, before the first layer."""

    @abstractmethod
    def forward(self, positions: Tensor) -> Tensor:
        """Return the vectors to add.

        Args:
            positions: integers ``(..., L)``, in tokens.

        Returns:
            Floating-point vectors, ``(..., L, width)``.
        """
