"""Folders that hold a run's results: one call at a time writes to one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
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


@contextmanager
def gone_if_refused(folder: Path, *, keep: Callable[[], bool]) -> Iterator[None]:
    """A folder that is made inside does not outlive bad input: nothing is left in the way of the corrected call.

    Args:
        folder: what was there before stays there.
        keep: whether it holds the fruit of any work.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except (ValueError, OSError):
        if made and not keep():
            shutil.rmtree(folder, ignore_errors=True)
            for parent in made[1:]:
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()
        raise
