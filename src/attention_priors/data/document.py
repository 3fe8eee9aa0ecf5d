"""A named piece of text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A named piece of text; the name is unique within its corpus."""

    name: str
    text: str
