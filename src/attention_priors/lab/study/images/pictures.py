"""Images with classes: loaded, drawn and changed by a seed, and put into batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, one_hot
from torch.utils.data import Dataset
from transformers import CLIPImageProcessorPil
from transformers.image_utils import PILImageResampling

from attention_priors.lab.data.packing import EpochOrder, row_seed
from attention_priors.lab.study.images.recipe import Augmentation, HubPictures, ImageTrainingSettings, PictureSettings
from attention_priors.models.vision import PriorVisionConfig

DIGITS_HELD_OUT = 500
"""Of scikit-learn's 1797."""


class Labelled(Protocol):
    """Images in an order that is always the same."""

    def __len__(self) -> int:
        """How many."""
        ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        """An image, ``(C, rows, columns)`` from 0 to 1, and its class."""
        ...


@dataclass(frozen=True)
class Pictures:
    """Two parts of a set of images."""

    name: str
    fingerprint: str
    """What tells it from others of its name."""
    train: Labelled
    test: Labelled
    classes: tuple[str, ...]
    channels: int


def load_pictures(settings: PictureSettings) -> Pictures:
    """Load what a recipe names.

    Raises:
        ValueError: it cannot be loaded, or has no such fields.
        ModuleNotFoundError: scikit-learn or ``datasets`` is needed for it, and is not installed.
    """
    if settings.dataset is not None:
        return _from_hub(settings.dataset)
    return _digits()


def resized(image: Tensor, size: int, interpolation: str = "bilinear") -> Tensor:
    """An image ``(C, rows, columns)`` scaled until its shorter side has ``size`` pixels, and the middle of that.

    Smaller ones are smoothed first, so that they show what the larger one shows.
    """
    rows, columns = image.shape[1:]
    if rows == columns == size:
        return image
    # The longer side is rounded down, as image processors of transformers do it.
    shape = (rows * size // min(rows, columns), columns * size // min(rows, columns))
    top, left = (shape[0] - size) // 2, (shape[1] - size) // 2
    return scaled(image, shape, interpolation)[:, top : top + size, left : left + size]


def processor_for(config: PriorVisionConfig, interpolation: str) -> CLIPImageProcessorPil:
    """What makes a model's inputs of images of any size, but for rounding as tested images are made.

    Any of transformers' that scales the shorter side and cuts out the middle would do.
    """
    size, channels = config.sides[0], config.num_channels
    return CLIPImageProcessorPil(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        resample=PILImageResampling[interpolation.upper()],
        image_mean=[0.5] * channels,
        image_std=[0.5] * channels,
        do_convert_rgb=channels == 3,
    )


def scaled(image: Tensor, shape: tuple[int, int], interpolation: str = "bilinear") -> Tensor:
    """An image ``(C, rows, columns)`` with other numbers of rows and columns; smoothed first where they are fewer."""
    fewer = shape[0] < image.shape[1] or shape[1] < image.shape[2]
    return interpolate(image[None], size=shape, mode=interpolation, align_corners=False, antialias=fewer)[0].clamp(0, 1)


def _digits() -> Pictures:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn: pip install 'attention-priors[images]'"
        ) from error
    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = [int(label) for label in found.target]
    # They are in the order of their writers.
    order = np.random.RandomState(0).permutation(len(labels)).tolist()
    train, test = order[DIGITS_HELD_OUT:], order[:DIGITS_HELD_OUT]
    digest = hashlib.sha256(images[order].numpy().tobytes() + bytes(labels[index] for index in order))
    parts = [[(images[index], labels[index]) for index in part] for part in (train, test)]
    return Pictures("digits", digest.hexdigest(), *parts, classes=tuple("0123456789"), channels=1)


GREY = ("1", "L", "LA")
"""Modes of images that hold no colour."""


@dataclass(frozen=True)
class _HubPart:
    rows: Any
    split: str
    settings: HubPictures
    channels: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.row(index)
        picture = row[self.settings.image]
        if self.settings.channels is None and self.channels == 1 and picture.mode not in GREY:
            raise ValueError(
                f"{self._place(index)}, is of mode {picture.mode!r}, and the first one of training is grey: give "
                "images.dataset.channels, 3 for all in colour, 1 for all in grey"
            )
        picture = picture.convert("L" if self.channels == 1 else "RGB")
        pixels = torch.from_numpy(np.array(picture, dtype=np.float32)).reshape(*picture.size[::-1], self.channels)
        return pixels.movedim(-1, 0) / 255, int(row[self.settings.label])

    def row(self, index: int) -> dict[str, Any]:
        """Return an image of 8 bits a channel, decoded, with its class."""
        name = self.settings.image
        try:
            row = self.rows[index]
        except Exception as error:
            # What is raised depends on the format, and on what is wrong.
            from datasets import Image

            file = self.rows.cast_column(name, Image(decode=False))[index][name]["path"]
            raise ValueError(f"{self._place(index)} ({file}), cannot be read: {error}") from error
        mode = row[name].mode
        if mode.startswith(("I", "F")):
            raise ValueError(f"{self._place(index)}, is of mode {mode!r}: expected 8 bits a channel")
        return row

    def _place(self, index: int) -> str:
        return f"images.dataset: {self.settings.path!r}, {self.split!r}, image {index}"


def _from_hub(settings: HubPictures) -> Pictures:
    # It takes more than a second to import.
    from datasets import ClassLabel, Image, load_dataset

    parts: list[_HubPart] = []
    channels = settings.channels or 3
    for split in (settings.train, settings.test):
        try:
            which = settings.model_dump(include={"name", "data_dir", "revision"})
            part = load_dataset(settings.path, split=split, **which)
        except Exception as error:
            # What is raised, and whether it names the dataset, depends on what is wrong.
            raise ValueError(f"images.dataset: {settings.path!r}, {split!r}, cannot be loaded: {error}") from error
        for key, name, kind in (("image", settings.image, Image), ("label", settings.label, ClassLabel)):
            if not isinstance(part.features.get(name), kind):
                raise ValueError(
                    f"images.dataset.{key}: {settings.path!r} has no {kind.__name__} {name!r}; its fields are "
                    f"{dict(part.features)}"
                )
        without = next((label for label in part[settings.label] if label is None or label < 0), 0)
        if without != 0:
            raise ValueError(
                f"images.dataset: {settings.path!r}, {split!r}, has images without a class ({without}): expected 0 to "
                f"{len(part.features[settings.label].names) - 1}; name another split"
            )
        first = _HubPart(part, split, settings, channels).row(0)
        if settings.channels is None and not parts:
            channels = 1 if first[settings.image].mode in GREY else 3
        parts.append(_HubPart(part, split, settings, channels))
    train, test = parts
    fingerprint = hashlib.sha256("\n".join(part.rows._fingerprint for part in parts).encode()).hexdigest()
    classes = tuple(train.rows.features[settings.label].names)
    return Pictures(settings.path, fingerprint, train, test, classes=classes, channels=channels)


# ---- training rows, drawn and changed by a seed and the row's number alone


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
