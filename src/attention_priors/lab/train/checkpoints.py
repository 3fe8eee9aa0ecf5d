"""Checkpoints that are complete or absent.

A checkpoint is written under another name, sealed with a manifest of its files and their checksums, and moved into
place. A folder without a manifest, or that differs from it, is not used. transformers writes checkpoints in place,
without checksums, and deletes old ones file by file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from attention_priors._io import checksum, read_json, remove, synchronise, write_json

MANIFEST = "manifest.json"
STAGING = ".unfinished"
_DISCARDED = ".discarded-"
_PREFIX = "checkpoint-"
_REFUSED = "refused-"


class CheckpointError(OSError):
    """A checkpoint could not be written. The message names the reason and the last checkpoint."""


def checkpoint_steps(folder: Path) -> list[int]:
    """List the steps of the checkpoints in ``folder``, rising."""
    names = (path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"{_PREFIX}{step}"


def staging_folder(folder: Path) -> Path:
    """Return the folder of checkpoints that are being written."""
    return folder / STAGING


def seal(staged: Path, target: Path) -> None:
    """Add the manifest to a written checkpoint, and move it into place."""
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    entries = {
        path.relative_to(staged).as_posix(): {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in files
    }
    write_json(staged / MANIFEST, {"format": 1, "files": entries})
    move_into_place(staged, target)


def move_into_place(staged: Path, target: Path) -> None:
    """Move a written folder to its name, in place of a folder that has the name; all is on the disk then."""
    for path in (*staged.rglob("*"), staged):
        synchronise(path)
    if target.exists():
        discard(target)
    staged.rename(target)
    synchronise(target.parent)


def discard(path: Path) -> None:
    """Delete a folder, so that at no moment half of it has its name."""
    hidden = path.with_name(_DISCARDED + path.name)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def sweep(folder: Path) -> None:
    """Delete the remains of interrupted writing or deleting."""
    for path in (staging_folder(folder), *folder.glob(f"{_DISCARDED}*")):
        remove(path)


def keep_last(folder: Path, count: int) -> None:
    """Delete all but the last ``count`` checkpoints."""
    for step in checkpoint_steps(folder)[:-count]:
        discard(checkpoint_folder(folder, step))


def what_is_wrong(checkpoint: Path) -> str | None:
    """Return the defect of a checkpoint; None if it is complete."""
    manifest = checkpoint / MANIFEST
    if not manifest.exists():
        return f"it has no {MANIFEST}"
    try:
        entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in read_json(manifest)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} cannot be read"
    for name, (size, sha256) in entries.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if checksum(path) != sha256:
            return f"{name} has another checksum than when it was written"
    return None


def last_complete(folder: Path, on_message: Callable[[str], None] = lambda message: None) -> Path | None:
    """Return the newest complete checkpoint; newer ones get another name.

    Args:
        folder: of the checkpoints.
        on_message: called with a message about each refused checkpoint.
    """
    for step in reversed(checkpoint_steps(folder)):
        checkpoint = checkpoint_folder(folder, step)
        problem = what_is_wrong(checkpoint)
        if problem is None:
            return checkpoint
        aside = folder / (_REFUSED + checkpoint.name)
        remove(aside)
        checkpoint.rename(aside)
        on_message(f"{checkpoint} is refused: {problem}. It is now {aside.name}; the one before it is taken")
    return None
