"""Training rows of images: each step's images, drawn and changed by a seed and the row's number alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import Dataset

from attention_priors.lab.data.epoch_order import EpochOrder
from attention_priors.lab.data.packing import row_seed
from attention_priors.lab.study.images.pictures import Labelled, resized, scaled
from attention_priors.lab.study.images.recipe import Augmentation, ImageTrainingSettings


class PictureRows(Dataset[dict[str, Any]]):
    """Row ``i`` is the image that a permutation of its epoch puts there, cut to the training size.

    Args:
        pictures: what to draw from.
        size: rows and columns, in pixels.
        num_rows: how many.
        seed: of the permutations and the cuts.
        augmentation: of which the cut and RandAugment are for each image by itself.
    """

    def __init__(self, pictures: Labelled, size: int, num_rows: int, seed: int, augmentation: Augmentation) -> None:
        self._pictures, self._size, self._rows, self._seed = pictures, size, num_rows, seed
        crop, strength = augmentation.crop, augmentation.rand_augment
        self._crop = None if crop is None else _kornia().RandomResizedCrop((size, size), scale=crop)
        self._change = None if strength is None else _kornia().auto.RandAugment(*strength)
        self._order = EpochOrder(len(pictures), seed)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._rows:
            raise IndexError(f"index must be from 0 to {self._rows - 1}; it is {index}")
        image, label = self._pictures[self._order[index]]
        with _seeded(row_seed(self._seed, index)):
            image = resized(image, self._size) if self._crop is None else self._cut(image)
            if self._change is not None:
                # Some of its changes are of colours.
                changed = self._change(image.expand(1, 3, -1, -1) if len(image) == 1 else image[None])[0]
                image = changed.mean(0, keepdim=True) if len(image) == 1 else changed
        return {"row": index, "image": image, "label": label}

    def _cut(self, image: Tensor) -> Tensor:
        """The cut that kornia draws, smoothed where it is scaled down, as the images that are tested on are."""
        assert self._crop is not None
        corners = self._crop.forward_parameters(image[None].shape)["src"][0].long()
        (left, top), (right, bottom) = corners[0].tolist(), corners[2].tolist()
        return scaled(image[:, top : bottom + 1, left : right + 1], (self._size, self._size))


class Collate:
    """Makes a batch of rows: changed as a recipe says, from -1 to 1, with the shares of the classes.

    What is drawn depends on the seed and on the rows of the batch alone.

    Args:
        settings: of the training.
        classes: how many there are.
        seed: of what is drawn.
    """

    def __init__(self, settings: ImageTrainingSettings, classes: int, seed: int) -> None:
        self._smoothing, self._classes = settings.label_smoothing, classes
        # Rows are cut with numbers drawn from the seed's own: what is drawn for a batch has nothing to do with them.
        self._seed = row_seed(seed, -1)
        self._changes = _changes(settings.augmentation)
        self._mixes = _mixes(settings.augmentation)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """``pixel_values``, ``(B, C, rows, columns)``, and ``labels``, ``(B, classes)``."""
        images = torch.stack([row["image"] for row in rows])
        labels = torch.tensor([row["label"] for row in rows])
        with _seeded(row_seed(self._seed, rows[0]["row"])):
            for change in self._changes:
                images = change(images)
            shares = one_hot(labels, self._classes).float()
            if self._mixes:
                mix, parameter = self._mixes[int(torch.randint(len(self._mixes), ()))]
                images, shares = mix(images, shares, parameter)
        smooth = self._smoothing
        return {"pixel_values": normalised(images), "labels": shares * (1 - smooth) + smooth / self._classes}


def normalised(images: Tensor) -> Tensor:
    """From 0 to 1 to from -1 to 1, as models read them."""
    return images * 2 - 1


def _changes(settings: Augmentation) -> list[Any]:
    changes: list[Any] = []
    if settings.shift or settings.zoom != (1.0, 1.0):
        shift = (settings.shift, settings.shift)
        changes.append(_kornia().RandomAffine(0.0, translate=shift, scale=settings.zoom, p=settings.moved))
    if settings.flip:
        changes.append(_kornia().RandomHorizontalFlip(p=settings.flip))
    if settings.erase:
        changes.append(_kornia().RandomErasing(p=settings.erase))
    return changes


def _mixes(settings: Augmentation) -> list[tuple[Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]], float]]:
    return [
        (mix, parameter)
        for mix, parameter in ((mixup, settings.mixup), (cutmix, settings.cutmix))
        if parameter is not None
    ]


def mixup(images: Tensor, shares: Tensor, parameter: float) -> tuple[Tensor, Tensor]:
    """Each image and its classes' shares, faded into another's of the batch (Zhang et al. 2018).

    Args:
        images: ``(B, C, rows, columns)``.
        shares: ``(B, classes)``.
        parameter: ``a`` of the ``Beta(a, a)`` that the weight of the first image is drawn from, one for the batch.
    """
    weight = torch.distributions.Beta(parameter, parameter).sample()
    other = torch.randperm(len(images))
    return weight * images + (1 - weight) * images[other], weight * shares + (1 - weight) * shares[other]


def cutmix(images: Tensor, shares: Tensor, parameter: float) -> tuple[Tensor, Tensor]:
    """Each image with a piece of another in its place, the classes' shares by area (Yun et al. 2019).

    Args:
        images: and
        shares: as for :func:`mixup`.
        parameter: likewise, of the share of the area that stays.
    """
    weight = float(torch.distributions.Beta(parameter, parameter).sample())
    other, sides = torch.randperm(len(images)), torch.tensor(images.shape[2:])
    half = sides * math.sqrt(1 - weight) / 2
    middle = torch.rand(2) * sides
    first = (middle - half).round().clamp(min=0).long().tolist()
    last = torch.minimum((middle + half).round().long(), sides).tolist()
    mixed = images.clone()
    piece = (slice(None), slice(None), slice(first[0], last[0]), slice(first[1], last[1]))
    mixed[piece] = images[other][piece]
    area = (last[0] - first[0]) * (last[1] - first[1]) / int(sides.prod())
    return mixed, shares * (1 - area) + shares[other] * area


def _kornia() -> Any:
    try:
        import kornia.augmentation
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("images are changed by kornia: pip install 'attention-priors[images]'") from error
    return kornia.augmentation


class _seeded:  # noqa: N801
    """Draws of PyTorch on the CPU from a seed, and then as if nothing had been."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._state = torch.random.get_rng_state()
        # Of the CPU alone: torch.manual_seed would start those of all devices anew.
        torch.default_generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        torch.random.set_rng_state(self._state)
