"""One JSON Lines file that only grows: what was measured, keyed by everything that determines it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """The lines of a file, and more of them.

    A line is either a *run*, ``{"run": ID, "identity": {...}}``, which says what determines its results, or a result,
    ``{"run": ID, ...}``. A last line that was cut off by a crash is taken away.

    Args:
        path: the file; it need not be there.

    Raises:
        ValueError: if a line is none of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[Record] = []
        if path.exists():
            self._lines = list(self._read())

    def __iter__(self) -> Iterator[Record]:
        return iter(self._lines)

    def begin(self, identity: dict[str, Any]) -> str:
        """The ID of a run; it is written if it is new."""
        text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
        run = hashlib.sha256(text.encode()).hexdigest()[:16]
        if not any(line["run"] == run and "identity" in line for line in self._lines):
            self.append({"run": run, "identity": json.loads(text)})
        return run

    def of(self, run: str, **values: Any) -> list[Record]:
        """The results of a run in which the named values are these."""
        return [
            line
            for line in self._lines
            if line["run"] == run and "identity" not in line and values.items() <= line.items()
        ]

    def append(self, record: Record) -> None:
        """Write one line, at once."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self._lines.append(json.loads(line))

    def _read(self) -> Iterator[Record]:
        content = self.path.read_bytes()
        whole, _, rest = content.rpartition(b"\n")
        if rest:
            os.truncate(self.path, len(content) - len(rest))
        for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}, is not JSON: {error}") from error
            if not isinstance(record, dict) or not isinstance(record.get("run"), str):
                raise ValueError(f"{self.path}, line {number}, is not a line of an evaluation: it has no 'run'")
            yield record
