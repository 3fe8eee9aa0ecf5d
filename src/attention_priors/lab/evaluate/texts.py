"""The texts that a plan asks for, of one corpus and in the tokens of one model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attention_priors.lab.data import Corpus, PasskeyTask, TokenStream, token_stream
from attention_priors.lab.data.corpora import left_out, read_documents
from attention_priors.lab.data.needles import (
    NEEDLE_TASKS,
    Haystack,
    PunktSplitter,
    RegexSplitter,
    SentenceSplitter,
    haystack_of,
    load_haystack,
)
from attention_priors.lab.data.nucleotides import BASES
from attention_priors.lab.evaluate.needles import NeedleRetrieval
from attention_priors.lab.evaluate.plan import COMPLETED, LONGEST_KEY, PASSKEY_WEIGHT, EvaluationPlan
from attention_priors.lab.evaluate.retrieval import PasskeyRetrieval, RetrievalTask
from attention_priors.lab.evaluate.subject import Subject


@dataclass(frozen=True)
class EvaluationCorpus:
    """Documents and their tokens."""

    name: str
    stream: TokenStream
    pieces: list[tuple[str, torch.Tensor]]
    """Name and tokens of each document."""

    def description(self) -> dict[str, Any]:
        """What tells it from others; plain JSON."""
        return {
            "corpus": self.name,
            "corpus_tokens": hashlib.sha256(self.stream.tokens.numpy().data).hexdigest(),
            "corpus_documents": hashlib.sha256("\n".join(name for name, _ in self.pieces).encode()).hexdigest(),
        }


class PlanTexts:
    """Makes them when they are asked for; the corpus is read once.

    Args:
        subject: whose tokenizer they are for.
        plan: says which.
        on_message: told of files that cannot be read.
    """

    def __init__(self, subject: Subject, plan: EvaluationPlan, on_message: Callable[[str], None]) -> None:
        self._subject, self._plan, self._on_message = subject, plan, on_message
        self._told = False

    @cached_property
    def corpus(self) -> EvaluationCorpus:
        """What is read, and what fillers and essays are made of.

        Raises:
            ValueError: it cannot be read.
        """
        source = self._plan.corpus
        try:
            if self._known is not None:
                name, documents = f"{self._known.name} (held out)", self._known.held_out
            else:
                name, documents, skipped = read_documents(source)
                self._tell(name, skipped)
        except (ValueError, OSError) as error:
            raise ValueError(f"corpus: {error}") from error
        stream = token_stream(self._subject.tokenizer, documents)
        _, sizes = stream.document_ids.unique_consecutive(return_counts=True)
        pieces = stream.tokens.split(sizes.tolist())
        return EvaluationCorpus(name, stream, [(one.name, piece) for one, piece in zip(documents, pieces, strict=True)])

    @property
    def source(self) -> str:
        """Where they come from, in words."""
        return f"{self._plan.corpus!r}{'' if self._known is None else ' (held out)'}"

    @cached_property
    def _known(self) -> Corpus | None:
        """The corpus, where it is known what of it was held out."""
        return self._subject.held_out_of(self._plan.corpus)

    def to_read(self, name: str, length: int) -> list[tuple[str, torch.Tensor]]:
        """Names and tokens of the documents, or pieces of them, that a perplexity is measured on."""
        begin = self._subject.beginning()
        if name == "perplexity_windows":
            return self._windows(begin, length)
        found: list[tuple[str, torch.Tensor]] = []
        for document, tokens in self.corpus.pieces:
            size = len(begin) + len(tokens)
            # The same documents at every length: otherwise curves over lengths would compare documents as well.
            if size >= max(self._plan.lengths) if name == "perplexity" else 2 <= size <= length:
                found.append((document, torch.cat([begin, tokens])[:length]))
                if len(found) == self._plan.documents:
                    break
        return found

    def unfinished(self, length: int) -> list[tuple[str, torch.Tensor]]:
        """Pieces of a genome, ``length`` tokens and the known bases that are to be found."""
        vocabulary = self._subject.tokenizer.get_vocab()
        bases = torch.tensor([vocabulary[base] for base in BASES])

        def known(tokens: torch.Tensor) -> bool:
            return bool(torch.isin(tokens[-COMPLETED:], bases).all())

        return self._windows(self._subject.beginning(), length + COMPLETED, known)

    def _windows(
        self,
        begin: torch.Tensor,
        length: int,
        wanted: Callable[[torch.Tensor], bool] = lambda tokens: True,
    ) -> list[tuple[str, torch.Tensor]]:
        """Pieces of the documents, one after another; of more than are wanted, some from all over them."""
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
    def _haystack(self) -> Haystack:
        try:
            haystack = load_haystack(self._plan.corpus) if self._known is None else haystack_of(self._known)
        except (ValueError, OSError) as error:
            raise ValueError(f"corpus: {error}") from error
        self._tell(haystack.name, haystack.skipped)
        return haystack

    def _tell(self, corpus: str, skipped: tuple[str, ...]) -> None:
        """Say which files of the corpus are left out; once, whatever reads it."""
        words = left_out(corpus, skipped)
        if words is not None and not self._told:
            self._on_message(f"corpus: {words}")
            self._told = True

    @cached_property
    def _splitter(self) -> SentenceSplitter:
        if self._plan.sentences == "regex":
            return RegexSplitter()
        try:
            return PunktSplitter()
        except (ModuleNotFoundError, LookupError) as error:
            raise ValueError(
                "sentences: punkt needs nltk and its data: pip install nltk; python -m nltk.downloader punkt_tab"
            ) from error

    def retrieval(self, name: str) -> RetrievalTask:
        """A retrieval task by its name.

        Raises:
            ValueError: its texts cannot be made.
        """
        if name in NEEDLE_TASKS:
            if NEEDLE_TASKS[name].haystack == "essay":
                return NeedleRetrieval(name, self._subject, self._haystack, self._splitter)
            return NeedleRetrieval(name, self._subject)
        corpus = self.corpus if name in ("passkey_corpus", PASSKEY_WEIGHT) else None
        wording = "long" if corpus is None else "short"
        stream = None if corpus is None else corpus.stream
        texts = PasskeyTask(
            self._subject.tokenizer, stream, digits=LONGEST_KEY if name == "passkey_8" else 5, wording=wording
        )
        filler: dict[str, Any] = {"filler": "sentence"} if corpus is None else corpus.description()
        return PasskeyRetrieval(name, self._subject, texts, {"wording": wording} | filler)
