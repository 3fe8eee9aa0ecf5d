"""Checkpoints that are complete or absent.

A checkpoint is written under another name, sealed with a manifest of its files and their checksums, and moved into
place. What has no manifest, or does not agree with it, is not used.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from attention_priors._io import checksum, read_json, synchronise, write_json

MANIFEST = "manifest.json"
STAGING = ".unfinished"
_DISCARDED = ".discarded-"
_PREFIX = "checkpoint-"
_REFUSED = "refused-"


class CheckpointError(OSError):
    """A checkpoint could not be written. The message says why, and which one is the last that could."""


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in ``folder``, rising."""
    names = (path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"{_PREFIX}{step}"


def staging_folder(folder: Path) -> Path:
    """Where checkpoints are while they are written."""
    return folder / STAGING


def seal(staged: Path, target: Path) -> None:
    """Add the manifest to a checkpoint that is written, and move it into place."""
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    entries = {
        path.relative_to(staged).as_posix(): {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in files
    }
    for path in files:
        synchronise(path)
    write_json(staged / MANIFEST, {"format": 1, "files": entries})
    synchronise(staged)
    if target.exists():
        # The same step once more, after going back to an earlier one.
        discard(target)
    staged.rename(target)
    synchronise(target.parent)


def discard(path: Path) -> None:
    """Delete a folder; at no moment is half of it left under its name."""
    hidden = path.with_name(_DISCARDED + path.name)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def sweep(folder: Path) -> None:
    """Delete what an interrupted writing or deleting left behind."""
    for path in (staging_folder(folder), *folder.glob(f"{_DISCARDED}*")):
        if path.exists():
            shutil.rmtree(path)


def keep_last(folder: Path, count: int) -> None:
    """Delete all but the last ``count`` checkpoints."""
    for step in checkpoint_steps(folder)[:-count]:
        discard(checkpoint_folder(folder, step))


def what_is_wrong(checkpoint: Path) -> str | None:
    """What a checkpoint lacks; None if it is complete."""
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
    """The newest checkpoint that is complete; newer ones that are not are set aside under another name.

    Args:
        folder: where checkpoints are.
        on_message: told of each that is refused.
    """
    for step in reversed(checkpoint_steps(folder)):
        checkpoint = checkpoint_folder(folder, step)
        problem = what_is_wrong(checkpoint)
        if problem is None:
            return checkpoint
        aside = folder / (_REFUSED + checkpoint.name)
        if aside.exists():
            shutil.rmtree(aside)
        checkpoint.rename(aside)
        on_message(f"{checkpoint} is refused: {problem}. It is now {aside.name}; the one before it is taken")
    return None
