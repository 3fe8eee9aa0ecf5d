"""The time of day, and wall time of work that may be interrupted and goes on another day."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from attention_priors._io import read_json, write_json

EVERY = 10.0
"""Seconds of work, at most, that a process which is killed leaves uncounted."""


def now() -> str:
    """This moment as results record it: ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class WallClock:
    """Adds up how long all the sessions of some work took; a context that covers one of them.

    Args:
        path: where the sum is kept between sessions, a JSON file; None to count this one alone.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._before: float = read_json(path) if path is not None and path.exists() else 0.0
        self._started: float | None = None
        self._written = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of all sessions so far."""
        return self._before if self._started is None else self._before + time.monotonic() - self._started

    def tick(self) -> None:
        """To be called often while there is progress."""
        if time.monotonic() - self._written >= EVERY:
            self._write()

    def forget(self) -> None:
        """The work is done, and its time has been written down elsewhere."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def __enter__(self) -> WallClock:
        self._started = self._written = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._before, self._started = self.seconds, None
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._path is not None:
            write_json(self._path, self.seconds)
