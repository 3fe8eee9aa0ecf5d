"""Where an essay may be cut to put a needle in: splitters of text into sentences."""

from __future__ import annotations

import re
from typing import Protocol


class SentenceSplitter(Protocol):
    """Splits text into sentences; a result states its name."""

    @property
    def name(self) -> str:
        """What splits, with what decides the outcome: a version, a language."""
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
