"""Comparisons of classifiers of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention_priors._io import read_json
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study.environment import environment_of
from attention_priors.lab.study.folders import run_folder
from attention_priors.lab.study.images.augmentation import Collate, PictureRows
from attention_priors.lab.study.images.pictures import load_pictures
from attention_priors.lab.study.images.recipe import ImageRecipe, VisionScheme
from attention_priors.lab.study.images.run import STAGES, execute
from attention_priors.lab.study.results import described, run_row, study_row
from attention_priors.lab.study.study import Progress, Study


class ImageStudy(Study):
    """An :class:`ImageRecipe` with its images.

    Raises:
        RecipeError: the images cannot be loaded.
    """

    def __init__(self, recipe: ImageRecipe) -> None:
        self._recipe = recipe
        try:
            self.pictures = load_pictures(recipe.images)
        except (ValueError, ModuleNotFoundError) as error:
            raise RecipeError(str(error)) from error

    @property
    def recipe(self) -> ImageRecipe:
        """The recipe."""
        return self._recipe

    def check(self) -> None:
        """Make a batch of each training."""
        for name in self._recipe.schemes:
            settings = self._recipe.training_of(name)
            try:
                size = self._recipe.model.image_size
                rows = PictureRows(self.pictures.train, size, 2, seed=0, augmentation=settings.augmentation)
                Collate(settings, len(self.pictures.classes), seed=0)([rows[0], rows[1]])
            except (ValueError, ModuleNotFoundError) as error:
                raise RecipeError(f"schemes.{name}.training: {error}") from error

    def identities(self, output: Path, scheme: str, seed: int) -> dict[Path, dict[str, Any]]:
        """One for each run."""
        recipe = self._recipe
        found = {
            "images": recipe.images.model_dump(mode="json"),
            "images_fingerprint": self.pictures.fingerprint,
            "model": recipe.model.model_dump(mode="json"),
            "training": recipe.training_of(scheme).model_dump(mode="json"),
            "evaluation": recipe.evaluation.model_dump(mode="json"),
            "scheme": recipe.schemes[scheme].positions(),
            "threads_per_run": recipe.threads_per_run,
            "seed": seed,
        }
        return {run_folder(output, scheme, seed) / "identity.json": found}

    def is_finished(self, output: Path, scheme: str, seed: int) -> bool:
        """Whether it is trained and tested."""
        return (run_folder(output, scheme, seed) / "done.json").exists()

    def stages(self, scheme: str) -> dict[str, float]:
        """Training and testing."""
        return dict(STAGES)

    def execute(self, output: Path, scheme: str, seed: int, progress: Progress) -> None:
        """Train and test."""
        execute(self._recipe, self.pictures, scheme, seed, run_folder(output, scheme, seed), progress)

    def collect(self, output: Path, runs: Sequence[tuple[str, int]], wall_seconds: float) -> list[dict[str, Any]]:
        """Return the rows that :mod:`attention_priors.lab.results` describes."""
        schemes: dict[str, dict[str, Any]] = {}
        rows: list[dict[str, Any]] = []
        environments: list[dict[str, Any]] = []
        for scheme, seed in runs:
            folder = run_folder(output, scheme, seed)
            training, done = read_json(folder / "training.json"), read_json(folder / "done.json")
            environments += [environment_of(training), environment_of(done)]
            schemes.setdefault(
                scheme,
                {
                    "row": "scheme",
                    "scheme": scheme,
                    "description": _description(self._recipe.schemes[scheme]),
                    "parameters": training["parameters"],
                    "prior_parameters": training["prior_parameters"],
                },
            )
            found = [run_row(training)]
            found += [{"row": "accuracy"} | row for row in read_json(folder / "accuracy.json")]
            found += [{"row": "prior_map"} | row for row in read_json(folder / "priors.json")]
            rows += [{"row": row["row"], "scheme": scheme, "seed": seed} | row for row in found]
        pictures = self.pictures
        images = {
            "name": pictures.name,
            "fingerprint": pictures.fingerprint,
            "train": len(pictures.train),
            "test": len(pictures.test),
            "classes": len(pictures.classes),
        }
        first = study_row(self._recipe, rows, environments, wall_seconds) | {"images": images}
        return [first, *(schemes[name] for name in self._recipe.schemes if name in schemes), *rows]


def _description(scheme: VisionScheme) -> str:
    words = ["table of places"] if scheme.position_table else []
    words += described([scheme.prior, scheme.logit_scale])
    if scheme.position_units == "image":
        words.append("in units of the image")
    if scheme.share_prior:
        words.append("one prior for all layers")
    words = words or ["no position"]
    if scheme.training:
        words += described([{"name": "training"} | scheme.training])
    return " · ".join(words)
