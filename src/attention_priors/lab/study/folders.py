"""Where a comparison keeps the files of its runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

LONGEST_FOLDER_NAME = 255
"""Bytes; what file systems allow."""


def folder_name(scheme: str) -> str:
    """A scheme's name as the name of a folder."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "_", scheme).strip(".") or "_"
    if len(name) <= LONGEST_FOLDER_NAME:
        return name
    digest = hashlib.sha256(scheme.encode()).hexdigest()[:12]
    return f"{name[: LONGEST_FOLDER_NAME - 13]}-{digest}"


def check_folders(what: str, names: Iterable[str]) -> None:
    """Make sure that what is called so has folders of its own.

    Raises:
        ValueError: two would share one.
    """
    folders: dict[str, str] = {}
    for name in names:
        other = folders.setdefault(folder_name(name), name)
        if other != name:
            raise ValueError(f"{what} {other!r} and {name!r} would share the folder {folder_name(name)!r}")


def run_folder(output: Path, scheme: str, seed: int) -> Path:
    """Where a run keeps its files."""
    return output / "runs" / folder_name(scheme) / f"seed-{seed}"


def extended_folder(run: Path, way: str) -> Path:
    """Where a run keeps what comes of one extension of its context; the files are named as in the run's own folder."""
    return run / "extended" / folder_name(way)
