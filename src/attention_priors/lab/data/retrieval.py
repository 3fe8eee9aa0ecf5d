"""Texts that hide something and end with the answer to a question for it: what training mixes into its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention_priors.checks import check_positive_integers


@dataclass(frozen=True)
class RetrievalText:
    """A text that asks for something in it, and the answer.

    Attributes:
        tokens: The prompt and the tokens of the answer, int64, shape ``(prompt + answer,)``.
        answer_start: Index of the answer's first token: the model has read exactly that many tokens when it predicts
            it.
    """

    tokens: Tensor
    answer_start: int

    @property
    def prompt(self) -> Tensor:
        """What the model reads, shape ``(answer_start,)``."""
        return self.tokens[: self.answer_start]

    @property
    def answer(self) -> Tensor:
        """What the model is to write."""
        return self.tokens[self.answer_start :]


class RetrievalTexts(Protocol):
    """Makes retrieval texts of one kind, of any length from a shortest one on."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def shortest_text(self) -> int:
        """Tokens that have room for a text and its answer.

        Raises:
            ValueError: its texts cannot be trained on.
        """
        ...

    def draw_text(self, length: int, generator: torch.Generator) -> RetrievalText:
        """A text that has ``length`` tokens at most, its answer included, and as much haystack as that has room for.

        Args:
            length: At least :attr:`shortest_text`.
            generator: Everything that is random is drawn from it alone.
        """
        ...


@dataclass(frozen=True)
class RetrievalShare:
    """Retrieval texts of one kind, as a share of training rows.

    Attributes:
        texts: What makes them.
        ratio: Probability that a row begins with one, above 0 and at most 1.
        minimum_length: The least length in tokens, the answer included, that is drawn for a text; ``None`` for the
            shortest there is.
        answer_weight: Loss weight of an answer token, above 0.

    Raises:
        ValueError: a number is outside the range given above.
    """

    texts: RetrievalTexts
    ratio: float
    minimum_length: int | None = None
    answer_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio of {self.texts.name} must be above 0 and at most 1; it is {self.ratio}")
        if not 0 < self.answer_weight < float("inf"):
            raise ValueError(
                f"answer_weight of {self.texts.name} must be above 0 and finite; it is {self.answer_weight}"
            )
        if self.minimum_length is not None:
            check_positive_integers(minimum_length=self.minimum_length)

    def least_length(self, context_length: int) -> int:
        """The least length that is drawn for rows of ``context_length`` tokens.

        Raises:
            ValueError: no text fits into a row, or ``minimum_length`` is shorter than any text or longer than a row.
        """
        shortest, name = self.texts.shortest_text, self.texts.name
        if shortest > context_length:
            raise ValueError(
                f"context_length must be at least {shortest}, what the shortest {name} text and its answer need; it is "
                f"{context_length}"
            )
        length = shortest if self.minimum_length is None else self.minimum_length
        if not shortest <= length <= context_length:
            raise ValueError(
                f"minimum_length of {name} must be from {shortest} (its shortest text) to {context_length} "
                f"(context_length); it is {length}"
            )
        return length
