"""Folders that hold a run's results: one call at a time writes to one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from attention_priors._io import writable_folder
from attention_priors.lab.strict_yaml import RecipeError

_LOCK = ".lock"


@contextmanager
def sole_writer(output: Path, *, wait: bool = False) -> Iterator[None]:
    """Let no other call write to a folder meanwhile.

    Args:
        output: the folder.
        wait: for a call that is writing to it to end.

    Raises:
        RecipeError: another call is writing to it.
    """
    lock = FileLock(output / _LOCK, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RecipeError(f"{output} is being written by another call; wait for it, or use another folder") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def undone_if_refused(
    folder: Path, names: Collection[str], *, keep: Callable[[], bool], wait: bool = False
) -> Iterator[None]:
    """Write to a folder, alone; what is made in it does not outlive bad input, which leaves the way free for another.

    Args:
        folder: made if it is not there. What was in it before stays.
        names: what is made in it. What has another name is somebody else's, and stays.
        keep: whether it holds the fruit of any work.
        wait: as for :func:`sole_writer`.

    Raises:
        RecipeError: as :func:`sole_writer`.
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
                if is_undone:
                    _remove(path for path in folder.iterdir() if path.name in names and path not in before)
                raise
    finally:
        if is_undone and made:
            (folder / _LOCK).unlink(missing_ok=True)
            for path in made:
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
