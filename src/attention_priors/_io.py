"""Atomic writes of files and folders, and JSON without NaN."""

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
    """Yield a temporary path beside ``path``; on success, move the file or folder written there to ``path``.

    Concurrent writers have separate temporary paths, and the last one to finish wins. After an error, ``path`` is
    unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Shorten the name: a name of the longest length allowed leaves no room for the suffix.
    temporary = path.with_name(f".{path.name[:32]}.{os.getpid()}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        for written in (temporary, *(temporary.rglob("*") if temporary.is_dir() else ())):
            synchronise(written)
        os.replace(temporary, path)
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files that killed processes left in a folder. No process may be writing to the folder."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.\d+\.[0-9a-f]{16}\.tmp", path.name):
            remove(path)


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically. Non-finite numbers raise an error; replace them by :func:`with_nulls` first."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode())


def append_json_line(path: Path, content: Any) -> None:
    """Append one line of JSON and flush it to disk, so that a killed process loses no earlier line.

    Args:
        path: the file. The file and its folder are created if they do not exist.
        content: plain JSON without non-finite numbers (see :func:`with_nulls`).
    """
    line = json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def with_nulls(content: Any) -> Any:
    """Return a copy of ``content`` with every non-finite number replaced by None (JSON ``null``).

    Use it for measurements, where a loss that overflowed is a result too.
    """
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: with_nulls(value) for key, value in content.items()}
    return [with_nulls(value) for value in content] if isinstance(content, (list, tuple)) else content


def number(value: float | None) -> float:
    """Return ``value``, or NaN where :func:`with_nulls` replaced it by None."""
    return math.nan if value is None else float(value)


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        ValueError: the file is not valid JSON. The message names the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def synchronise(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk, so that it survives a crash of the machine."""
    # Only POSIX can open folders.
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def writable_folder(path: Path) -> Path:
    """Create a folder and check that files can be written to it.

    Raises:
        OSError: the folder cannot be created or written to. The message names the folder.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(f"cannot write to the output folder {path}: {error.strerror or error}") from error
    return path
