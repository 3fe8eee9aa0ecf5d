"""A task of an evaluation: it makes texts, from a corpus or not, asks a model about them, and scores the answers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attention_priors.hf.loading import check_chunk, check_positions
from attention_priors.lab.data import Corpus, TokenStream, token_stream
from attention_priors.lab.data.corpora import left_out, read_documents
from attention_priors.lab.tasks.needles.haystack import (
    Haystack,
    PunktSplitter,
    RegexSplitter,
    SentenceSplitter,
    haystack_of,
    load_haystack,
)
from attention_priors.lab.tasks.plan import EvaluationPlan
from attention_priors.lab.tasks.subject import Subject

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


@dataclass(frozen=True)
class EvaluationCorpus:
    """Documents and their tokens.

    Attributes:
        name: Name of the corpus.
        stream: All documents, one after another.
        pieces: Name and tokens of each document.
    """

    name: str
    stream: TokenStream
    pieces: list[tuple[str, torch.Tensor]]

    def description(self) -> dict[str, Any]:
        """Return what tells the corpus from others; plain JSON."""
        return {
            "corpus": self.name,
            "corpus_tokens": hashlib.sha256(self.stream.tokens.numpy().data).hexdigest(),
            "corpus_documents": hashlib.sha256("\n".join(name for name, _ in self.pieces).encode()).hexdigest(),
        }


class PlanTexts:
    """Corpus and haystack of a plan, read when a task asks for them.

    Args:
        subject: Model whose tokenizer encodes the texts.
        plan: Names the corpus.
        on_message: Called with the names of files that cannot be read, once.
    """

    def __init__(self, subject: Subject, plan: EvaluationPlan, on_message: Callable[[str], None]) -> None:
        self._subject, self._plan, self._on_message = subject, plan, on_message
        self._told = False

    @cached_property
    def corpus(self) -> EvaluationCorpus:
        """Documents to read, and to make fillers and essays of.

        Raises:
            ValueError: The corpus cannot be read.
        """
        read = self._subject.read
        if self._plan.corpus not in read:
            read[self._plan.corpus] = self._read()
        return read[self._plan.corpus]

    def _read(self) -> EvaluationCorpus:
        try:
            if self._known is not None:
                name, documents = f"{self._known.name} (held out)", self._known.held_out
            else:
                name, documents, skipped = read_documents(self._plan.corpus)
                self._tell(name, skipped)
        except (ValueError, OSError) as error:
            raise ValueError(f"corpus: {error}") from error
        stream = token_stream(self._subject.tokenizer, documents)
        _, sizes = stream.document_ids.unique_consecutive(return_counts=True)
        pieces = stream.tokens.split(sizes.tolist())
        return EvaluationCorpus(name, stream, [(one.name, piece) for one, piece in zip(documents, pieces, strict=True)])

    @property
    def source(self) -> str:
        """Name of the corpus, for messages."""
        return f"{self._plan.corpus!r}{'' if self._known is None else ' (held out)'}"

    @cached_property
    def _known(self) -> Corpus | None:
        """The corpus, if its held-out part is known."""
        return self._subject.held_out_of(self._plan.corpus)

    def windows(
        self, length: int, wanted: Callable[[torch.Tensor], bool] = lambda tokens: True
    ) -> list[tuple[str, torch.Tensor]]:
        """Return names and tokens of up to ``plan.documents`` pieces of a length, spread over all documents."""
        begin = self._subject.beginning()
        size = length - len(begin)
        places = [
            (document, tokens, start)
            for document, tokens in self.corpus.pieces
            for start in range(0, len(tokens) - size + 1, max(1, size))
            if wanted(tokens[start : start + size])
        ]
        count = min(len(places), self._plan.documents)
        chosen = (places[index * len(places) // count] for index in range(count))
        return [
            (f"{document}[{start}:{start + size}]", torch.cat([begin, tokens[start : start + size]]))
            for document, tokens, start in chosen
        ]

    @cached_property
    def haystack(self) -> Haystack:
        """Text in which needles are hidden.

        Raises:
            ValueError: The corpus cannot be read.
        """
        try:
            haystack = load_haystack(self._plan.corpus) if self._known is None else haystack_of(self._known)
        except (ValueError, OSError) as error:
            raise ValueError(f"corpus: {error}") from error
        self._tell(haystack.name, haystack.skipped)
        return haystack

    def _tell(self, corpus: str, skipped: tuple[str, ...]) -> None:
        words = left_out(corpus, skipped)
        if words is not None and not self._told:
            self._on_message(f"corpus: {words}")
            self._told = True

    @cached_property
    def splitter(self) -> SentenceSplitter:
        """Finds the places in an essay where a needle may stand.

        Raises:
            ValueError: NLTK or its data are missing.
        """
        if self._plan.sentences == "regex":
            return RegexSplitter()
        try:
            return PunktSplitter()
        except (ModuleNotFoundError, LookupError) as error:
            raise ValueError(
                "sentences: punkt needs nltk and its data: pip install nltk; python -m nltk.downloader punkt_tab"
            ) from error
