"""Base class of evaluation tasks, and the texts that tasks share."""

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
from attention_priors.lab.tasks.plan import EvaluationPlan
from attention_priors.lab.tasks.ruler.haystack import (
    Haystack,
    PunktSplitter,
    RegexSplitter,
    SentenceSplitter,
    haystack_of,
    load_haystack,
)
from attention_priors.lab.tasks.subject import Subject

Record = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """Smallest part of a task with its own record: a text, a continuation, or a timed pass.

    Attributes:
        key: Fields that distinguish the record from others of the same task and length.
        size: Number of tokens to read.
        content: Data that the task needs to measure the unit.
    """

    key: dict[str, Any]
    size: int
    content: Any = None

    @property
    def id(self) -> tuple[Any, ...]:
        """Values of the key, in order."""
        return tuple(self.key.values())

    @property
    def cost(self) -> float:
        """Relative compute time of the unit: linear in its size at first, quadratic for long texts."""
        return self.size * (1 + self.size / 4096)


@dataclass(frozen=True)
class Setting:
    """Settings that the tasks of one evaluation share.

    Attributes:
        subject: Model and tokenizer.
        plan: Lengths, depths, trials, seed, corpus.
        chunk: Tokens per forward pass.
        batch: Number of texts of equal length in a batch.
        on_message: Callback for messages to the user.
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
    """Task of an evaluation. Its records depend only on :meth:`identity`, the length, and the key of the unit."""

    reads_texts = True
    """Whether the units are texts, whose identity and cost are recorded."""
    stops_after_zeros = False
    """Whether lengths without a right answer end the task early (``EvaluationPlan.stop_after_zeros``)."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self.setting = setting
        self.subject, self.plan, self.texts = setting.subject, setting.plan, setting.texts

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return everything that determines the records besides subject, length and key, as plain JSON."""

    @abstractmethod
    def groups(self, length: int) -> Iterator[Sequence[Unit]]:
        """Yield the units of one length in groups that are read together.

        Groups depend only on the plan, not on finished measurements, because rounding depends on the groups.
        """

    @abstractmethod
    def ask(self, length: int, units: Sequence[Unit]) -> list[Record]:
        """Measure the units and return the fields of each unit's record."""

    def tokens_read(self, length: int) -> int:
        """Return the largest number of tokens that the model reads for a text of this length, including its answer."""
        return length

    def check(self) -> None:
        """Raise a ValueError if the task cannot be measured as planned; measure and write nothing."""
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
        """Raise a ValueError if there are too few texts of this length."""

    def check_number(self, length: int, found: int) -> None:
        """Raise a ValueError if there are fewer texts of this length than the plan accepts."""
        if found < (self.plan.minimum_documents or 1):
            raise ValueError(
                f"documents: {self.texts.source} has {found} of the {self.plan.documents} texts of {length} tokens "
                f"that the task {self.name!r} needs: set documents: {found} or shorter lengths, or "
                f"minimum_documents: {found} to accept fewer texts"
            )


@dataclass(frozen=True)
class EvaluationCorpus:
    """Documents of a corpus and their tokens.

    Attributes:
        name: Name of the corpus.
        stream: Tokens of all documents, one after another.
        pieces: Name and tokens of each document.
    """

    name: str
    stream: TokenStream
    pieces: list[tuple[str, torch.Tensor]]

    def description(self) -> dict[str, Any]:
        """Return the fields that identify the corpus, as plain JSON."""
        return {
            "corpus": self.name,
            "corpus_tokens": hashlib.sha256(self.stream.tokens.numpy().data).hexdigest(),
            "corpus_documents": hashlib.sha256("\n".join(name for name, _ in self.pieces).encode()).hexdigest(),
        }


class PlanTexts:
    """Corpus and haystack of a plan, loaded on first use.

    Args:
        subject: Model whose tokenizer encodes the texts.
        plan: Plan that names the corpus.
        on_message: Called once with the names of files that cannot be read.
    """

    def __init__(self, subject: Subject, plan: EvaluationPlan, on_message: Callable[[str], None]) -> None:
        self._subject, self._plan, self._on_message = subject, plan, on_message
        self._told = False

    @cached_property
    def corpus(self) -> EvaluationCorpus:
        """Documents to read, and source of fillers and essays.

        Raises:
            ValueError: the corpus cannot be read.
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
        stream = token_stream(self._subject.tokenizer, documents, self._subject.cache_dir)
        _, sizes = stream.document_ids.unique_consecutive(return_counts=True)
        pieces = stream.tokens.split(sizes.tolist())
        return EvaluationCorpus(name, stream, [(one.name, piece) for one, piece in zip(documents, pieces, strict=True)])

    @property
    def source(self) -> str:
        """Name of the corpus, for messages."""
        return f"{self._plan.corpus!r}{'' if self._known is None else ' (held out)'}"

    @cached_property
    def _known(self) -> Corpus | None:
        """Corpus with a known held-out part, else None."""
        return self._subject.held_out_of(self._plan.corpus)

    def windows(
        self, length: int, wanted: Callable[[torch.Tensor], bool] = lambda tokens: True
    ) -> list[tuple[str, torch.Tensor]]:
        """Return names and tokens of up to ``plan.documents`` pieces of this length, spread over all documents."""
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
            ValueError: the corpus cannot be read.
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
        """Sentence splitter that finds places for needles in an essay.

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
