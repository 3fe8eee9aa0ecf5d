"""Texts of one evaluation, from one corpus and in the tokens of one model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

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
