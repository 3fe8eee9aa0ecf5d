"""Haystack text, and splitters that find places for needles."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from attention_priors.lab.data.corpora import EMBEDDED, Corpus, load_corpus, read_documents
from attention_priors.lab.data.document import Document
from attention_priors.lab.data.genomes import is_fasta


@dataclass(frozen=True)
class Haystack:
    """Running text from which essay tasks read as many words as fit a length.

    As in RULER, runs of white space become one space. A prompt that needs more words than available repeats the text.

    Attributes:
        name: Name of the text in results.
        text: Text with any white space.
        skipped: One line ``"NAME: why"`` for each file that was found but not used.

    Raises:
        ValueError: the text is empty or blank.
    """

    name: str
    text: str
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(f"text must hold words; that of haystack {self.name!r} is {self.text[:20]!r}")

    @classmethod
    def of(
        cls, name: str, documents: Iterable[Document], skipped: tuple[str, ...] = (), *, separator: str = " "
    ) -> Haystack:
        """Join the texts of documents.

        Args:
            name: see the attribute.
            documents: Documents in the order of their texts.
            skipped: see the attribute.
            separator: Text between two documents.
        """
        return cls(name, separator.join(document.text for document in documents), skipped)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Strings between white space; as in RULER, the first and the last word may be empty."""
        return tuple(re.sub(r"\s+", " ", self.text).split(" "))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the words, which results depend on."""
        return hashlib.sha256(" ".join(self.words).encode()).hexdigest()

    def first(self, count: int) -> str:
        """Join the first ``count`` words by spaces, repeating the text as needed."""
        return self.words_from(0, count)

    def words_from(self, start: int, count: int) -> str:
        """Join ``count`` words from index ``start`` on by spaces, repeating the text as needed."""
        end = start + count
        words = self.words if end <= len(self.words) else self.words * -(-end // len(self.words))
        return " ".join(words[start:end])


def load_haystack(source: str | Path) -> Haystack:
    """Read the text of a haystack.

    Args:
        source: One of

            - ``"embedded"``. The held-out part of the embedded corpus (`load_corpus`), on which no model here is
              trained, with a space between documents. The text differs between Python versions, so results state its
              fingerprint.
            - A folder. Its text files, sorted by path and joined without separators, as RULER's script
              ``download_paulgraham_essay.py`` joins essays. If a file does not end in white space, its last word merges
              with the next file. Blank files and exact copies are left out.
            - A text file, or ``"package:NAME"``, as for `load_corpus`.
            - A FASTA file. Each contig is a word.
            - A JSON file. It holds an object with the key ``"text"``, like RULER's ``PaulGrahamEssays.json``.

    Raises:
        FileNotFoundError: ``source`` does not exist.
        ValueError: ``source`` holds no text.
    """
    if source == EMBEDDED:
        return haystack_of(load_corpus(EMBEDDED))
    path = Path(source)
    if path.suffix == ".json" and path.is_file():
        return Haystack(path.name, _text_of_json(path))
    name, documents, skipped = read_documents(source)
    return Haystack.of(name, documents, skipped, separator=" " if is_fasta(path) else "")


def haystack_of(corpus: Corpus) -> Haystack:
    """Join the held-out documents of a corpus with spaces."""
    return Haystack.of(f"{corpus.name} (held out)", corpus.held_out)


def _text_of_json(path: Path) -> str:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # wrong encodings too
        raise ValueError(f"source {str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        raise ValueError(f"source {str(path)!r} must be a JSON object with a string under 'text'")
    return content["text"]


# ---- sentences


class SentenceSplitter(Protocol):
    """Function that splits text into sentences; results state its name."""

    @property
    def name(self) -> str:
        """Name with everything that determines the sentences, such as version and language."""
        ...

    def __call__(self, text: str) -> list[str]:
        """Return the sentences in order, without the space between them."""
        ...


class RegexSplitter:
    """Splitter at ``.``, ``!`` or ``?``, with closing quotes and brackets, before a space.

    A lower-case letter after the space continues the sentence (``e.g. this``). Unlike punkt, this splitter ends a
    sentence after initials and abbreviations before a capital. Only the spaces between sentences are removed.
    """

    name = "regex-1"

    _END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]”’]))\s+(?=[^\sa-z])""")

    def __call__(self, text: str) -> list[str]:
        """Return the sentences in order."""
        return self._END.split(text)


class PunktSplitter:
    """NLTK's punkt splitter for a language, which RULER uses; needs ``nltk`` and its data.

    Args:
        language: Language supported by the data.

    Raises:
        ModuleNotFoundError: ``nltk`` is not installed.
        LookupError: the data is missing; ``python -m nltk.downloader punkt_tab`` downloads it.
    """

    def __init__(self, language: str = "english") -> None:
        import nltk
        from nltk.tokenize.punkt import PunktTokenizer

        self._tokenizer = PunktTokenizer(language)
        self.name = f"nltk-{nltk.__version__}/punkt_tab/{language}"

    def __call__(self, text: str) -> list[str]:
        """Return the sentences in order."""
        return self._tokenizer.tokenize(text)
