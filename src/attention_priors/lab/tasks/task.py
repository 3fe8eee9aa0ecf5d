"""A task of an evaluation: it makes texts, asks a model about them, and scores the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attention_priors.hf.loading import check_chunk, check_positions
from attention_priors.lab.tasks.plan import EvaluationPlan
from attention_priors.lab.tasks.subject import Subject
from attention_priors.lab.tasks.texts import PlanTexts

Record = dict[str, Any]
OnShare = Callable[[float], None]
"""Progress callback of one group of units: the finished share, from 0 to 1."""


@dataclass(frozen=True)
class Unit:
    """The smallest part of a task that has a record of its own: a text, a continuation, a timed pass.

    Attributes:
        key: Fields that tell the record from the others of its task and length.
        size: Tokens that are read.
        content: What the task needs to ask about the unit.
    """

    key: dict[str, Any]
    size: int
    content: Any = None

    @property
    def id(self) -> tuple[Any, ...]:
        """Values of the key, in its order."""
        return tuple(self.key.values())

    @property
    def cost(self) -> float:
        """Relative time that the unit takes: linear in its size at first, quadratic in the end."""
        return self.size * (1 + self.size / 4096)


@dataclass(frozen=True)
class Setting:
    """Everything that the tasks of one evaluation share.

    Attributes:
        subject: Model and tokenizer.
        plan: Lengths, depths, trials, seed, corpus.
        chunk: Tokens per forward pass.
        batch: Texts of equal length that are read together.
        on_message: Called with messages for the user.
    """

    subject: Subject
    plan: EvaluationPlan
    chunk: int
    batch: int = 1
    on_message: Callable[[str], None] = lambda message: None

    @cached_property
    def texts(self) -> PlanTexts:
        """Corpus and haystack of the plan."""
        return PlanTexts(self.subject, self.plan, self.on_message)


class Task(ABC):
    """One task of an evaluation. Its records depend on :meth:`identity`, the length and the key of the unit alone."""

    reads_texts = True
    """Whether the units are texts, whose identity and cost are recorded."""
    stops_after_zeros = False
    """Whether longer texts are left out after lengths without a right answer (``EvaluationPlan.stop_after_zeros``)."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self.setting = setting
        self.subject, self.plan, self.texts = setting.subject, setting.plan, setting.texts

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return all that determines the records, beside the subject, the length and the key; plain JSON."""

    @abstractmethod
    def groups(self, length: int) -> Iterator[Sequence[Unit]]:
        """Yield the units of one length in groups that are read together.

        The groups depend on the plan alone, and not on what is already measured: rounding depends on them.
        """

    @abstractmethod
    def ask(self, length: int, units: Sequence[Unit], on_share: OnShare) -> list[Record]:
        """Return the fields of each unit's record."""

    def tokens_read(self, length: int) -> int:
        """Return the largest number of tokens that the model reads for a text of a length, its own answer included."""
        return length

    def check(self) -> None:
        """Raise a ValueError if the task cannot be measured as planned. Nothing is measured or written."""
        longest = max(self.plan.lengths)
        try:
            check_positions(self.subject.model, self.tokens_read(longest))
        except ValueError as error:
            raise ValueError(f"lengths: {longest} tokens for the task {self.name!r}: {error}") from error
        self._check_chunk(self.tokens_read(longest))
        for length in self.plan.lengths:
            self.check_length(length)

    def _check_chunk(self, tokens: int) -> None:
        check_chunk(self.subject.model, tokens, self.setting.chunk)

    def check_length(self, length: int) -> None:  # noqa: B027 - most tasks have a text of any length
        """Raise a ValueError if there are no texts, or too few, of a length."""

    def check_number(self, length: int, found: int) -> None:
        """Raise a ValueError if there are fewer texts of a length than the plan accepts."""
        if found < (self.plan.minimum_documents or 1):
            raise ValueError(
                f"documents: {self.texts.source} has {found} of the {self.plan.documents} texts of {length} tokens "
                f"that the task {self.name!r} asks for: set documents: {found} or shorter lengths, or "
                f"minimum_documents: {found} to measure as many as there are"
            )


def tokens_as_share(on_share: OnShare, size: int) -> Callable[[int], None]:
    """Return a callback for the number of tokens read: the time of a text grows with their square."""
    return lambda read: on_share(min(1.0, read / size) ** 2)
