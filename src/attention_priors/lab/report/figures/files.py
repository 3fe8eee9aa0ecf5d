"""Figures as files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from attention_priors._io import write_bytes


def write_pngs(drawings: Iterable[tuple[str, bytes]], folder: Path, names: str) -> list[Path]:
    """Write drawings as PNG files, and remove those that an earlier call has left and this one does not draw.

    Args:
        drawings: the name of each file, without the ending, and what it holds.
        folder: where to; made if there is something to write.
        names: a regular expression of the names that the caller gives. Other files may be someone else's, and stay.

    Returns:
        The files, in the order of the drawings.
    """
    written = []
    for name, content in drawings:
        path = folder / f"{name}.png"
        write_bytes(path, content)
        written.append(path)
    for path in {*folder.glob("*.png")}.difference(written):
        if re.fullmatch(names, path.stem):
            path.unlink()
    return written
