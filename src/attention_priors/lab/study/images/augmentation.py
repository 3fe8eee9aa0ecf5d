"""Training rows of images, which depend only on a seed and the row's index."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import Dataset

from attention_priors.lab.data.packing import EpochOrder, row_seed
from attention_priors.lab.study.images.pictures import Labelled, resized, scaled
from attention_priors.lab.study.images.recipe import Augmentation, ImageTrainingSettings


class PictureRows(Dataset[dict[str, Any]]):
    """Training images in a random order per epoch, cropped to the training size.

    Args:
        pictures: training images.
        size: rows and columns, in pixels.
        num_rows: number of rows.
        seed: seed of the permutations and crops.
        augmentation: settings, of which this class applies the crop and RandAugment to single images.
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
                # RandAugment needs colour channels.
                changed = self._change(image.expand(1, 3, -1, -1) if len(image) == 1 else image[None])[0]
                image = changed.mean(0, keepdim=True) if len(image) == 1 else changed
        return {"row": index, "image": image, "label": label}

    def _cut(self, image: Tensor) -> Tensor:
        """Return kornia's random crop, antialiased when downscaled, like test images."""
        assert self._crop is not None
        corners = self._crop.forward_parameters(image[None].shape)["src"][0].long()
        (left, top), (right, bottom) = corners[0].tolist(), corners[2].tolist()
        return scaled(image[:, top : bottom + 1, left : right + 1], (self._size, self._size))


class Collate:
    """Collate function for rows: augments images, scales them to ``[-1, 1]``, and makes soft labels.

    The draws depend only on the seed and the rows of the batch.

    Args:
        settings: training settings.
        classes: number of classes.
        seed: seed of the draws.
    """

    def __init__(self, settings: ImageTrainingSettings, classes: int, seed: int) -> None:
        self._smoothing, self._classes = settings.label_smoothing, classes
        # Crops of rows use the seed itself; a derived seed makes the draws of batches independent of them.
        self._seed = row_seed(seed, -1)
        self._changes = _changes(settings.augmentation)
        mixes = ((mixup, settings.augmentation.mixup), (cutmix, settings.augmentation.cutmix))
        self._mixes = [partial(mix, parameter=parameter) for mix, parameter in mixes if parameter is not None]

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return ``pixel_values``, ``(B, C, rows, columns)``, and ``labels``, ``(B, classes)``."""
        images = torch.stack([row["image"] for row in rows])
        labels = torch.tensor([row["label"] for row in rows])
        with _seeded(row_seed(self._seed, rows[0]["row"])):
            for change in self._changes:
                images = change(images)
            shares = one_hot(labels, self._classes).float()
            if self._mixes:
                images, shares = self._mixes[int(torch.randint(len(self._mixes), ()))](images, shares)
        smooth = self._smoothing
        return {"pixel_values": normalised(images), "labels": shares * (1 - smooth) + smooth / self._classes}


def normalised(images: Tensor) -> Tensor:
    """Scale images from ``[0, 1]`` to ``[-1, 1]``, the input range of models."""
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


# kornia's mixup draws a uniform weight per image, and its cutmix keeps patches inside the image. Both papers draw one
# weight per batch from a beta distribution, and cutmix patches may be clipped at the edge.


def mixup(images: Tensor, shares: Tensor, parameter: float) -> tuple[Tensor, Tensor]:
    """Blend each image and its soft label with another image of the batch (Zhang et al. 2018).

    Args:
        images: ``(B, C, rows, columns)``.
        shares: Soft labels ``(B, classes)``.
        parameter: ``a`` of the ``Beta(a, a)`` distribution of the first image's weight, drawn once per batch.
    """
    weight = torch.distributions.Beta(parameter, parameter).sample()
    other = torch.randperm(len(images))
    return weight * images + (1 - weight) * images[other], weight * shares + (1 - weight) * shares[other]


def cutmix(images: Tensor, shares: Tensor, parameter: float) -> tuple[Tensor, Tensor]:
    """Replace a patch of each image by that of another, and mix their soft labels by area (Yun et al. 2019).

    Args:
        images: ``(B, C, rows, columns)``.
        shares: Soft labels ``(B, classes)``.
        parameter: ``a`` of the ``Beta(a, a)`` distribution of the first image's area, drawn once per batch.
    """
    weight = float(torch.distributions.Beta(parameter, parameter).sample())
    other, sides = torch.randperm(len(images)), torch.tensor(images.shape[2:])
    half = sides * math.sqrt(1 - weight) / 2
    middle = torch.rand(2) * sides
    top, left = (middle - half).round().clamp(min=0).long().tolist()
    bottom, right = torch.minimum((middle + half).round().long(), sides).tolist()
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[other, :, top:bottom, left:right]
    area = (bottom - top) * (right - left) / int(sides.prod())
    return mixed, shares * (1 - area) + shares[other] * area


def _kornia() -> Any:
    try:
        import kornia.augmentation
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("augmentation needs kornia: pip install 'attention-priors[images]'") from error
    return kornia.augmentation


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's CPU generator inside a context and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        # Seed the CPU alone: torch.manual_seed would seed the generators of all devices.
        torch.default_generator.manual_seed(seed)
        yield
