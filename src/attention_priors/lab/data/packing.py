"""Training rows of one length: corpus text, and retrieval texts mixed in at stated ratios."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from attention_priors.checks import check_positive_integers
from attention_priors.lab.data.tokenizer import TokenStream

IGNORED_LABEL = -100
"""Label of a token that has no loss."""

_ROUNDING = 1e-9
"""Rounding error of ratios that sum to 1."""


class EpochOrder:
    """Place ``i`` is a function of the seed and ``i`` alone, and each epoch has each of ``count`` things once.

    Args:
        count: number of things.
        seed: with the epoch, the seed of each permutation.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._drawn: tuple[int, np.ndarray] | None = None

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self._count)
        if self._drawn is None or self._drawn[0] != epoch:
            kind = np.uint32 if self._count < 2**32 else np.uint64
            order = np.random.default_rng([self._seed, epoch]).permutation(np.arange(self._count, dtype=kind))
            self._drawn = (epoch, order)
        return int(self._drawn[1][place])


class TrainingMixture(Dataset[dict[str, Tensor]]):
    """Rows of packed documents for a causal language model.

    Row ``i`` is a function of ``seed`` and ``i`` alone, so training can stop and go on at any row, and
    workers do not change what is read. A row is a random window of the documents; with the stated
    probabilities it starts with a retrieval text, of a length drawn uniformly, and the window fills the rest.

    Each row has, of shape ``(context_length,)``:

    - ``input_ids`` (int64);
    - ``labels`` (int64): the same tokens, in the same places (the model shifts them), but -100 for the first
      token of each document, so that no document is predicted from the one before;
    - ``document_ids`` (int64): 0, 1, 2, ... for the documents of the row, each a contiguous run;
    - ``loss_weights`` (float32): 1 for each label, the share's ``answer_weight`` for the answer tokens of a
      retrieval text, 0 where the label is -100.

    Args:
        stream: Documents to train on, with at least ``context_length`` tokens in all.
        context_length: Tokens of a row, at least 2.
        num_rows: Rows of the dataset, at least 1.
        seed: Selects the rows; any integer.
        retrieval: The retrieval texts that rows begin with, such as pass keys and needles; their ratios sum to 1
            at most, and the other rows are documents alone.

    Raises:
        ValueError: an argument is outside the range given above, or no text of some share fits into a row.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        context_length: int,
        num_rows: int,
        seed: int,
        retrieval: Sequence[RetrievalShare] = (),
    ) -> None:
        if context_length < 2:
            raise ValueError(f"context_length must be at least 2 tokens; it is {context_length}")
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1; it is {num_rows}")
        total = math.fsum(share.ratio for share in retrieval)
        if total > 1 + _ROUNDING:
            raise ValueError(f"the ratios of retrieval must sum to 1 at most; they sum to {total:g}")
        self._shares = [(share, share.least_length(context_length)) for share in retrieval]
        if len(stream) < context_length:
            raise ValueError(f"stream has {len(stream)} tokens: expected at least {context_length} (one row)")
        self._stream = stream
        self._context_length = context_length
        self._num_rows = num_rows
        self._seed = seed

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._num_rows:
            raise IndexError(f"index must be from 0 to {self._num_rows - 1}; it is {index}")
        generator = torch.Generator().manual_seed(row_seed(self._seed, index))
        drawn = self._draw_text(generator)
        if drawn is None:
            return packed_row(*self._draw_window(self._context_length, generator))
        share, text = drawn
        size = text.tokens.numel()
        window, document_ids = self._draw_window(self._context_length - size, generator)
        row = packed_row(torch.cat([text.tokens, window]), torch.cat([torch.zeros_like(text.tokens), document_ids + 1]))
        row["loss_weights"][text.answer_start : size] = share.answer_weight
        return row

    def _draw_text(self, generator: torch.Generator) -> tuple[RetrievalShare, RetrievalText] | None:
        if not self._shares:
            return None
        chance = float(torch.rand((), generator=generator))
        for share, least in self._shares:
            if chance < share.ratio:
                length = int(torch.randint(least, self._context_length + 1, (), generator=generator))
                return share, share.texts.draw_text(length, generator)
            chance -= share.ratio
        return None

    def _draw_window(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a window of the documents: its tokens, and their documents counted from 0."""
        start = int(torch.randint(len(self._stream) - size + 1, (), generator=generator))
        document_ids = self._stream.document_ids[start : start + size]
        return self._stream.tokens[start : start + size].clone(), document_ids - document_ids[:1]


def packed_row(input_ids: Tensor, document_ids: Tensor) -> dict[str, Tensor]:
    """Return a row of packed documents, with the fields of `TrainingMixture` and every label's weight 1.

    Args:
        input_ids: Tokens, int64, shape ``(L,)``.
        document_ids: The document of each, a contiguous run; counted from 0 in the row.
    """
    labels = input_ids.clone()
    labels[0] = IGNORED_LABEL
    labels[1:][document_ids[1:] != document_ids[:-1]] = IGNORED_LABEL
    return {
        "input_ids": input_ids,
        "labels": labels,
        "document_ids": document_ids - document_ids[:1],
        "loss_weights": (labels != IGNORED_LABEL).to(torch.float32),
    }


def collate_rows(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows of `TrainingMixture` into a batch of tensors of shape ``(len(rows), context_length)``."""
    return {field: torch.stack([row[field] for row in rows]) for field in rows[0]}


def row_seed(seed: int, index: int) -> int:
    """Return a seed for one row: a hash, so that neighbouring rows and seeds have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "big")


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
        """Tokens that the model reads, shape ``(answer_start,)``."""
        return self.tokens[: self.answer_start]

    @property
    def answer(self) -> Tensor:
        """Tokens that the model is to write."""
        return self.tokens[self.answer_start :]


class RetrievalTexts(Protocol):
    """Makes retrieval texts of one kind, of any length from a shortest one on."""

    @property
    def name(self) -> str:
        """Name in error messages."""
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
