"""The runs of a comparison: what carries them out, whatever is trained, and the files that they leave."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, Field
from transformers import PreTrainedModel

from attention_priors._io import write_json
from attention_priors.lab.machine import processor, versions

if TYPE_CHECKING:
    from attention_priors.lab.study.images.recipe import ImageRecipe
    from attention_priors.lab.study.recipe import Recipe


LONGEST_FOLDER_NAME = 255
"""Bytes; file systems allow no longer names."""

SOFTWARE = ("attention-priors", "torch", "transformers", "tokenizers", "accelerate")
"""Libraries that a decoder's numbers depend on."""

_PARTS = ("versions", "machine")


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


def environment_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment in which a file was written, as far as the file says it."""
    return {part: record[part] for part in _PARTS if part in record}


def united(environments: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Unite environments: a value that differs between them becomes a list.

    Runs may have been made on several machines and measured on others; results are collected on any.
    """
    found: dict[str, dict[str, str]] = {}
    for part in _PARTS:
        entries = [one[part] for one in environments if part in one]
        keys = dict.fromkeys(key for one in entries for key in one)
        found[part] = {key: ", ".join(dict.fromkeys(str(one.get(key)) for one in entries)) for key in keys}
    return found


def write_training(
    folder: Path,
    model: PreTrainedModel,
    *,
    steps: int,
    seconds: float,
    history: list[dict[str, float]],
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


Progress = Callable[[str, int, int], None]
"""Called with the stage, its finished work and its total work."""


def _distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be distinct, got {list(seeds)}")
    return seeds


Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...], Field(min_length=1), AfterValidator(_distinct)]
"""Seeds of a recipe."""

R = TypeVar("R", bound="Recipe | ImageRecipe")


class Study(ABC, Generic[R]):
    """A recipe, and all that its runs read.

    Attributes:
        recipe: Names the schemes and seeds, whose pairs are the runs.
        left_out: Files of the corpus that are not used, for the user; None if all are used.
    """

    recipe: R
    left_out: str | None = None

    @abstractmethod
    def check(self) -> None:
        """Raise a RecipeError if something that the recipe asks for cannot be made."""

    @abstractmethod
    def identities(self, output: Path, scheme: str, seed: int) -> Mapping[Path, dict[str, Any]]:
        """Return the content of each ``identity.json`` of a run: everything that determines its results."""

    @abstractmethod
    def is_finished(self, output: Path, scheme: str, seed: int) -> bool:
        """Return whether nothing of a run is left to do."""

    @abstractmethod
    def stages(self, scheme: str) -> dict[str, float]:
        """Return the stages of a run, and roughly the share of its time that each takes."""

    @abstractmethod
    def execute(self, output: Path, scheme: str, seed: int, progress: Progress) -> None:
        """Carry out one run from where it stopped. Every finished step is on disk."""

    @abstractmethod
    def collect(self, output: Path, runs: Sequence[tuple[str, int]], wall_seconds: float) -> list[dict[str, Any]]:
        """Return the rows of finished runs, which :mod:`attention_priors.lab.results` describes."""
