"""Folders that hold a run's results: one call at a time writes to one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from attention_priors._io import remove, writable_folder
from attention_priors.lab.strict_yaml import RecipeError

_LOCK = ".lock"


class FolderInUseError(RecipeError):
    """Another call is writing to a folder."""


@contextmanager
def sole_writer(output: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Let no other call write to a folder meanwhile. A call that holds the folder may take it again.

    The lock ends with the process, however it ends. Processes on several machines exclude each other if the file
    system that they share supports locks.

    Args:
        output: the folder.
        wait: seconds to wait for another call to end; ``math.inf`` for as long as it takes.

    Raises:
        FolderInUseError: another call is still writing to the folder.
    """
    lock = FileLock(output / _LOCK, is_singleton=True)
    try:
        lock.acquire(timeout=-1 if math.isinf(wait) else wait)
    except Timeout as error:
        raise FolderInUseError(
            f"{output} is being written by another call; wait for it, or use another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def undone_if_refused(
    folder: Path, names: Collection[str], *, keep: Callable[[], bool], wait: float = 0.0
) -> Iterator[None]:
    """Write to a folder, alone; remove new files when bad input raises an error, so that another recipe may use it.

    Args:
        folder: made if it does not exist. Files that were in it before stay.
        names: names of the files and folders that may be removed. Files with other names belong to somebody else.
        keep: whether the folder holds finished work, which stays.
        wait: as for :func:`sole_writer`.

    Raises:
        FolderInUseError: as :func:`sole_writer`.
        OSError: as :func:`writable_folder`.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    is_undone = False
    writable_folder(folder)
    try:
        with sole_writer(folder, wait=wait):
            before = set(folder.iterdir())
            try:
                yield
            except (ValueError, OSError):
                is_undone = not keep()
                new = set(folder.iterdir()) - before if is_undone else set[Path]()
                for path in (path for path in new if path.name in names):
                    remove(path)
                raise
    finally:
        if is_undone and made:
            (folder / _LOCK).unlink(missing_ok=True)
            for path in made:
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
