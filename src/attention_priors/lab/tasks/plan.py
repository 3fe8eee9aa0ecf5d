"""The plan of an evaluation: tasks, lengths and numbers of texts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from attention_priors.lab.data import EMBEDDED
from attention_priors.lab.strict_yaml import Strict
from attention_priors.lab.tasks.needles.prompts import NEEDLE_TASKS

COMPLETION = "genome_completion"
PASSKEY_WEIGHT = "passkey_weight"
COPYING = "copying"

TASKS = {
    "passkey": "a number of 5 digits between repeated sentences",
    "passkey_8": "the same, with 8 digits",
    "passkey_corpus": "a number of 5 digits in running text, in the words that this package's recipes train with",
    "passkey_sentence": "the same between repeated sentences",
    PASSKEY_WEIGHT: "how much of each head's attention the number gets there when it is asked for",
    **dict.fromkeys(NEEDLE_TASKS, "a needle task of RULER"),
    "perplexity": "loss of each token of long documents, by position",
    "perplexity_short": "loss of whole documents no longer than a length",
    "perplexity_windows": "loss of pieces of a length, cut from all documents",
    COMPLETION: "how a genome goes on, in 200 bases: identity and GC trajectory against the truth",
    COPYING: "loss in the copy-mixture task, by the kind of token; of models that a recipe trains on that task",
    "timing": "milliseconds and memory of one pass, forward and with gradients",
}
"""Names of tasks, and what each is."""

PASSKEYS = ("passkey", "passkey_8", "passkey_corpus", "passkey_sentence")
"""The tasks that ask for a pass key."""

PERPLEXITIES = tuple(name for name in TASKS if name.startswith("perplexity"))
"""The tasks that measure a loss."""

LONGEST_KEY = 8
"""Digits; they stand after a text of the length that is asked for."""

COMPLETED = 200
"""Bases that a model is to write after a piece of a genome (GOAT, Figure 4c)."""


def _rising(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if not lengths:
        raise ValueError("at least one length must be given")
    if list(lengths) != sorted(set(lengths)):
        raise ValueError(f"lengths must rise, got {list(lengths)}")
    return lengths


Lengths = Annotated[tuple[Annotated[int, Field(gt=1)], ...], AfterValidator(_rising)]
"""Rising lengths in tokens."""


class EvaluationPlan(Strict):
    """Tasks, and all that their texts depend on beside the tokenizer. Lengths are in tokens."""

    tasks: tuple[str, ...]
    lengths: Lengths
    depths: int = Field(default=20, ge=2)
    """Depths, evenly spaced from the start of a text to its end."""
    trials: int = Field(default=1, gt=0)
    """Texts per length and depth; of a genome, continuations of each piece."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    seeding: Literal["hashed", "mixed"] = "hashed"
    """Rule for the seed of each text: ``mixed`` is the one of ``evaluation.passkey`` in recipes."""
    corpus: str = EMBEDDED
    """Where filler, essays and documents come from: ``embedded`` (its held-out part), a text file, a folder, or
    ``package:NAME`` of an installed Python package; or a FASTA file. In a recipe, what is trained on unless it is
    said, and its held-out part."""
    sentences: Literal["regex", "punkt"] = "regex"
    """Splitter that finds the places for needles in an essay; RULER takes NLTK's punkt, which needs its data."""
    documents: int = Field(default=8, gt=0)
    """At most so many: of ``perplexity`` the first documents that have as many tokens as the longest length, of
    ``perplexity_short`` the first that are short enough; of the other tasks pieces, spread over all there are."""
    minimum_documents: int | None = Field(default=None, gt=0)
    """Fewer documents or pieces than this are an error before any work. None for 1; in a recipe, None for
    ``documents``."""
    tokens: int = Field(default=65536, gt=0)
    """Number of tokens of the rows of one length, for ``copying``; at least one row."""
    passes: int = Field(default=100, gt=0)
    """Number of passes of the task ``timing``."""
    stop_after_zeros: int | None = Field(default=2, gt=0)
    """Number of lengths in a row without a right answer after which a task skips longer ones; null to skip none."""

    @property
    def longest_text(self) -> int:
        """Tokens that a model must have places for: of the longest text, and of what is asked for after it."""
        reads_alone = (*PERPLEXITIES, PASSKEY_WEIGHT, COPYING, "timing")
        # The last base that is drawn is not read.
        after = {COMPLETION: COMPLETED - 1} | dict.fromkeys(reads_alone, 0)
        after |= dict.fromkeys(("passkey_corpus", "passkey_sentence"), 5)
        return max(self.lengths) + max(after.get(task, LONGEST_KEY) for task in self.tasks)

    @property
    def question(self) -> dict[str, Any]:
        """All that determines the results, as plain JSON; what is not set is left out."""
        return self.model_dump(mode="json", exclude={"minimum_documents"}, exclude_defaults=True)

    @model_validator(mode="after")
    def _minimum_below_documents(self) -> EvaluationPlan:
        check_minimum_documents(self.minimum_documents, self.documents)
        return self

    @field_validator("tasks")
    @classmethod
    def _known(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if not tasks:
            raise ValueError(f"at least one task must be named, of {', '.join(TASKS)}")
        return known_tasks(tasks, TASKS)


def known_tasks(tasks: tuple[str, ...], known: Collection[str]) -> tuple[str, ...]:
    """Return names of tasks, which must be known and distinct.

    Raises:
        ValueError: a name is unknown, or stands there twice.
    """
    for task in tasks:
        if task not in known:
            raise ValueError(f"unknown task {task!r}; there are {', '.join(known)}")
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"tasks must be distinct, got {', '.join(tasks)}")
    return tasks


def check_minimum_documents(minimum: int | None, documents: int) -> None:
    """Check that the smallest number of documents is no larger than the wanted number.

    Raises:
        ValueError: it is larger.
    """
    if minimum is not None and minimum > documents:
        raise ValueError(f"minimum_documents must be at most documents, {documents}; got {minimum}")
