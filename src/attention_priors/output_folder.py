"""Folders that hold a run's results: one call at a time writes to one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from attention_priors.strict_yaml import RecipeError


@contextmanager
def sole_writer(output: Path) -> Iterator[None]:
    """Let no other call write to a folder meanwhile.

    Raises:
        RecipeError: another call is writing to it.
    """
    lock = FileLock(output / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RecipeError(f"{output} is being written by another call; wait for it, or use another folder") from error
    try:
        yield
    finally:
        lock.release()
