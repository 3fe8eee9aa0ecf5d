"""The text that needles hide in, and where it may be cut to put a needle in."""

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
    """Running text, of which the essay tasks read as many words as a length has room for.

    White space is one space each, as in RULER. A prompt that needs more words than there are repeats the text.

    Attributes:
        name: What the text is called in results.
        text: The text, in any form.
        skipped: One line for each file that was found but not used, as ``"NAME: why"``.

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
            name: As the attribute.
            documents: Their texts follow each other in this order.
            skipped: As the attribute.
            separator: Text between two documents.
        """
        return cls(name, separator.join(document.text for document in documents), skipped)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Strings between white space; at either end of the text the empty word is possible, as in RULER."""
        return tuple(re.sub(r"\s+", " ", self.text).split(" "))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) over the words: what a result depends on."""
        return hashlib.sha256(" ".join(self.words).encode()).hexdigest()

    def first(self, count: int) -> str:
        """Join the first ``count`` words by spaces; the text begins again where it ends."""
        return self.words_from(0, count)

    def words_from(self, start: int, count: int) -> str:
        """Join ``count`` words from number ``start`` on by spaces; the text begins again where it ends."""
        end = start + count
        words = self.words if end <= len(self.words) else self.words * -(-end // len(self.words))
        return " ".join(words[start:end])


def load_haystack(source: str | Path) -> Haystack:
    """Read the text of a haystack.

    Args:
        source: One of

            - the string ``"embedded"``: the held-out part of the embedded corpus (`load_corpus`), which no model here
              has been trained on; a space stands between two documents. The text differs between Python versions:
              results state its fingerprint.
            - a folder: its text files, sorted by their paths and joined without anything between them, as RULER's
              script ``download_paulgraham_essay.py`` joins essays. A file that does not end in white space shares a
              word with the next file. Blank files and exact copies are left out.
            - a text file, or ``"package:NAME"``, as for `load_corpus`.
            - a FASTA file: each contig is a word.
            - a JSON file that is an object with the key ``"text"``: the form of RULER's ``PaulGrahamEssays.json``.

    Raises:
        FileNotFoundError: ``source`` does not exist.
        ValueError: there is no text in it.
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
    except ValueError as error:  # of the encoding too
        raise ValueError(f"source {str(path)!r} is no JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        raise ValueError(f"source {str(path)!r} must be a JSON object with a string under 'text'")
    return content["text"]


# ---- sentences


class SentenceSplitter(Protocol):
    """Splits text into sentences; a result states its name."""

    @property
    def name(self) -> str:
        """Name of the splitter with all that decides its outcome: a version, a language."""
        ...

    def __call__(self, text: str) -> list[str]:
        """The sentences, in order, without the space between them."""
        ...


class RegexSplitter:
    """A sentence ends at ``.``, ``!`` or ``?``, with closing quotes and brackets, before a space.

    A lower-case letter after the space carries the sentence on (``e.g. this``). Initials and abbreviations before a
    capital end a sentence here, and do not for punkt. No character but the space between sentences is lost.
    """

    name = "regex-1"

    _END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]”’]))\s+(?=[^\sa-z])""")

    def __call__(self, text: str) -> list[str]:
        """The sentences, in order."""
        return self._END.split(text)


class PunktSplitter:
    """NLTK's punkt for a language, which RULER uses; needs ``nltk`` and its data.

    Args:
        language: A language that the data has.

    Raises:
        ModuleNotFoundError: ``nltk`` is not installed.
        LookupError: the data is not there: ``python -m nltk.downloader punkt_tab`` fetches it.
    """

    def __init__(self, language: str = "english") -> None:
        import nltk
        from nltk.tokenize.punkt import PunktTokenizer

        self._tokenizer = PunktTokenizer(language)
        self.name = f"nltk-{nltk.__version__}/punkt_tab/{language}"

    def __call__(self, text: str) -> list[str]:
        """The sentences, in order."""
        return self._tokenizer.tokenize(text)
