"""Images with classes: what classifiers are trained on and tested on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import CLIPImageProcessorPil
from transformers.image_utils import PILImageResampling

from attention_priors.lab.study.images.recipe import HubPictures, PictureSettings
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
