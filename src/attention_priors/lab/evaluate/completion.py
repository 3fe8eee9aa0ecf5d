"""How a model goes on with a genome, against how it really goes on."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_priors.lab.data.nucleotides import BASES
from attention_priors.lab.evaluate.answering import sampled
from attention_priors.lab.evaluate.plan import COMPLETED

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
    found = sampled(model, prompts, COMPLETED, generators, among=bases, chunk=chunk, on_tokens=on_tokens)
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
