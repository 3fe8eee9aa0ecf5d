"""Evaluation plan: tasks, lengths and numbers of texts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from attention_priors.lab.data import EMBEDDED
from attention_priors.lab.strict_yaml import Strict
from attention_priors.lab.tasks.ruler.needles import NEEDLE_TASKS

COMPLETION = "genome_completion"
PASSKEY_WEIGHT = "passkey_weight"
COPYING = "copying"

TASKS = {
    "passkey": "5-digit number between repeated sentences",
    "passkey_8": "8-digit number between repeated sentences",
    "passkey_corpus": "5-digit number in running text, with the wording of this package's recipes",
    "passkey_sentence": "5-digit number between repeated sentences, with the wording of this package's recipes",
    PASSKEY_WEIGHT: "attention of each head on the number of passkey_corpus when the question asks for it",
    **dict.fromkeys(NEEDLE_TASKS, "needle task of RULER"),
    "variable_tracking": "RULER's variable tracking: a chain of 4 hops between repeated sentences, after an example",
    "variable_tracking_2_hops": "variable tracking for short lengths: a chain of 2 hops, without an example",
    "perplexity": "loss of each token of long documents, by position",
    "perplexity_short": "loss of whole documents up to a length",
    "perplexity_windows": "loss of pieces of a length, cut from all documents",
    COMPLETION: "continuation of a genome by 200 bases: identity and GC trajectory against the truth",
    COPYING: "loss in the copy-mixture task by kind of token, for models trained on this task by a recipe",
    "timing": "milliseconds and memory of a pass: forward, with gradients, and over the last token after a cache",
}
"""Descriptions of the tasks, by name."""

PASSKEYS = ("passkey", "passkey_8", "passkey_corpus", "passkey_sentence")
"""Tasks that ask for a pass key."""

PERPLEXITIES = tuple(name for name in TASKS if name.startswith("perplexity"))
"""Tasks that measure a loss."""

LONGEST_KEY = 8
"""Digits of the longest pass key, which follow a text of the planned length."""

COMPLETED = 200
"""Number of bases that a model generates after a piece of a genome (GOAT, Figure 4c)."""


def _rising(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if not lengths:
        raise ValueError("at least one length must be given")
    if list(lengths) != sorted(set(lengths)):
        raise ValueError(f"lengths must rise, got {list(lengths)}")
    return lengths


Lengths = Annotated[tuple[Annotated[int, Field(gt=1)], ...], AfterValidator(_rising)]
"""Lengths in tokens, in rising order."""


class EvaluationPlan(Strict):
    """Tasks, and everything besides the tokenizer that determines their texts. Lengths are in tokens."""

    tasks: tuple[str, ...]
    """Names of the tasks, as ``attention-priors evaluate --task list`` shows them."""
    lengths: Lengths
    """Lengths of the texts in tokens, in rising order."""
    depths: int = Field(default=20, ge=2)
    """Depths, evenly spaced from the start of a text to its end."""
    trials: int = Field(default=1, gt=0)
    """Texts per length and depth; for genomes, continuations of each piece."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the texts."""
    seeding: Literal["hashed", "mixed"] = "hashed"
    """Rule for the seed of each text; recipes use ``mixed`` for ``evaluation.passkey``."""
    corpus: str = EMBEDDED
    """Source of filler, essays and documents: ``embedded`` (its held-out part), a text file, a folder, ``package:NAME``
    of an installed Python package, or a FASTA file. In a recipe, the held-out part of the training corpus by
    default."""
    sentences: Literal["regex", "punkt"] = "regex"
    """Splitter that finds places for needles in an essay. RULER uses NLTK's punkt, which needs its own data."""
    documents: int = Field(default=8, gt=0)
    """Largest number of documents or pieces. ``perplexity`` reads the first documents that are at least as long as the
    longest length, ``perplexity_short`` the first that are short enough. Other tasks read pieces spread over all
    documents."""
    minimum_documents: int | None = Field(default=None, gt=0)
    """Smallest number of documents or pieces; fewer raise an error before any measurement. None means 1, and in a
    recipe ``documents``."""
    tokens: int = Field(default=65536, gt=0)
    """Number of tokens in all rows of one length, for ``copying``; at least one row."""
    passes: int = Field(default=100, gt=0)
    """Number of passes of the task ``timing``; of decoding, ten times as many."""
    stop_after_zeros: int | None = Field(default=2, gt=0)
    """Number of consecutive lengths without a right answer after which a task skips longer ones; None never skips."""

    @property
    def longest_text(self) -> int:
        """Number of positions that a model needs: the tokens of the longest text and of its answer."""
        reads_alone = (*PERPLEXITIES, PASSKEY_WEIGHT, COPYING, "timing")
        # The model does not read the last base that it draws.
        after = {COMPLETION: COMPLETED - 1} | dict.fromkeys(reads_alone, 0)
        after |= dict.fromkeys(("passkey_corpus", "passkey_sentence"), 5)
        return max(self.lengths) + max(after.get(task, LONGEST_KEY) for task in self.tasks)

    @property
    def question(self) -> dict[str, Any]:
        """Settings that determine the results, as plain JSON without defaults."""
        return self.model_dump(mode="json", exclude={"minimum_documents"}, exclude_defaults=True)

    @model_validator(mode="after")
    def _minimum_below_documents(self) -> EvaluationPlan:
        check_minimum_documents(self.minimum_documents, self.documents)
        return self

    @field_validator("tasks")
    @classmethod
    def _known(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if not tasks:
            raise ValueError(f"at least one task must be given, out of {', '.join(TASKS)}")
        return known_tasks(tasks, TASKS)


def known_tasks(tasks: tuple[str, ...], known: Collection[str]) -> tuple[str, ...]:
    """Return the given task names after checking that they are known and distinct.

    Raises:
        ValueError: a name is unknown or duplicated.
    """
    for task in tasks:
        if task not in known:
            raise ValueError(f"unknown task {task!r}; expected one of {', '.join(known)}")
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"tasks must be distinct, got {', '.join(tasks)}")
    return tasks


def check_minimum_documents(minimum: int | None, documents: int) -> None:
    """Check that the smallest number of documents does not exceed the wanted number.

    Raises:
        ValueError: the smallest number is larger.
    """
    if minimum is not None and minimum > documents:
        raise ValueError(f"minimum_documents must be at most documents, {documents}; got {minimum}")
