"""Passkey retrieval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

import torch
from transformers import PreTrainedModel

from attention_priors.lab.data import ANSWER_LENGTH, PasskeyTask, depths
from attention_priors.lab.evaluate.answering import forced_predictions
from attention_priors.lab.evaluate.settings import PasskeySettings


class PasskeyRow(TypedDict):
    """How many of the texts at one length and depth came out right."""

    length: int
    depth: float
    trials: int
    correct: int


def retrieves(model: PreTrainedModel, tokens: torch.Tensor, *, chunk: int) -> bool:
    """Whether greedy decoding gives all five digits.

    Args:
        model: a causal language model in evaluation mode.
        tokens: prompt and answer, ``(length + 5,)``.
        chunk: tokens per forward pass.

    Each digit is predicted with the true digits before it. Greedy decoding gets all five right exactly if
    all five of these predictions are right, and one pass is enough to know.
    """
    answer = tokens[-ANSWER_LENGTH:]
    found = forced_predictions(model, tokens[None, :-ANSWER_LENGTH], answer[None], chunk=chunk)
    return bool((found[0] == answer).all())


def passkey_rows(
    model: PreTrainedModel,
    task: PasskeyTask,
    settings: PasskeySettings,
    *,
    chunk: int,
    seed: int,
    done: int = 0,
) -> Iterator[PasskeyRow]:
    """Measure depth by depth, length by length, in order.

    A text is a function of ``seed``, its length, depth and trial alone, so every scheme reads the same ones
    and an evaluation can go on where it stopped.

    Args:
        model: a causal language model in evaluation mode.
        task: what makes the texts.
        settings: lengths, depths and trials.
        chunk: tokens per forward pass.
        seed: of the texts.
        done: number of rows that are there already, and are skipped.
    """
    grid = [(length, index) for length in settings.lengths for index in range(settings.depths)]
    all_depths = depths(settings.depths)
    for length, index in grid[done:]:
        correct = 0
        for trial in range(settings.trials):
            generator = torch.Generator().manual_seed(_text_seed(seed, length, index, trial))
            sample = task.sample(length, all_depths[index], generator)
            correct += retrieves(model, sample.tokens, chunk=chunk)
        yield {"length": length, "depth": all_depths[index], "trials": settings.trials, "correct": correct}


def has_given_up(rows: list[PasskeyRow], settings: PasskeySettings) -> str | None:
    """Why the lengths that are left need not be tried; None if they should be.

    Args:
        rows: what has been measured, whole lengths at a time.
        settings: says after how many lengths without a single success to stop.
    """
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    last = lengths[-settings.stop_after_zeros :] if settings.stop_after_zeros else []
    if not last or len(last) < (settings.stop_after_zeros or 0):
        return None
    if any(row["correct"] for row in rows if row["length"] in last):
        return None
    return f"no pass key retrieved at {len(last)} lengths running ({', '.join(map(str, last))} tokens)"


def _text_seed(seed: int, length: int, index: int, trial: int) -> int:
    """One number for one text. PyTorch reads 32 bits of it, so it is mixed rather than packed."""
    mixed = seed
    for part in (length, index, trial):
        mixed = (mixed * 1_000_003 + part + 1) % (2**31 - 1)
    return mixed
