"""Comparisons of image classifiers: trained at one resolution, tested at several.

Every finished step of a run is on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import set_seed

from attention_priors._io import read_json, write_json
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study.images.augmentation import Collate, PictureRows, normalised
from attention_priors.lab.study.images.pictures import load_pictures, processor_for, resized
from attention_priors.lab.study.images.recipe import ImageRecipe, VisionScheme
from attention_priors.lab.study.results import ModelResults, described, run_row, study_rows
from attention_priors.lab.study.runs import Progress, environment, run_folder, train_and_save
from attention_priors.lab.train.extend import for_evaluation
from attention_priors.lab.train.recipe import RunningSettings
from attention_priors.lab.train.trainer import SealedTrainer
from attention_priors.models.vision import PriorVisionForImageClassification
from attention_priors.priors import grid_positions

SOFTWARE = ("attention-priors", "torch", "transformers", "accelerate", "kornia")
STAGES = {"train": 0.8, "test": 0.2}

FLOOR = -100.0
"""Smallest log-prior of a map, relative to its maximum, in nats."""


class ImageStudy:
    """:class:`ImageRecipe` with its images.

    Args:
        recipe: Recipe of the comparison.

    Raises:
        RecipeError: the images cannot be loaded.
    """

    left_out: str | None = None
    """Message about unused files; always None."""

    def __init__(self, recipe: ImageRecipe) -> None:
        self.recipe = recipe
        try:
            self.pictures = load_pictures(recipe.images)
        except (ValueError, ModuleNotFoundError) as error:
            raise RecipeError(str(error)) from error

    def check(self) -> None:
        """Check each scheme's training by making a batch.

        Raises:
            RecipeError: a batch cannot be made.
        """
        for name in self.recipe.schemes:
            settings = self.recipe.training_of(name)
            try:
                size = self.recipe.model.image_size
                rows = PictureRows(self.pictures.train, size, 2, seed=0, augmentation=settings.augmentation)
                Collate(settings, len(self.pictures.classes), seed=0)([rows[0], rows[1]])
            except (ValueError, ModuleNotFoundError) as error:
                raise RecipeError(f"schemes.{name}.training: {error}") from error

    def identities(self, output: Path, scheme: str, seed: int) -> dict[Path, dict[str, Any]]:
        """Return the content of the run's ``identity.json``: everything that determines the run."""
        recipe = self.recipe
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
        """Return whether a run is trained and tested."""
        return (run_folder(output, scheme, seed) / "done.json").exists()

    def stages(self, scheme: str) -> dict[str, float]:
        """Return the stages with their approximate shares of the time."""
        return dict(STAGES)

    def execute(self, output: Path, scheme: str, seed: int, progress: Progress) -> None:
        """Train and test, resuming an interrupted run.

        Args:
            output: Folder of the comparison.
            scheme: Name of the scheme.
            seed: Seed of the initial weights, the order of images and their augmentation.
            progress: Callback for every step.
        """
        folder, total = run_folder(output, scheme, seed), self.recipe.training_of(scheme).total_steps
        if not (folder / "model").exists():
            self._train(scheme, seed, folder, progress)
        progress("train", total, total)
        self._test(folder, progress)

    def _train(self, scheme: str, seed: int, folder: Path, progress: Progress) -> None:
        recipe, pictures = self.recipe, self.pictures
        settings = recipe.training_of(scheme)
        progress("train", 0, settings.total_steps)
        set_seed(seed)
        config = recipe.config_of(scheme, channels=pictures.channels, classes=len(pictures.classes))
        config.id2label = dict(enumerate(pictures.classes))
        config.label2id = {name: index for index, name in enumerate(pictures.classes)}
        model = PriorVisionForImageClassification(config)
        rows = PictureRows(pictures.train, recipe.model.image_size, settings.total_rows, seed, settings.augmentation)
        train_and_save(
            model,
            rows,
            settings,
            folder,
            seed=seed,
            progress=progress,
            preprocessor=processor_for(config, recipe.evaluation.interpolation),
            software=SOFTWARE,
            run_name=f"{recipe.name}, {scheme}",
            collate=Collate(settings, len(pictures.classes), seed),
            running=RunningSettings(**recipe.running.model_dump()),
            shuffle=False,  # the seed already determines the order of rows
            trainer_class=SealedTrainer,
        )

    def _test(self, folder: Path, progress: Progress) -> None:
        """Measure accuracy at each size, and write each result as soon as it is known."""
        path, settings = folder / "accuracy.json", self.recipe.evaluation
        rows: list[dict[str, int]] = read_json(path) if path.exists() else []
        model: Any = for_evaluation(PriorVisionForImageClassification.from_pretrained(folder / "model"))
        if not (folder / "priors.json").exists():
            write_json(folder / "priors.json", prior_maps(model))
        tests: Any = self.pictures.test
        trials, workers = len(tests), self.recipe.running.workers
        total = trials * len(settings.sizes)
        for count, size in enumerate(settings.sizes):
            progress("test", count * trials, total)
            if any(row["size"] == size for row in rows):
                continue
            collate = partial(_scaled_batch, size=size, interpolation=settings.interpolation)
            right = seen = 0
            for images, labels in DataLoader(tests, settings.batch_size, num_workers=workers, collate_fn=collate):
                with torch.no_grad():
                    logits = model(normalised(images).to(model.device)).logits
                right += int((logits.argmax(-1).cpu() == labels).sum())
                seen += len(labels)
                progress("test", count * trials + seen, total)
            rows.append({"size": size, "correct": right, "trials": trials})
            write_json(path, rows)
        progress("test", total, total)
        write_json(folder / "done.json", environment(SOFTWARE))

    def collect(self, output: Path, runs: Sequence[tuple[str, int]], wall_seconds: float) -> list[dict[str, Any]]:
        """Return the rows described in :mod:`attention_priors.lab.results`."""
        found: list[ModelResults] = []
        for scheme, seed in runs:
            folder = run_folder(output, scheme, seed)
            training, done = read_json(folder / "training.json"), read_json(folder / "done.json")
            entry = {
                "row": "scheme",
                "scheme": scheme,
                "description": _description(self.recipe.schemes[scheme]),
                "parameters": training["parameters"],
                "prior_parameters": training["prior_parameters"],
            }
            rows = [run_row(training)]
            rows += [{"row": "accuracy"} | row for row in read_json(folder / "accuracy.json")]
            rows += [{"row": "prior_map"} | row for row in read_json(folder / "priors.json")]
            found.append(ModelResults(entry, seed, [training, done], rows))
        pictures = self.pictures
        images = {
            "name": pictures.name,
            "fingerprint": pictures.fingerprint,
            "train": len(pictures.train),
            "test": len(pictures.test),
            "classes": len(pictures.classes),
        }
        return study_rows(self.recipe, self.recipe.schemes, found, wall_seconds, images=images)


