"""Seeing what attention is asked while a model runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from attention_priors.attention.problem import Problem

See: TypeAlias = "Callable[[Problem], None]"

# Dynamo traces and guards a plain thread-local object; it does neither for a ContextVar or a subclass of this one.
of_thread = threading.local()
"""``told``: those who are told every problem, by :func:`observed`; ``notes``: what :func:`noted` collects."""


@contextmanager
def observed(see: See) -> Iterator[None]:
    """Within this block, ``see`` is told every problem that :func:`attend` is asked, before it is computed.

    Only by the thread that entered the block; others compute for themselves.

    Args:
        see: what is called, in the order in which attention is computed; its errors end the computation.
    """
    of_thread.told = (*getattr(of_thread, "told", ()), see)
    try:
        yield
    finally:
        remaining = list(of_thread.told)
        remaining.remove(see)
        of_thread.told = tuple(remaining)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Collect what engines note in this block, and this thread, about numbers that they look at."""
    before, of_thread.notes = getattr(of_thread, "notes", None), []
    try:
        yield of_thread.notes
    finally:
        of_thread.notes = before


def note(what: str, *numbers: int) -> None:
    """Note something for :func:`explain`, if it listens."""
    notes = getattr(of_thread, "notes", None)
    if notes is not None:
        notes.append(what.format(*numbers))
