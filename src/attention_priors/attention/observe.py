"""Callbacks that receive every attention problem while a model runs, and notes for ``explain()``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from attention_priors.attention.problem import Problem

See: TypeAlias = "Callable[[Problem], None]"

# Dynamo traces and guards a plain threading.local, but not a ContextVar or a subclass of threading.local.
of_thread = threading.local()
"""State of one thread: ``told`` holds the callbacks of :func:`observed`, ``notes`` the notes of :func:`noted`."""


@contextmanager
def observed(see: See) -> Iterator[None]:
    """Call ``see`` with every problem of :func:`attend` in this block, before the computation.

    The callback receives only problems of the thread that entered the block.

    Args:
        see: callback. An error of the callback ends the computation.
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
    """Collect the notes that engines make in this block and this thread about the numbers that they read."""
    before, of_thread.notes = getattr(of_thread, "notes", None), []
    try:
        yield of_thread.notes
    finally:
        of_thread.notes = before


def note(what: str, *numbers: int) -> None:
    """Add a note for :func:`explain`, if :func:`noted` collects notes."""
    notes = getattr(of_thread, "notes", None)
    if notes is not None:
        notes.append(what.format(*numbers))
