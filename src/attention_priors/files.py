"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Write to a temporary name beside ``path`` and move it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write JSON; a number that is not finite is an error, since JSON has none."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode())


def read_json(path: Path) -> Any:
    """Read JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def writable_folder(path: Path) -> Path:
    """Make a folder and make sure that files can be written to it.

    Raises:
        OSError: naming the folder, if they cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(f"cannot write to the output folder {path}: {error.strerror or error}") from error
    return path
