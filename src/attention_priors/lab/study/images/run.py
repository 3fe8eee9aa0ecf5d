"""One run: one scheme with one seed, trained at one resolution and tested at several.

Every step is on disk when it is done.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import set_seed

from attention_priors._io import read_json, write_json
from attention_priors.lab.study.environment import environment
from attention_priors.lab.study.images.augmentation import Collate, PictureRows, normalised
from attention_priors.lab.study.images.pictures import Labelled, Pictures, processor_for, resized
from attention_priors.lab.study.images.recipe import ImageRecipe
from attention_priors.lab.study.study import Progress
from attention_priors.lab.study.training_record import write_training
from attention_priors.lab.train import Observer, RunningSettings, SealedTrainer, train
from attention_priors.lab.wall_clock import WallClock
from attention_priors.models.vision import PriorVisionForImageClassification
from attention_priors.priors import grid_positions

SOFTWARE = ("attention-priors", "torch", "transformers", "accelerate", "kornia")
STAGES = {"train": 0.8, "test": 0.2}

FLOOR = -100.0
"""Log-priors are kept no lower than this many nats: less is nothing."""


def execute(recipe: ImageRecipe, pictures: Pictures, scheme: str, seed: int, folder: Path, progress: Progress) -> None:
    """Train and test, going on from whatever ``folder`` holds.

    Args:
        recipe: says what.
        pictures: what is classified.
        scheme: name of the scheme.
        seed: of the initial weights, the order of images and their changes.
        folder: the run's own.
        progress: told of every step.
    """
    if not (folder / "model").exists():
        _train(recipe, pictures, scheme, seed, folder, progress)
    total = recipe.training_of(scheme).total_steps
    progress("train", total, total)
    _test(recipe, pictures, folder, progress)


def _train(recipe: ImageRecipe, pictures: Pictures, scheme: str, seed: int, folder: Path, progress: Progress) -> None:
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


def _test(recipe: ImageRecipe, pictures: Pictures, folder: Path, progress: Progress) -> None:
    """Write how many images are right at each size as soon as it is known."""
    path, settings = folder / "accuracy.json", recipe.evaluation
    rows: list[dict[str, int]] = read_json(path) if path.exists() else []
    model: Any = PriorVisionForImageClassification.from_pretrained(folder / "model").eval()
    if torch.cuda.is_available():
        model.to(torch.device("cuda"))
    if not (folder / "priors.json").exists():
        write_json(folder / "priors.json", prior_maps(model))
    trials = len(pictures.test)
    total = trials * len(settings.sizes)
    for count, size in enumerate(settings.sizes):
        progress("test", count * trials, total)
        if any(row["size"] == size for row in rows):
            continue
        scaled = _Scaled(pictures.test, size, settings.interpolation)
        right = seen = 0
        for images, labels in DataLoader(scaled, settings.batch_size, num_workers=recipe.running.workers):
            with torch.no_grad():
                logits = model(normalised(images).to(model.device)).logits
            right += int((logits.argmax(-1).cpu() == labels).sum())
            seen += len(labels)
            progress("test", count * trials + seen, total)
        rows.append({"size": size, "correct": right, "trials": trials})
        write_json(path, rows)
    progress("test", total, total)
    write_json(folder / "done.json", environment(SOFTWARE))


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
