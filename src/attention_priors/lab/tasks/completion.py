"""Continuation of genomes by a model, compared with the true continuation."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_priors.lab.data.genomes import BASES, NUCLEOTIDES, is_nucleotide_tokenizer
from attention_priors.lab.tasks.generation import continue_texts, draw_among
from attention_priors.lab.tasks.plan import COMPLETED
from attention_priors.lab.tasks.task import Record, Task, Unit

GC_WINDOW = 25
"""Window size in bases (GOAT, Figure 4c)."""


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: torch.Tensor,
    seeds: Sequence[int],
    *,
    chunk: int,
) -> list[str]:
    """Draw continuations of one prompt from the model's probabilities of A, C, G and T, at temperature 1.

    Args:
        model: causal language model in evaluation mode.
        tokenizer: :func:`~attention_priors.lab.data.genomes.nucleotide_tokenizer`.
        prompt: Token ids, ``(L,)``. All seeds continue this prompt.
        seeds: One seed per continuation.
        chunk: Tokens per forward pass.

    Returns:
        ``COMPLETED`` bases for each seed. Up to rounding, they do not depend on the other seeds.
    """
    vocabulary = tokenizer.get_vocab()
    bases = [vocabulary[base] for base in BASES]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    prompts = prompt.expand(len(seeds), -1)
    found = continue_texts(model, prompts, COMPLETED, draw_among(bases, generators), chunk=chunk)
    return ["".join(BASES[bases.index(token)] for token in row) for row in found]


def completion_seed(seed: int, length: int, document: str, trial: int) -> int:
    """Return the seed of one continuation: a hash, independent of all other continuations."""
    digest = hashlib.sha256(json.dumps([seed, length, document, trial]).encode()).digest()
    return int.from_bytes(digest[:8], "big") // 2


def identity(output: str, expected: str) -> float:
    """Return the share of positions with the same letter.

    Raises:
        ValueError: the lengths differ, or both strings are empty.
    """
    if not expected or len(output) != len(expected):
        raise ValueError(
            f"output and expected must be of one length, at least 1; they have {len(output)} and {len(expected)}"
        )
    return sum(one == other for one, other in zip(output, expected, strict=True)) / len(expected)


def chance_identity(expected: str) -> float:
    """Return the expected identity of letters drawn with the truth's frequencies: the sum of their squares."""
    return math.fsum((count / len(expected)) ** 2 for count in Counter(expected).values())


def gc_trajectory(bases: str, window: int = GC_WINDOW) -> np.ndarray:
    """Return the share of G and C in each window, ``(len(bases) - window + 1,)``; windows start one base apart.

    Raises:
        ValueError: ``window`` is below 1 or above the number of bases.
    """
    if not 1 <= window <= len(bases):
        raise ValueError(f"window must be from 1 to the number of bases, {len(bases)}; it is {window}")
    strong = np.array([base in "GC" for base in bases], dtype=np.float64)
    sums = np.concatenate([[0.0], strong.cumsum()])
    return (sums[window:] - sums[:-window]) / window


def gc_correlation(output: str, expected: str) -> float | None:
    """Return Pearson's r of the two GC trajectories, or None if one of them is constant."""
    one, other = gc_trajectory(output), gc_trajectory(expected)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


class GenomeCompletion(Task):
    """Continue pieces of a genome with bases drawn from the model (GOAT, Figure 4c)."""

    def identity(self) -> dict[str, Any]:
        """Return everything that determines pieces and draws."""
        return {"seed": self.plan.seed, "bases": COMPLETED} | self.texts.corpus.description()

    def tokens_read(self, length: int) -> int:
        """Return the tokens of a piece and its continuation, without the last base, which is not read."""
        return length + COMPLETED - 1

    def check(self) -> None:
        """Raise a ValueError if the model does not use the nucleotide tokenizer, or there are too few pieces."""
        if not is_nucleotide_tokenizer(self.subject.tokenizer):
            raise ValueError(f"tasks: {self.name!r} needs a model with the tokenizer {NUCLEOTIDES!r}")
        super().check()

    def check_length(self, length: int) -> None:
        """Raise a ValueError if there are too few pieces of this length."""
        pieces = self._pieces(length)
        if not pieces:
            raise ValueError(
                f"lengths: {self.texts.source} has no document with {length} tokens followed by {COMPLETED} known "
                f"bases, for the task {self.name!r}"
            )
        self.check_number(length, len(pieces))

    def _pieces(self, length: int) -> list[tuple[str, torch.Tensor]]:
        """Return pieces of ``length`` tokens, each with the known bases after it."""
        vocabulary = self.subject.tokenizer.get_vocab()
        bases = torch.tensor([vocabulary[base] for base in BASES])
        return self.texts.windows(length + COMPLETED, lambda tokens: bool(torch.isin(tokens[-COMPLETED:], bases).all()))

    def groups(self, length: int) -> Iterator[Sequence[Unit]]:
        """Yield the trials of each piece in batches."""
        for document, tokens in self._pieces(length):
            trials = [Unit({"document": document, "trial": trial}, length, tokens) for trial in range(self.plan.trials)]
            for start in range(0, len(trials), self.setting.batch):
                yield trials[start : start + self.setting.batch]

    def ask(self, length: int, units: Sequence[Unit]) -> list[Record]:
        """Return the continuations and the true continuation."""
        tokens, tokenizer = units[0].content, self.subject.tokenizer
        outputs = complete(
            self.subject.model,
            tokenizer,
            tokens[:length],
            [completion_seed(self.plan.seed, length, unit.key["document"], unit.key["trial"]) for unit in units],
            chunk=self.setting.chunk,
        )
        expected = str(tokenizer.decode(tokens[length:]))
        return [{"expected": expected, "continuation": output} for output in outputs]
