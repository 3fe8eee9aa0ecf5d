"""The runs of a comparison: what carries them out, whatever is trained, and the files that they leave."""

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
from attention_priors.lab.train import Observer, OptimizationSettings, train

Progress = Callable[[str, int, int], None]
"""Called with the stage, its finished work and its total work."""

LONGEST_FOLDER_NAME = 255
"""Bytes; file systems allow no longer names."""

SOFTWARE = ("attention-priors", "torch", "transformers", "tokenizers", "accelerate")
"""Libraries that a decoder's numbers depend on."""

MEASUREMENTS = (
    "results.jsonl",
    "log.jsonl",
    "measured.json",
    "priors.json",
    "losses.json",
    "evaluate_seconds.json",
    "accuracy.json",
)
"""Files about a trained model, beside it in its folder."""


def folder_name(scheme: str) -> str:
    """Return a scheme's name as the name of a folder."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "_", scheme).strip(".") or "_"
    if len(name) <= LONGEST_FOLDER_NAME:
        return name
    digest = hashlib.sha256(scheme.encode()).hexdigest()[:12]
    return f"{name[: LONGEST_FOLDER_NAME - 13]}-{digest}"


def check_folders(what: str, names: Iterable[str]) -> None:
    """Check that each of some names has a folder of its own.

    Args:
        what: Kind of thing that is named, for the message.
        names: Names of schemes or extensions.

    Raises:
        ValueError: Two names would share a folder.
    """
    folders: dict[str, str] = {}
    for name in names:
        other = folders.setdefault(folder_name(name), name)
        if other != name:
            raise ValueError(f"{what} {other!r} and {name!r} would share the folder {folder_name(name)!r}")


def run_folder(output: Path, scheme: str, seed: int) -> Path:
    """Return the folder of a run in the folder of its comparison."""
    return output / "runs" / folder_name(scheme) / f"seed-{seed}"


def extended_folder(run: Path, way: str) -> Path:
    """Return the folder of one extension of a run; its files have the names of the run's own."""
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
    """Unite the environments in which files were written, as far as they say it: values that differ become a list.

    Runs may have been made on several machines and measured on others; results are collected on any.
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
    """Write ``training.json``: how a run's model was made.

    Args:
        folder: Folder of the run.
        model: Trained model.
        steps: Steps of the training.
        seconds: Time of the training.
        history: Losses, as :class:`~attention_priors.lab.train.Trained` has them.
        software: Libraries that the run's numbers depend on, whose versions are recorded.
    """
    positional = (
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ("prior." in name or "logit_scale." in name)
    )
    sizes = {"parameters": model.num_parameters(), "prior_parameters": sum(positional)}
    record = {"train_seconds": round(seconds, 1), "steps": steps, "history": history} | sizes
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
    """Train a model of a run, from where it stopped, and save it with its ``training.json``.

    Args:
        model: Model with its first weights.
        rows: As for :func:`~attention_priors.lab.train.train`.
        settings: The optimiser and the schedule.
        folder: Folder of the model, which will be in ``model``.
        seed: Seed of the training.
        progress: Called with every step.
        preprocessor: Tokenizer or image processor to save with the model; None where there is none.
        software: Libraries that the run's numbers depend on, whose versions are recorded.
        options: Further arguments of :func:`~attention_priors.lab.train.train`.
    """
    for name in MEASUREMENTS:
        # Of an earlier model, whose weights are gone: a new one's rows do not join its.
        (folder / name).unlink(missing_ok=True)
    with WallClock(folder / "train_seconds.json") as clock:

        def on_step(step: int) -> None:
            clock.tick()
            progress("train", step, settings.total_steps)

        observer = Observer(on_step=on_step)
        trained = train(model, rows, settings, folder / "checkpoints", seed=seed, observer=observer, **options)
        write_training(folder, model, settings.total_steps, clock.seconds, trained.history, software)
    trained.save(folder / "model", preprocessor)
    clock.forget()  # until the model is there, the next call writes the time anew
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
"""Checks that each scheme of a recipe has a folder of its own."""