def _scaled_batch(rows: Sequence[tuple[Tensor, int]], size: int, interpolation: str) -> tuple[Tensor, Tensor]:
    """Return scaled images and their classes."""
    images = torch.stack([resized(image, size, interpolation) for image, _ in rows])
    return images, torch.tensor([label for _, label in rows])


@torch.no_grad()
def prior_maps(model: PriorVisionForImageClassification) -> list[dict[str, Any]]:
    """Return each head's prior around the centre of the training grid (GOAT, Figure 5b).

    Returns:
        ``layer``, ``head`` and ``log_prior``. For each row of patches, ``log_prior`` lists the log-priors of its keys
        for the central patch, relative to the largest, in nats, at least ``FLOOR``. Layers that share a prior count as
        layer 0.
    """
    rows, columns = model.config.grid
    positions = grid_positions(rows, columns, device=model.device)
    middle = positions[(rows // 2) * columns + columns // 2]
    stack: Any = model.model.stack
    priors = [stack.prior] if model.config.share_prior else [layer.self_attn.prior for layer in stack.layers]
    maps = []
    for layer, prior in enumerate(priors):
        if prior is None:
            continue
        found = prior.log_prior(middle.unsqueeze(0), positions, torch.float64)[:, 0]
        found = (found - found.amax(-1, keepdim=True)).clamp(min=FLOOR).view(-1, rows, columns)
        maps += [
            {"layer": layer, "head": head, "log_prior": [[round(float(x), 4) for x in line] for line in one]}
            for head, one in enumerate(found)
        ]
    return maps


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
