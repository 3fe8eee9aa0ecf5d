"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path`` for a file or a folder, which is moved into place unless an error occurs.

    Processes and threads that write the same file at the same time have names of their own: the last one is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name may be as long as names can be.
    temporary = path.with_name(f".{path.name[:32]}.{os.getpid()}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        for written in (temporary, *(temporary.rglob("*") if temporary.is_dir() else ())):
            synchronise(written)
        os.replace(temporary, path)
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files that killed processes left in a folder; no process may be writing to it."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.\d+\.[0-9a-f]{16}\.tmp", path.name):
            remove(path)


def write_bytes(path: Path, content: bytes) -> None:
    """Write to a temporary name beside ``path`` and move it into place."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, content: Any) -> None:
    """Write JSON; a number that is not finite is an error, since JSON has none (:func:`with_nulls`)."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode())


def append_json_line(path: Path, content: Any) -> None:
    """Append one line of JSON and flush it to the disk, so that a process that is killed later loses no earlier line.

    Args:
        path: the file; it and its folder are made if they are not there.
        content: plain JSON, without numbers that are not finite (:func:`with_nulls`).
    """
    line = json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def with_nulls(content: Any) -> Any:
    """Return a copy with None, JSON's null, in the place of every number that is not finite.

    For what was measured, such as a loss that has overflowed: that is a result too.
    """
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: with_nulls(value) for key, value in content.items()}
    return [with_nulls(value) for value in content] if isinstance(content, (list, tuple)) else content


def number(value: float | None) -> float:
    """A number that :func:`with_nulls` may have replaced; nan where it has."""
    return math.nan if value is None else float(value)


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        ValueError: the file is not whole; it says which.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a whole JSON file: {error}") from error


def synchronise(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk: a machine that stops then loses nothing of it."""
    # Only POSIX opens folders.
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
