"""A named piece of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A named piece of text; the name is unique within its corpus."""

    name: str
    text: str


def texts_of(documents: Iterable[Document]) -> Iterator[str]:
    """Yield the text of each document.

    Raises:
        ValueError: ``documents`` is a string, whose characters are no documents, or holds something else than
            `Document`.
    """
    if isinstance(documents, str):
        raise ValueError(
            f"documents is a str, {documents[:20]!r}: expected documents, such as [Document('name', text)]"
        )
    for document in documents:
        if not isinstance(document, Document):
            raise ValueError(
                f"documents holds a {type(document).__name__}: expected documents, such as [Document('name', text)]"
            )
        yield document.text
