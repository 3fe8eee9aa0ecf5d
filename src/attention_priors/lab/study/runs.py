"""Execution of runs, and the files of a run."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.image_processing_base import ImageProcessingMixin

from attention_priors._io import write_json
from attention_priors.lab.machine import WallClock, processor, versions
from attention_priors.lab.train import Observer
from attention_priors.lab.train.engine import train
from attention_priors.lab.train.recipe import OptimizationSettings
from attention_priors.lab.train.run import numbers_of_parameters

Progress = Callable[[str, int, int], None]
"""Callback with the stage, its finished work and its total work."""

LONGEST_FOLDER_NAME = 255
"""Longest folder name in bytes that file systems allow."""

SOFTWARE = ("attention-priors", "torch", "transformers", "tokenizers", "accelerate")
"""Libraries that affect a decoder's results."""

MEASUREMENTS = (
    "results.jsonl",
    "log.jsonl",
    "measured.json",
    "priors.json",
    "losses.json",
    "evaluate_seconds.json",
    "accuracy.json",
)
"""Files with measurements of a trained model, in the model's run folder."""


def folder_name(scheme: str) -> str:
    """Return the folder name of a scheme."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "_", scheme).strip(".") or "_"
    if len(name) <= LONGEST_FOLDER_NAME:
        return name
    digest = hashlib.sha256(scheme.encode()).hexdigest()[:12]
    return f"{name[: LONGEST_FOLDER_NAME - 13]}-{digest}"


def check_folders(what: str, names: Iterable[str]) -> None:
    """Check that all names have different folders.

    Args:
        what: Kind of the names, for the message.
        names: Names of schemes or extensions.

    Raises:
        ValueError: two names would share a folder.
    """
    folders: dict[str, str] = {}
    for name in names:
        other = folders.setdefault(folder_name(name), name)
        if other != name:
            raise ValueError(f"{what} {other!r} and {name!r} would share the folder {folder_name(name)!r}")


def run_folder(output: Path, scheme: str, seed: int) -> Path:
    """Return the folder of a run inside the folder of its comparison."""
    return output / "runs" / folder_name(scheme) / f"seed-{seed}"


def extended_folder(run: Path, way: str) -> Path:
    """Return the folder of one extension of a run; it holds the same files as the run's own folder."""
    return run / "extended" / folder_name(way)


def environment(software: Iterable[str] = SOFTWARE) -> dict[str, dict[str, str | None]]:
    """Return the ``versions`` of libraries and the ``machine`` of this process.

    Args:
        software: Names of the libraries.
    """
    return {
        "versions": versions(software),
        "machine": {"platform": platform.platform(), "processor": processor(), "cores": str(os.cpu_count())},
    }


def united(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Merge the environments of several files; values that differ are joined by commas.

    Runs may be trained and measured on different machines, and results collected on any machine.
    """
    found: dict[str, dict[str, str]] = {}
    for part in ("versions", "machine"):
        entries = [one[part] for one in records if part in one]
        keys = dict.fromkeys(key for one in entries for key in one)
        found[part] = {key: ", ".join(dict.fromkeys(str(one.get(key)) for one in entries)) for key in keys}
    return found


def write_training(
    folder: Path,
    model: PreTrainedModel,
    steps: int = 0,
    seconds: float = 0.0,
    history: Sequence[Mapping[str, float]] = (),
    software: Iterable[str] = SOFTWARE,
) -> None:
    """Write ``training.json``, the record of a run's training.

    Args:
        folder: Folder of the run.
        model: Trained model.
        steps: Number of training steps.
        seconds: Training time.
        history: Losses, as in :class:`~attention_priors.lab.train.engine.Trained`.
        software: Libraries that affect the results. Their versions are recorded.
    """
    record = {"train_seconds": round(seconds, 1), "steps": steps, "history": history} | numbers_of_parameters(model)
    write_json(folder / "training.json", record | environment(software))


def train_and_save(
    model: PreTrainedModel,
    rows: Dataset[Any],
    settings: OptimizationSettings,
    folder: Path,
    *,
    seed: int,
    progress: Progress,
    preprocessor: PreTrainedTokenizerBase | ImageProcessingMixin | None,
    software: Iterable[str] = SOFTWARE,
    **options: Any,
) -> None:
    """Train the model of a run, resuming from its last checkpoint, and save it with its ``training.json``.

    Args:
        model: Model with initial weights.
        rows: see :func:`~attention_priors.lab.train.engine.train`.
        settings: Optimizer and schedule.
        folder: Folder of the run. The model is saved in its subfolder ``model``.
        seed: Seed of the training.
        progress: Callback for every step.
        preprocessor: Tokenizer or image processor to save. None saves neither.
        software: Libraries that affect the results. Their versions are recorded.
        options: Further arguments of :func:`~attention_priors.lab.train.engine.train`.
    """
    for name in MEASUREMENTS:
        # Remove measurements of an earlier model, so that they do not mix with those of this model.
        (folder / name).unlink(missing_ok=True)
    with WallClock(folder / "train_seconds.json") as clock:

        def on_step(step: int) -> None:
            clock.tick()
            progress("train", step, settings.total_steps)

        observer = Observer(on_step=on_step)
        trained = train(model, rows, settings, folder / "checkpoints", seed=seed, observer=observer, **options)
        write_training(folder, model, settings.total_steps, clock.seconds, trained.history, software)
    trained.save(folder / "model", preprocessor)
    clock.forget()  # only now: without a saved model, the next call writes the time again
    shutil.rmtree(folder / "checkpoints")


def _distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be distinct, got {list(seeds)}")
    return seeds


Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...], Field(min_length=1), AfterValidator(_distinct)]
"""Seeds of a recipe."""


def _with_own_folders(schemes: dict[str, Any]) -> dict[str, Any]:
    check_folders("schemes", schemes)
    return schemes


OwnFolders = AfterValidator(_with_own_folders)
"""Validator that each scheme of a recipe has a folder of its own."""
