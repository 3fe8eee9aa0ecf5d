"""How a model goes on with a genome, against how it really goes on."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_priors.lab.data.genomes import BASES, NUCLEOTIDES, is_nucleotide_tokenizer
from attention_priors.lab.tasks.generation import continue_texts, draw_among
from attention_priors.lab.tasks.plan import COMPLETED
from attention_priors.lab.tasks.task import OnShare, Record, Task, Unit, tokens_as_share

GC_WINDOW = 25
"""Bases (GOAT, Figure 4c)."""


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: torch.Tensor,
    seeds: Sequence[int],
    *,
    chunk: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Draw continuations of one prompt from the model's own probabilities of A, C, G and T, at temperature 1.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: :func:`~attention_priors.lab.data.nucleotide_tokenizer`.
        prompt: ``(L,)``.
        seeds: one for each continuation.
        chunk: tokens per forward pass.
        on_tokens: called with the number of tokens that the prompt has been read up to.

    Returns:
        ``COMPLETED`` bases for each seed, which do not depend on the other seeds but for rounding.
    """
    vocabulary = tokenizer.get_vocab()
    bases = [vocabulary[base] for base in BASES]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    prompts = prompt.expand(len(seeds), -1)
    draw = draw_among(bases, generators)
    found = continue_texts(model, prompts, COMPLETED, draw, chunk=chunk, on_tokens=on_tokens)
    return ["".join(BASES[bases.index(token)] for token in row) for row in found]


def completion_seed(seed: int, length: int, document: str, trial: int) -> int:
    """One number for one continuation: a hash, which does not depend on what else is continued."""
    digest = hashlib.sha256(json.dumps([seed, length, document, trial]).encode()).digest()
    return int.from_bytes(digest[:8], "big") // 2


def identity(output: str, expected: str) -> float:
    """Share of places with the same letter.

    Raises:
        ValueError: the two have different lengths, or none.
    """
    if not expected or len(output) != len(expected):
        raise ValueError(
            f"output and expected must be of one length, at least 1; they have {len(output)} and {len(expected)}"
        )
    return sum(one == other for one, other in zip(output, expected, strict=True)) / len(expected)


def chance_identity(expected: str) -> float:
    """The identity to expect of letters drawn one by one with the truth's frequencies: the sum of their squares."""
    return math.fsum((count / len(expected)) ** 2 for count in Counter(expected).values())


def gc_trajectory(bases: str, window: int = GC_WINDOW) -> np.ndarray:
    """Share of G and C among the bases of each window, the windows one base apart: ``(len(bases) - window + 1,)``.

    Raises:
        ValueError: ``window`` is below 1 or above the number of bases.
    """
    if not 1 <= window <= len(bases):
        raise ValueError(f"window must be from 1 to the number of bases, {len(bases)}; it is {window}")
    strong = np.array([base in "GC" for base in bases], dtype=np.float64)
    sums = np.concatenate([[0.0], strong.cumsum()])
    return (sums[window:] - sums[:-window]) / window


def gc_correlation(output: str, expected: str) -> float | None:
    """Pearson's r of the two GC trajectories; None where one of them is level, which has none."""
    one, other = gc_trajectory(output), gc_trajectory(expected)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


class GenomeCompletion(Task):
    """Continue pieces of a genome by bases drawn from the model (GOAT, Figure 4c)."""

    def identity(self) -> dict[str, Any]:
        """Return all that determines pieces and draws."""
        return {"seed": self.plan.seed, "bases": COMPLETED} | self.texts.corpus.description()

    def tokens_read(self, length: int) -> int:
        """Return the tokens of a piece and of its continuation but for the last base, which is not read."""
        return length + COMPLETED - 1

    def check(self) -> None:
        """Raise a ValueError if the model is not one of genomes, or there are no pieces, or too few."""
        if not is_nucleotide_tokenizer(self.subject.tokenizer):
            raise ValueError(f"tasks: {self.name!r} needs a model with the tokenizer {NUCLEOTIDES!r}")
        super().check()

    def check_length(self, length: int) -> None:
        """Raise a ValueError if there are no pieces of a length, or too few."""
        pieces = self._pieces(length)
        if not pieces:
            raise ValueError(
                f"lengths: {self.texts.source} has no {length} tokens and {COMPLETED} known bases after them in one "
                f"document, for the task {self.name!r}"
            )
        self.check_number(length, len(pieces))

    def _pieces(self, length: int) -> list[tuple[str, torch.Tensor]]:
        """Return pieces of ``length`` tokens and the known bases after them."""
        vocabulary = self.subject.tokenizer.get_vocab()
        bases = torch.tensor([vocabulary[base] for base in BASES])
        return self.texts.windows(length + COMPLETED, lambda tokens: bool(torch.isin(tokens[-COMPLETED:], bases).all()))

    def groups(self, length: int) -> Iterator[Sequence[Unit]]:
        """Yield the trials of each piece, a batch at a time."""
        for document, tokens in self._pieces(length):
            trials = [Unit({"document": document, "trial": trial}, length, tokens) for trial in range(self.plan.trials)]
            for start in range(0, len(trials), self.setting.batch):
                yield trials[start : start + self.setting.batch]

    def ask(self, length: int, units: Sequence[Unit], on_share: OnShare) -> list[Record]:
        """Return the continuations, and the true one."""
        tokens, tokenizer = units[0].content, self.subject.tokenizer
        outputs = complete(
            self.subject.model,
            tokenizer,
            tokens[:length],
            [completion_seed(self.plan.seed, length, unit.key["document"], unit.key["trial"]) for unit in units],
            chunk=self.setting.chunk,
            on_tokens=tokens_as_share(on_share, length),
        )
        expected = str(tokenizer.decode(tokens[length:]))
        return [{"expected": expected, "continuation": output} for output in outputs]
