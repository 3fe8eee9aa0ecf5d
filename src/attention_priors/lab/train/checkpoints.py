"""Atomic checkpoints, which are complete or absent.

A checkpoint is written under a temporary name, sealed with a manifest of its files and their checksums, and moved into
place. A folder that has no manifest, or does not match its manifest, is not used. In contrast, transformers writes
checkpoints in place and without checksums, and deletes old checkpoints file by file.
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
    """Error of a checkpoint that could not be written. The message names the reason and the last checkpoint."""


def checkpoint_steps(folder: Path) -> list[int]:
    """List the steps of the checkpoints in ``folder``, in ascending order."""
    names = (path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"{_PREFIX}{step}"


def staging_folder(folder: Path) -> Path:
    """Return the folder of unfinished checkpoints."""
    return folder / STAGING


def seal(staged: Path, target: Path) -> None:
    """Add the manifest to a finished checkpoint, and move the checkpoint into place."""
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    entries = {
        path.relative_to(staged).as_posix(): {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in files
    }
    write_json(staged / MANIFEST, {"format": 1, "files": entries})
    move_into_place(staged, target)


def move_into_place(staged: Path, target: Path) -> None:
    """Flush a finished folder to disk and rename it to ``target``, which replaces an existing folder."""
    for path in (*staged.rglob("*"), staged):
        synchronise(path)
    if target.exists():
        discard(target)
    staged.rename(target)
    synchronise(target.parent)


def discard(path: Path) -> None:
    """Delete a folder after renaming it, so that a partly deleted folder never has the original name."""
    hidden = path.with_name(_DISCARDED + path.name)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def sweep(folder: Path) -> None:
    """Delete the remains of interrupted writes and deletions."""
    for path in (staging_folder(folder), *folder.glob(f"{_DISCARDED}*")):
        remove(path)


def keep_last(folder: Path, count: int) -> None:
    """Delete all checkpoints except the last ``count``."""
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
            return f"the checksum of {name} does not match the manifest"
    return None


def last_complete(folder: Path, on_message: Callable[[str], None] = lambda message: None) -> Path | None:
    """Return the newest complete checkpoint, or None, and rename newer, incomplete checkpoints.

    Args:
        folder: Folder of the checkpoints.
        on_message: Callback for a message about each refused checkpoint.
    """
    for step in reversed(checkpoint_steps(folder)):
        checkpoint = checkpoint_folder(folder, step)
        problem = what_is_wrong(checkpoint)
        if problem is None:
            return checkpoint
        aside = folder / (_REFUSED + checkpoint.name)
        remove(aside)
        checkpoint.rename(aside)
        on_message(f"{checkpoint} is refused: {problem}. Renamed to {aside.name}; using the previous checkpoint")
    return None
