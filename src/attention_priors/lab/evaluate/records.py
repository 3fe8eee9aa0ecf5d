"""Append-only JSON Lines file of measurements, keyed by a hash of all inputs that determine them."""

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
"""Prefix of every line."""


class Records:
    """Append-only file of evaluation records.

    A line is either a *run*, ``{"run": ID, "identity": {...}}``, whose identity has all inputs that determine the
    results, or a result, ``{"run": ID, ...}``. A last line that a crash has cut off is removed. Files with any other
    content are not changed.

    Args:
        path: Path of the file, which need not exist.

    Raises:
        ValueError: A line is not an evaluation record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[Record] = self._read() if path.exists() else []
        self._identities = {line["run"]: line["identity"] for line in self._lines if "identity" in line}

    def __iter__(self) -> Iterator[Record]:
        return iter(self._lines)

    def begin(self, identity: dict[str, Any]) -> str:
        """Return the ID of a run, and append the run if it is new.

        Args:
            identity: All inputs that determine the results, in plain JSON.

        Raises:
            ValueError: The file has another identity under this ID.
        """
        text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
        run = hashlib.sha256(text.encode()).hexdigest()[:16]
        if run not in self._identities:
            self.append({"run": run, "identity": json.loads(text)})
            self._identities[run] = json.loads(text)
        if self._identities[run] != json.loads(text):
            raise ValueError(f"{self.path}: run {run} has the identity {self._identities[run]}; expected {text}")
        return run

    def of(self, run: str, **values: Any) -> list[Record]:
        """Return the results of a run whose fields equal ``values``."""
        return [
            line
            for line in self._lines
            if line["run"] == run and "identity" not in line and values.items() <= line.items()
        ]

    def append(self, record: Record) -> Record:
        """Write one line immediately, with null for non-finite numbers, and return the record as it will be read."""
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
            raise ValueError(f"{self.path}, line {len(whole) + 1}, is not a complete or cut-off line of an evaluation")
        if rest:
            os.truncate(self.path, len(content) - len(rest))
        return lines
