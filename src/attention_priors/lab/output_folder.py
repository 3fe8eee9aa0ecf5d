"""Output folders: locks, and removal of new files after an error."""

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
    """Error of a folder that another call is writing to."""


@contextmanager
def sole_writer(output: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Lock a folder against other calls. The lock is reentrant.

    The lock is released when the process ends, even if it is killed. Processes on several machines exclude each other
    if their shared file system supports locks.

    Args:
        output: Folder to lock.
        wait: Seconds to wait for another call; ``math.inf`` to wait without a limit.

    Raises:
        FolderInUseError: Another call is still writing to the folder.
    """
    lock = FileLock(output / _LOCK, is_singleton=True)
    try:
        lock.acquire(timeout=-1 if math.isinf(wait) else wait)
    except Timeout as error:
        raise FolderInUseError(
            f"{output} is being written by another call; wait until that call ends, or use another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def undone_if_refused(
    folder: Path, names: Collection[str], *, keep: Callable[[], bool], wait: float = 0.0
) -> Iterator[None]:
    """Lock a folder, and remove its new files if bad input raises an error, so that another recipe can use the folder.

    Args:
        folder: Folder to write to; made if missing. Files from before the call stay.
        names: Names of files and folders that may be removed. Other files belong to other programs.
        keep: Function that returns whether the folder holds finished work. If so, no file is removed.
        wait: Seconds to wait for another call (see :func:`sole_writer`).

    Raises:
        FolderInUseError: Another call is still writing to the folder.
        OSError: The folder cannot be made or written.
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
