"""Training rows of images, drawn and changed by a seed and the row's number alone."""

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
        """Return the cut that kornia draws, smoothed where it is scaled down, as test images are."""
        assert self._crop is not None
        corners = self._crop.forward_parameters(image[None].shape)["src"][0].long()
        (left, top), (right, bottom) = corners[0].tolist(), corners[2].tolist()
        return scaled(image[:, top : bottom + 1, left : right + 1], (self._size, self._size))


class Collate:
    """Makes a batch of rows: changed as a recipe says, from -1 to 1, with the shares of the classes.

    The draws depend on the seed and on the rows of the batch alone.

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
        mixes = ((mixup, settings.augmentation.mixup), (cutmix, settings.augmentation.cutmix))
        self._mixes = [partial(mix, parameter=parameter) for mix, parameter in mixes if parameter is not None]

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """``pixel_values``, ``(B, C, rows, columns)``, and ``labels``, ``(B, classes)``."""
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
    """Scale images from ``[0, 1]`` to ``[-1, 1]``, as models read them."""
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


# kornia's mixup draws uniform weights, one for each image, and its cutmix keeps pieces inside the image. Both papers
# draw one weight for the batch from a beta distribution, and cutmix lets pieces be cut off at the edge.


def mixup(images: Tensor, shares: Tensor, parameter: float) -> tuple[Tensor, Tensor]:
    """Fade each image and its classes' shares into another image of the batch (Zhang et al. 2018).

    Args:
        images: ``(B, C, rows, columns)``.
        shares: ``(B, classes)``.
        parameter: ``a`` of the ``Beta(a, a)`` that the weight of the first image is drawn from, one for the batch.
    """
    weight = torch.distributions.Beta(parameter, parameter).sample()
    other = torch.randperm(len(images))
    return weight * images + (1 - weight) * images[other], weight * shares + (1 - weight) * shares[other]


def cutmix(images: Tensor, shares: Tensor, parameter: float) -> tuple[Tensor, Tensor]:
    """Replace a piece of each image by that of another, with the classes' shares by area (Yun et al. 2019).

    Args:
        images: ``(B, C, rows, columns)``.
        shares: ``(B, classes)``.
        parameter: ``a`` of the ``Beta(a, a)`` that the share of the area that stays is drawn from, one for the batch.
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
        raise ModuleNotFoundError("images are changed by kornia: pip install 'attention-priors[images]'") from error
    return kornia.augmentation


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw PyTorch's numbers on the CPU from a seed; afterwards its generator is as before."""
    with torch.random.fork_rng(devices=[]):
        # Of the CPU alone: torch.manual_seed would seed the generators of all devices.
        torch.default_generator.manual_seed(seed)
        yield
