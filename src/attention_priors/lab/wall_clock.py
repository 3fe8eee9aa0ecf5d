"""The time of day, and the wall time of work over several sessions."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock

from attention_priors._io import read_json, write_json

EVERY = 10.0
"""Seconds of work, at most, that a killed process leaves uncounted."""


def now() -> str:
    """Return the present time as results record it: ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class WallClock:
    """Adds up the durations of all sessions of some work; a context that covers one session.

    Args:
        path: JSON file that keeps the sum between sessions; None to count this session alone.
        shared: whether several processes may write the file at the same time. The sum then counts each of their
            sessions.
    """

    def __init__(self, path: Path | None, *, shared: bool = False) -> None:
        self._path = path
        self._shared = shared
        self._sum = self._read()
        self._counted: float | None = None
        """Moment up to which the running session is in the sum; None outside of a session."""

    @property
    def seconds(self) -> float:
        """Sum of all sessions so far."""
        return self._sum if self._counted is None else self._sum + time.monotonic() - self._counted

    def tick(self) -> None:
        """Keep the sum on disk up to date; to be called often while there is progress."""
        if self._counted is not None and time.monotonic() - self._counted >= EVERY:
            self._count(self._counted)

    def forget(self) -> None:
        """Remove the file: the work is done, and its time has been written down elsewhere."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def __enter__(self) -> WallClock:
        self._counted = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._counted is not None
        self._count(self._counted)
        self._counted = None

    def _count(self, since: float) -> None:
        """Add the time since a moment to the sum."""
        self._counted = time.monotonic()
        if self._path is None:
            self._sum += self._counted - since
            return
        lock = FileLock(self._path.with_name(f".{self._path.name}.lock")) if self._shared else nullcontext()
        with lock:
            self._sum = (self._read() if self._shared else self._sum) + self._counted - since
            write_json(self._path, self._sum)

    def _read(self) -> float:
        return read_json(self._path) if self._path is not None and self._path.exists() else 0.0
