"""Training rows of one length: packed documents, mixed with retrieval texts at given ratios."""

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
"""Label of tokens without a loss."""

_ROUNDING = 1e-9
"""Tolerance for rounding errors in ratios that sum to 1."""


class EpochOrder:
    """Sequence of shuffled epochs, in which entry ``i`` depends only on the seed and ``i``.

    Each epoch is a permutation of the integers below ``count``.

    Args:
        count: Number of entries per epoch.
        seed: Seed of the permutations, together with the number of the epoch.
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


class Rows(Dataset[dict[str, Tensor]]):
    """Dataset of rows of one length; subclasses define ``__getitem__``.

    Args:
        context_length: Number of tokens per row, at least 2.
        num_rows: Number of rows, at least 1.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, context_length: int, num_rows: int) -> None:
        if context_length < 2:
            raise ValueError(f"context_length must be at least 2 tokens; it is {context_length}")
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1; it is {num_rows}")
        self._context_length, self._num_rows = context_length, num_rows

    def __len__(self) -> int:
        return self._num_rows

    def _check(self, index: int) -> None:
        if not 0 <= index < self._num_rows:
            raise IndexError(f"index must be from 0 to {self._num_rows - 1}; it is {index}")


class TrainingMixture(Rows):
    """Dataset of rows of packed documents for a causal language model.

    A row is a random window of the documents. With the probabilities in ``retrieval``, the row starts with a retrieval
    text of uniformly drawn length, and the window fills the rest. Row ``i`` depends only on ``seed`` and ``i``, so
    training can resume at any row, and the number of workers does not change the rows.

    Each row has these fields of shape ``(context_length,)``:

    - ``input_ids`` (int64).
    - ``labels`` (int64): the input ids, unshifted, because the model shifts them. The first token of each document has
      -100, so that no document is predicted from the document before.
    - ``document_ids`` (int64): 0, 1, 2, ... for the documents of the row. Each document is a contiguous run.
    - ``loss_weights`` (float32): 0 where the label is -100, the share's ``answer_weight`` for answer tokens of a
      retrieval text, 1 elsewhere.

    Args:
        stream: Training documents with at least ``context_length`` tokens in total.
        context_length: Number of tokens per row, at least 2.
        num_rows: Number of rows, at least 1.
        seed: Seed of the rows. Any integer is valid.
        retrieval: Retrieval texts at the start of rows, such as pass keys and needles. Their ratios sum to at most 1.
            The remaining rows are documents alone.

    Raises:
        ValueError: An argument is out of range, or no text of a share fits into a row.
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
        super().__init__(context_length, num_rows)
        total = math.fsum(share.ratio for share in retrieval)
        if total > 1 + _ROUNDING:
            raise ValueError(f"the ratios of retrieval must sum to 1 at most; they sum to {total:g}")
        self._shares = [(share, share.least_length(context_length)) for share in retrieval]
        if len(stream) < context_length:
            raise ValueError(f"stream has {len(stream)} tokens: expected at least {context_length} (one row)")
        self._stream = stream
        self._seed = seed

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._check(index)
        generator = torch.Generator().manual_seed(row_seed(self._seed, index))
        drawn = self._draw_text(generator)
        if drawn is None:
            return packed_row(*self._draw_window(self._context_length, generator))
        share, text = drawn
        size = text.tokens.numel()
        window, document_ids = self._draw_window(self._context_length - size, generator)
        row = packed_row(torch.cat([text.tokens, window]), torch.cat([torch.zeros_like(text.tokens), document_ids + 1]))
        for start, end in text.answers:
            row["loss_weights"][start:end] = share.answer_weight
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
        """Draw a window of the documents; return its tokens and document ids, which count from 0."""
        start = int(torch.randint(len(self._stream) - size + 1, (), generator=generator))
        document_ids = self._stream.document_ids[start : start + size]
        return self._stream.tokens[start : start + size].clone(), document_ids - document_ids[:1]


def packed_row(input_ids: Tensor, document_ids: Tensor) -> dict[str, Tensor]:
    """Return a row of packed documents with the fields of :class:`TrainingMixture` and weight 1 for every label.

    Args:
        input_ids: Tokens, int64, shape ``(L,)``.
        document_ids: Document of each token, shape ``(L,)``; each document is a contiguous run. The row counts
            documents from 0.
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
    """Stack rows of :class:`TrainingMixture` into a batch of tensors of shape ``(len(rows), context_length)``."""
    return {field: torch.stack([row[field] for row in rows]) for field in rows[0]}


def row_seed(seed: int, index: int) -> int:
    """Return the seed of one row, a hash, so that neighbouring rows and seeds are uncorrelated."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "big")


@dataclass(frozen=True)
class RetrievalText:
    """A prompt with a question about its content, and the answer. Further questions with answers may follow.

    Attributes:
        tokens: Tokens of the prompt, of the answer, and of all further questions and answers, int64, shape ``(L,)``.
        answers: Start and end of each answer, as indices into ``tokens``.
    """

    tokens: Tensor
    answers: tuple[tuple[int, int], ...]

    @property
    def answer_start(self) -> int:
        """Index of the first answer's first token, which is the number of prompt tokens."""
        return self.answers[0][0]

    @property
    def prompt(self) -> Tensor:
        """Tokens of the prompt, shape ``(answer_start,)``."""
        return self.tokens[: self.answer_start]

    @property
    def answer(self) -> Tensor:
        """Tokens of the first answer."""
        return self.tokens[slice(*self.answers[0])]


class RetrievalTexts(Protocol):
    """Generator of retrieval texts of one kind, of any length from :attr:`shortest_text` on."""

    @property
    def name(self) -> str:
        """Name in error messages."""
        ...

    @property
    def shortest_text(self) -> int:
        """Length of the shortest text in tokens, including the answer.

        Raises:
            ValueError: The texts cannot be trained on.
        """
        ...

    def draw_text(self, length: int, generator: torch.Generator) -> RetrievalText:
        """Draw a text with as much haystack as fits into ``length`` tokens, including the answer.

        Args:
            length: Largest number of tokens, at least :attr:`shortest_text`.
            generator: Only source of randomness.
        """
        ...


@dataclass(frozen=True)
class RetrievalShare:
    """Retrieval texts of one kind, as a share of the training rows.

    Attributes:
        texts: Generator of the texts.
        ratio: Probability that a row begins with a text, above 0 and at most 1.
        minimum_length: Smallest drawn length in tokens, including the answer. ``None`` stands for the length of the
            shortest text.
        answer_weight: Loss weight of an answer token, above 0.

    Raises:
        ValueError: A number is out of range.
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
        """Return the smallest drawn length for rows of ``context_length`` tokens.

        Raises:
            ValueError: No text fits into a row, or ``minimum_length`` is shorter than any text or longer than a row.
        """
        shortest, name = self.texts.shortest_text, self.texts.name
        if shortest > context_length:
            raise ValueError(
                f"context_length must be at least {shortest}, the length of the shortest {name} text with its answer; "
                f"it is {context_length}"
            )
        length = shortest if self.minimum_length is None else self.minimum_length
        if not shortest <= length <= context_length:
            raise ValueError(
                f"minimum_length of {name} must be from {shortest} (its shortest text) to {context_length} "
                f"(context_length); it is {length}"
            )
        return length
