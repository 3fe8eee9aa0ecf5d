"""Training rows of one length: corpus text, and passkey texts mixed in at a stated ratio."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from attention_priors.data.passkey import PasskeySample, PasskeyTask
from attention_priors.data.stream import TokenStream

IGNORED_LABEL = -100
"""Label of a token that has no loss."""


class TrainingMixture(Dataset[dict[str, Tensor]]):
    """Rows of packed documents for a causal language model.

    Row ``i`` is a function of ``seed`` and ``i`` alone, so training can stop and go on at any row, and
    workers do not change what is read. A row is a random window of the documents; with probability
    ``passkey_ratio`` it starts with a passkey text, of a length and a depth drawn uniformly, and the window
    fills the rest.

    Each row has, of shape ``(context_length,)``:

    - ``input_ids`` (int64);
    - ``labels`` (int64): the same tokens, in the same places (the model shifts them), but -100 for the first
      token of each document, so that no document is predicted from the one before;
    - ``document_ids`` (int64): 0, 1, 2, ... for the documents of the row, each a contiguous run;
    - ``loss_weights`` (float32): 1 for each label, ``answer_weight`` for the answer tokens of a passkey
      text, 0 where the label is -100.

    Args:
        stream: Documents to train on, with at least ``context_length`` tokens in all.
        context_length: Tokens of a row, at least 2.
        num_rows: Rows of the dataset, at least 1.
        seed: Selects the rows; any integer.
        passkey_task: What makes the passkey texts; needed when ``passkey_ratio`` is above 0.
        passkey_ratio: Probability, from 0 to 1, that a row starts with a passkey text.
        passkey_min_length: Shortest passkey text in tokens, its answer included, from
            ``passkey_task.minimum_length`` and the answer's digits to ``context_length``; ``None`` for the
            shortest there is.
        answer_weight: Loss weight of an answer token, above 0.

    Raises:
        ValueError: an argument is outside the range given above.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        context_length: int,
        num_rows: int,
        seed: int,
        passkey_task: PasskeyTask | None = None,
        passkey_ratio: float = 0.0,
        passkey_min_length: int | None = None,
        answer_weight: float = 1.0,
    ) -> None:
        if context_length < 2:
            raise ValueError(f"context_length must be at least 2 tokens; it is {context_length}")
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1; it is {num_rows}")
        if not 0 <= passkey_ratio <= 1:
            raise ValueError(f"passkey_ratio must be from 0 to 1; it is {passkey_ratio}")
        if not 0 < answer_weight < float("inf"):
            raise ValueError(f"answer_weight must be above 0 and finite; it is {answer_weight}")
        self._passkey: tuple[PasskeyTask, float, int] | None = None
        if passkey_ratio > 0:
            if passkey_task is None:
                raise ValueError(f"passkey_task must be given when passkey_ratio is above 0; it is {passkey_ratio}")
            if passkey_task.joins_digits:
                raise ValueError(
                    "passkey_task must have a tokenizer that gives every digit its own token; it joins some"
                )
            min_length = _checked_min_length(passkey_min_length, passkey_task, context_length)
            self._passkey = (passkey_task, passkey_ratio, min_length)
        if len(stream) < context_length:
            raise ValueError(f"stream has {len(stream)} tokens: expected at least {context_length} (one row)")
        self._stream = stream
        self._context_length = context_length
        self._num_rows = num_rows
        self._seed = seed
        self._answer_weight = answer_weight

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._num_rows:
            raise IndexError(f"index must be from 0 to {self._num_rows - 1}; it is {index}")
        generator = torch.Generator().manual_seed(row_seed(self._seed, index))
        passkey = self._draw_passkey(generator)
        input_ids, document_ids = self._draw_window(
            self._context_length - (0 if passkey is None else passkey.tokens.numel()), generator
        )
        if passkey is not None:
            input_ids = torch.cat([passkey.tokens, input_ids])
            document_ids = torch.cat([torch.zeros_like(passkey.tokens), document_ids + 1])

        row = packed_row(input_ids, document_ids)
        if passkey is not None:
            row["loss_weights"][passkey.answer_start : passkey.tokens.numel()] = self._answer_weight
        return row

    def _draw_passkey(self, generator: torch.Generator) -> PasskeySample | None:
        if self._passkey is None:
            return None
        task, ratio, min_length = self._passkey
        if float(torch.rand((), generator=generator)) >= ratio:
            return None
        length = int(torch.randint(min_length, self._context_length + 1, (), generator=generator))
        depth = float(torch.rand((), generator=generator))
        return task.sample(length - task.digits, depth, generator)

    def _draw_window(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A random window of the documents: its tokens, and their documents counted from 0."""
        start = int(torch.randint(len(self._stream) - size + 1, (), generator=generator))
        document_ids = self._stream.document_ids[start : start + size]
        return self._stream.tokens[start : start + size].clone(), document_ids - document_ids[:1]


def packed_row(input_ids: Tensor, document_ids: Tensor) -> dict[str, Tensor]:
    """A row of packed documents, with the fields of `TrainingMixture` and every label's weight 1.

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


def _checked_min_length(min_length: int | None, task: PasskeyTask, context_length: int) -> int:
    shortest = task.minimum_length + task.digits
    if min_length is None:
        min_length = shortest
    if not shortest <= min_length <= context_length:
        raise ValueError(
            f"passkey_min_length must be from {shortest} (the shortest passkey text) to {context_length} "
            f"(context_length); it is {min_length}"
        )
    return min_length


def row_seed(seed: int, index: int) -> int:
    """A seed for one row; a hash, so that neighbouring rows and seeds have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "big")
