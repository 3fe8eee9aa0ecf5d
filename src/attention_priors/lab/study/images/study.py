"""Comparisons of classifiers of images: trained at one resolution, tested at several.

Every finished step of a run is on disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import set_seed

from attention_priors._io import read_json, write_json
from attention_priors.lab.machine import WallClock
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study.images.augmentation import Collate, PictureRows, normalised
from attention_priors.lab.study.images.pictures import Labelled, load_pictures, processor_for, resized
from attention_priors.lab.study.images.recipe import ImageRecipe, VisionScheme
from attention_priors.lab.study.results import described, run_row, study_row
from attention_priors.lab.study.runs import (
    Progress,
    Study,
    environment,
    environment_of,
    run_folder,
    write_training,
)
from attention_priors.lab.train import Observer, RunningSettings, SealedTrainer, train
from attention_priors.models.vision import PriorVisionForImageClassification
from attention_priors.priors import grid_positions

SOFTWARE = ("attention-priors", "torch", "transformers", "accelerate", "kornia")
STAGES = {"train": 0.8, "test": 0.2}

FLOOR = -100.0
"""Log-priors are kept no lower than this many nats: less is nothing."""


class ImageStudy(Study[ImageRecipe]):
    """An :class:`ImageRecipe` with its images.

    Args:
        recipe: Recipe of the comparison.

    Raises:
        RecipeError: The images cannot be loaded.
    """

    def __init__(self, recipe: ImageRecipe) -> None:
        self.recipe = recipe
        try:
            self.pictures = load_pictures(recipe.images)
        except (ValueError, ModuleNotFoundError) as error:
            raise RecipeError(str(error)) from error

    def check(self) -> None:
        """Make a batch of each training."""
        for name in self.recipe.schemes:
            settings = self.recipe.training_of(name)
            try:
                size = self.recipe.model.image_size
                rows = PictureRows(self.pictures.train, size, 2, seed=0, augmentation=settings.augmentation)
                Collate(settings, len(self.pictures.classes), seed=0)([rows[0], rows[1]])
            except (ValueError, ModuleNotFoundError) as error:
                raise RecipeError(f"schemes.{name}.training: {error}") from error

    def identities(self, output: Path, scheme: str, seed: int) -> dict[Path, dict[str, Any]]:
        """Return what determines a run."""
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
        """Return the stages: training and testing."""
        return dict(STAGES)

    def execute(self, output: Path, scheme: str, seed: int, progress: Progress) -> None:
        """Train and test from where the run stopped.

        Args:
            output: Folder of the comparison.
            scheme: Name of the scheme.
            seed: Seed of the initial weights, the order of images and their changes.
            progress: Called with every step.
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
        for name in ("accuracy.json", "priors.json"):
            (folder / name).unlink(missing_ok=True)  # of an earlier model, whose weights are gone
        set_seed(seed)
        config = recipe.config_of(scheme, channels=pictures.channels, classes=len(pictures.classes))
        config.id2label = dict(enumerate(pictures.classes))
        config.label2id = {name: index for index, name in enumerate(pictures.classes)}
        model = PriorVisionForImageClassification(config)
        rows = PictureRows(pictures.train, recipe.model.image_size, settings.total_rows, seed, settings.augmentation)
        with WallClock(folder / "train_seconds.json") as clock:

            def on_step(step: int) -> None:
                clock.tick()
                progress("train", step, settings.total_steps)

            trained = train(
                model,
                rows,
                settings,
                folder / "checkpoints",
                collate=Collate(settings, len(pictures.classes), seed),
                seed=seed,
                running=RunningSettings(**recipe.running.model_dump()),
                shuffle=False,  # the rows are in the order that the seed gives them
                observer=Observer(on_step=on_step),
                trainer_class=SealedTrainer,
            )
            write_training(
                folder,
                model,
                steps=settings.total_steps,
                seconds=clock.seconds,
                history=trained.history,
                software=SOFTWARE,
            )
        trained.save(folder / "model", processor_for(config, recipe.evaluation.interpolation))
        clock.forget()  # until the model is there, the next call writes the time anew
        shutil.rmtree(folder / "checkpoints")

    def _test(self, folder: Path, progress: Progress) -> None:
        """Write how many images are right at each size as soon as it is known."""
        path, settings = folder / "accuracy.json", self.recipe.evaluation
        rows: list[dict[str, int]] = read_json(path) if path.exists() else []
        model: Any = PriorVisionForImageClassification.from_pretrained(folder / "model").eval()
        if torch.cuda.is_available():
            model.to(torch.device("cuda"))
        if not (folder / "priors.json").exists():
            write_json(folder / "priors.json", prior_maps(model))
        trials = len(self.pictures.test)
        total = trials * len(settings.sizes)
        for count, size in enumerate(settings.sizes):
            progress("test", count * trials, total)
            if any(row["size"] == size for row in rows):
                continue
            scaled = _Scaled(self.pictures.test, size, settings.interpolation)
            right = seen = 0
            for images, labels in DataLoader(scaled, settings.batch_size, num_workers=self.recipe.running.workers):
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
                    "description": _description(self.recipe.schemes[scheme]),
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
        first = study_row(self.recipe, rows, environments, wall_seconds) | {"images": images}
        return [first, *(schemes[name] for name in self.recipe.schemes if name in schemes), *rows]


class _Scaled(Dataset[tuple[Tensor, int]]):
    def __init__(self, pictures: Labelled, size: int, interpolation: str) -> None:
        self._pictures, self._size, self._interpolation = pictures, size, interpolation

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self._pictures[index]
        return resized(image, self._size, self._interpolation), label


@torch.no_grad()
def prior_maps(model: PriorVisionForImageClassification) -> list[dict[str, Any]]:
    """What the prior of each head says around the middle of the training grid (GOAT, Figure 5b).

    Returns:
        ``layer``, ``head`` and ``log_prior``: for each row of patches, the log-prior of its keys for the patch in the
        middle, less the largest, in nats, at least ``FLOOR``. Layers that share a prior are one, layer 0.
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
