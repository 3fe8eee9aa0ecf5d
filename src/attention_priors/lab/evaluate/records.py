"""One JSON Lines file that only grows: what was measured, keyed by everything that determines it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attention_priors._io import append_json_line, with_nulls

Record = dict[str, Any]

_START = b'{"run": "'
"""How every line begins."""


class Records:
    """The lines of a file, and more of them.

    A line is either a *run*, ``{"run": ID, "identity": {...}}``, which says what determines its results, or a result,
    ``{"run": ID, ...}``. A last line that was cut off by a crash is taken away; a file of anything else is left alone.

    Args:
        path: the file; it need not be there.

    Raises:
        ValueError: if a line is none of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[Record] = self._read() if path.exists() else []
        self._identities = {line["run"]: line["identity"] for line in self._lines if "identity" in line}

    def __iter__(self) -> Iterator[Record]:
        return iter(self._lines)

    def begin(self, identity: dict[str, Any]) -> str:
        """The ID of a run; it is written if it is new.

        Args:
            identity: all that determines its results; plain JSON.

        Raises:
            ValueError: the file says that the run of this ID is another.
        """
        text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
        run = hashlib.sha256(text.encode()).hexdigest()[:16]
        if run not in self._identities:
            self.append({"run": run, "identity": json.loads(text)})
            self._identities[run] = json.loads(text)
        if self._identities[run] != json.loads(text):
            raise ValueError(f"{self.path}: run {run} is another one there: {self._identities[run]}; here it is {text}")
        return run

    def of(self, run: str, **values: Any) -> list[Record]:
        """The results of a run in which the named values are these."""
        return [
            line
            for line in self._lines
            if line["run"] == run and "identity" not in line and values.items() <= line.items()
        ]

    def append(self, record: Record) -> Record:
        """Write one line, at once, numbers that are not finite as null; what it will be read as."""
        record = json.loads(json.dumps(with_nulls(record)))
        append_json_line(self.path, record)
        self._lines.append(record)
        return record

    def _read(self) -> list[Record]:
        content = self.path.read_bytes()
        *whole, rest = content.split(b"\n")
        lines: list[Record] = []
        for number, text in enumerate(whole, start=1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}, is not JSON: {error}") from error
            if not isinstance(line, dict) or not isinstance(line.get("run"), str):
                raise ValueError(f"{self.path}, line {number}, is not a line of an evaluation: it has no 'run'")
            lines.append(line)
        if rest and not (rest.startswith(_START) or _START.startswith(rest)):
            raise ValueError(f"{self.path}, line {len(whole) + 1}, is not a line of an evaluation, whole or cut off")
        if rest:
            os.truncate(self.path, len(content) - len(rest))
        return lines
