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
_of_thread = threading.local()


def observers() -> tuple[See, ...]:
    """Those of this thread that are told. Whoever computes attention looks whether there are any."""
    return getattr(_of_thread, "told", ())


@contextmanager
def observed(see: See) -> Iterator[None]:
    """Within this block, ``see`` is told every problem that :func:`attend` is asked, before it is computed.

    Only by the thread that entered the block; others compute for themselves.

    Args:
        see: what is called, in the order in which attention is computed; its errors end the computation.
    """
    _of_thread.told = (*observers(), see)
    try:
        yield
    finally:
        remaining = list(observers())
        remaining.remove(see)
        _of_thread.told = tuple(remaining)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Collect what engines note in this block, and this thread, about numbers that they look at."""
    before, _of_thread.notes = getattr(_of_thread, "notes", None), []
    try:
        yield _of_thread.notes
    finally:
        _of_thread.notes = before


def note(what: str, *numbers: int) -> None:
    """Note something for :func:`explain`, if it listens."""
    notes = getattr(_of_thread, "notes", None)
    if notes is not None:
        notes.append(what.format(*numbers))


def tell(problem: Problem) -> None:
    """Tell a problem to all who want to know."""
    for see in observers():
        see(problem)
