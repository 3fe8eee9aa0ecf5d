"""Negative log-likelihood by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attention_priors.lab.tasks.copying import HELD_OUT_SEED, CopyMixtureRows
from attention_priors.lab.tasks.generation import token_losses
from attention_priors.lab.tasks.task import Record, Task, Unit


def position_bins(length: int) -> list[tuple[int, int]]:
    """Return ranges ``first..last`` of positions that double in size: 1-1, 2-3, 4-7, ... up to ``length - 1``.

    Position 0 is left out, because nothing precedes it.
    """
    return [(2**k, min(2 ** (k + 1), length) - 1) for k in range((length - 1).bit_length()) if 2**k < length]


def binned(losses: Tensor) -> list[tuple[int, int, float]]:
    """Return first position, last position and summed loss of each range of :func:`position_bins`.

    Args:
        losses: losses of the tokens at positions 1, 2, 3, ..., ``(L - 1,)``.
    """
    bins = position_bins(len(losses) + 1)
    return [(first, last, float(losses[first - 1 : last].sum())) for first, last in bins]


class Perplexity(Task):
    """Measure the loss of each token of held-out texts, by range of positions.

    The task name selects the texts. ``perplexity`` reads the start of documents that are at least as long as the
    longest length, the same documents at every length. ``perplexity_short`` reads whole documents up to a length.
    ``perplexity_windows`` reads pieces of a length, cut from all documents.
    """

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the texts."""
        mixture = self.subject.mixture
        return self.texts.corpus.description() if mixture is None else {"mixture": mixture.model_dump()}

    @cached_property
    def _documents(self) -> list[tuple[str, Tensor]]:
        """Names and tokens of the corpus's documents, or of rows of the model's training mixture."""
        if self.subject.mixture is None:
            return self.texts.corpus.pieces
        length, count = max(self.plan.lengths), self.plan.documents
        rows = CopyMixtureRows(self.subject.mixture, context_length=length, num_rows=count, seed=HELD_OUT_SEED)
        return [(f"row {index}", rows.sample(index).tokens) for index in range(count)]

    def groups(self, length: int) -> Iterator[Sequence[Unit]]:
        """Yield each text in a group of its own."""
        for document, text in self._texts(length):
            yield [Unit({"document": document}, len(text), text)]

    def _texts(self, length: int) -> list[tuple[str, Tensor]]:
        if self.name == "perplexity_windows":
            return self.texts.windows(length)
        begin = self.subject.beginning()
        found: list[tuple[str, Tensor]] = []
        for document, tokens in self._documents:
            size = len(begin) + len(tokens)
            if size >= max(self.plan.lengths) if self.name == "perplexity" else 2 <= size <= length:
                found.append((document, torch.cat([begin, tokens])[:length]))
                if len(found) == self.plan.documents:
                    break
        return found

    def check_length(self, length: int) -> None:
        """Raise a ValueError if there are too few documents of this length."""
        texts = self._texts(length)
        if not texts:
            kind = "between 2 and" if self.name == "perplexity_short" else "at least"
            size = max(self.plan.lengths) if self.name == "perplexity" else length
            raise ValueError(
                f"lengths: no document of {self.texts.source} has {kind} {size} tokens, for the task {self.name!r}"
            )
        self.check_number(length, len(texts))

    def ask(self, length: int, units: Sequence[Unit]) -> list[Record]:
        """Return the summed losses in each range of positions, from :func:`binned`."""
        (unit,) = units
        (losses,) = token_losses(self.subject.model, unit.content[None], chunk=self.setting.chunk)
        return [{"losses": [list(entry) for entry in binned(losses)]}]
