"""What an evaluation asks of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from attention_priors.lab.data import EMBEDDED
from attention_priors.lab.data.needles import NEEDLE_TASKS
from attention_priors.lab.strict_yaml import Strict

COMPLETION = "genome_completion"
PASSKEY_WEIGHT = "passkey_weight"

TASKS = {
    "passkey": "a number of 5 digits between repeated sentences",
    "passkey_8": "the same, with 8 digits",
    "passkey_corpus": "a number of 5 digits in running text, in the words that this package's recipes train with",
    PASSKEY_WEIGHT: "how much of each head's attention the number gets there when it is asked for",
    **dict.fromkeys(NEEDLE_TASKS, "a needle task of RULER"),
    "perplexity": "loss of each token of long documents, by position",
    "perplexity_short": "loss of whole documents no longer than a length",
    "perplexity_windows": "loss of pieces of a length, cut from all documents",
    COMPLETION: "how a genome goes on, in 200 bases: identity and GC trajectory against the truth",
    "timing": "milliseconds and memory of one pass, forward and with gradients",
}
"""Names of tasks, and what each is."""

PERPLEXITIES = tuple(name for name in TASKS if name.startswith("perplexity"))
"""The tasks that measure a loss."""

LONGEST_KEY = 8
"""Digits; they stand after a text of the length that is asked for."""

COMPLETED = 200
"""Bases that a model is to write after a piece of a genome (GOAT, Figure 4c)."""


class EvaluationPlan(Strict):
    """Tasks, and all that their texts depend on beside the tokenizer. Lengths are in tokens."""

    tasks: tuple[str, ...]
    lengths: tuple[Annotated[int, Field(gt=1)], ...]
    depths: int = Field(default=20, ge=2)
    """Depths, evenly spaced from the start of a text to its end."""
    trials: int = Field(default=1, gt=0)
    """Texts per length and depth; of a genome, continuations of each piece."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    corpus: str = EMBEDDED
    """Where filler, essays and documents come from: ``embedded`` (its held-out part), a text file, a folder, or
    ``package:NAME`` of an installed Python package; or a FASTA file. In a recipe, what is trained on unless it is
    said, and its held-out part."""
    sentences: Literal["regex", "punkt"] = "regex"
    """What finds the places in an essay where a needle may stand; RULER takes NLTK's punkt, which needs its data."""
    documents: int = Field(default=8, gt=0)
    """At most so many: of ``perplexity`` the first documents that have as many tokens as the longest length, of
    ``perplexity_short`` the first that are short enough; of the other tasks pieces, spread over all there are."""
    passes: int = Field(default=100, gt=0)
    """Of the timing."""
    stop_after_zeros: int | None = Field(default=2, gt=0)
    """A task that has got nothing right at so many lengths running does not go on to longer ones; null to go on."""

    @property
    def longest_text(self) -> int:
        """Tokens that a model must have places for: of the longest text, and of what is asked for after it."""
        reads_alone = (*PERPLEXITIES, PASSKEY_WEIGHT, "timing")
        # The last base that is drawn is not read.
        after = {COMPLETION: COMPLETED - 1} | dict.fromkeys(reads_alone, 0)
        return max(self.lengths) + max(after.get(task, LONGEST_KEY) for task in self.tasks)

    @field_validator("tasks")
    @classmethod
    def _known(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if not tasks:
            raise ValueError(f"at least one task must be named, of {', '.join(TASKS)}")
        for task in tasks:
            if task not in TASKS:
                raise ValueError(f"unknown task {task!r}; there are {', '.join(TASKS)}")
        if len(set(tasks)) < len(tasks):
            raise ValueError(f"tasks must be distinct, got {', '.join(tasks)}")
        return tasks

    @field_validator("lengths")
    @classmethod
    def _rising(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if not lengths:
            raise ValueError("at least one length must be given")
        if list(lengths) != sorted(set(lengths)):
            raise ValueError(f"lengths must rise, got {', '.join(map(str, lengths))}")
        return lengths
