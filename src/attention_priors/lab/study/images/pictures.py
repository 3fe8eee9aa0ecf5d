"""Labelled training and test images."""

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
"""Number of test images among scikit-learn's 1797."""


class Labelled(Protocol):
    """Labelled images in a fixed order."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        """Return an image, ``(C, rows, columns)`` from 0 to 1, and its class."""
        ...


@dataclass(frozen=True)
class Pictures:
    """Image data set with a training and a test part."""

    name: str
    fingerprint: str
    """Hash that identifies the images."""
    train: Labelled
    test: Labelled
    classes: tuple[str, ...]
    channels: int


def load_pictures(settings: PictureSettings) -> Pictures:
    """Load the images of a recipe.

    Raises:
        ValueError: the data set cannot be loaded, or a field is missing.
        ModuleNotFoundError: scikit-learn or ``datasets`` is required but not installed.
    """
    if settings.dataset is not None:
        return _from_hub(settings.dataset)
    return _digits()


def resized(image: Tensor, size: int, interpolation: str = "bilinear") -> Tensor:
    """Scale an image ``(C, rows, columns)`` until its shorter side has ``size`` pixels, and crop the centre.

    Downscaling is antialiased.
    """
    rows, columns = image.shape[1:]
    if rows == columns == size:
        return image
    # Round the longer side down, like the image processors of transformers.
    shape = (rows * size // min(rows, columns), columns * size // min(rows, columns))
    top, left = (shape[0] - size) // 2, (shape[1] - size) // 2
    return scaled(image, shape, interpolation)[:, top : top + size, left : left + size]


def processor_for(config: PriorVisionConfig, interpolation: str) -> CLIPImageProcessorPil:
    """Return an image processor that prepares inputs like the test images, up to rounding.

    Any transformers processor that scales the shorter side and crops the centre would do.
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
    """Scale an image ``(C, rows, columns)`` to another shape, antialiased when downscaling."""
    fewer = shape[0] < image.shape[1] or shape[1] < image.shape[2]
    return interpolate(image[None], size=shape, mode=interpolation, align_corners=False, antialias=fewer)[0].clamp(0, 1)


def _digits() -> Pictures:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "images.source 'digits' needs scikit-learn: pip install 'attention-priors[images]'"
        ) from error
    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = [int(label) for label in found.target]
    # Shuffle, because the digits are ordered by writer.
    order = np.random.RandomState(0).permutation(len(labels)).tolist()
    train, test = order[DIGITS_HELD_OUT:], order[:DIGITS_HELD_OUT]
    digest = hashlib.sha256(images[order].numpy().tobytes() + bytes(labels[index] for index in order))
    parts = [[(images[index], labels[index]) for index in part] for part in (train, test)]
    return Pictures("digits", digest.hexdigest(), *parts, classes=tuple("0123456789"), channels=1)


GREY = ("1", "L", "LA")
"""Modes of greyscale images."""


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
                f"{self._place(index)}, has mode {picture.mode!r}, but the first training image is grey: set "
                "images.dataset.channels to 3 for colour or 1 for grey"
            )
        picture = picture.convert("L" if self.channels == 1 else "RGB")
        pixels = torch.from_numpy(np.array(picture, dtype=np.float32)).reshape(*picture.size[::-1], self.channels)
        return pixels.movedim(-1, 0) / 255, int(row[self.settings.label])

    def row(self, index: int) -> dict[str, Any]:
        """Return a decoded image with 8 bits per channel and its class."""
        name = self.settings.image
        try:
            row = self.rows[index]
        except Exception as error:
            # The type of the error depends on the image format.
            from datasets import Image

            file = self.rows.cast_column(name, Image(decode=False))[index][name]["path"]
            raise ValueError(f"{self._place(index)} ({file}), cannot be read: {error}") from error
        mode = row[name].mode
        if mode.startswith(("I", "F")):
            raise ValueError(f"{self._place(index)}, has mode {mode!r}: expected 8 bits per channel")
        return row

    def _place(self, index: int) -> str:
        return f"images.dataset: {self.settings.path!r}, {self.split!r}, image {index}"


def _from_hub(settings: HubPictures) -> Pictures:
    # Imported here, because the import takes more than a second.
    from datasets import ClassLabel, Image, load_dataset

    parts: list[_HubPart] = []
    channels = settings.channels or 3
    for split in (settings.train, settings.test):
        try:
            which = settings.model_dump(include={"name", "data_dir", "revision"})
            part = load_dataset(settings.path, split=split, **which)
        except Exception as error:
            # Errors have many types, and may not name the dataset.
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
                f"{len(part.features[settings.label].names) - 1}; choose another split"
            )
        first = _HubPart(part, split, settings, channels).row(0)
        if settings.channels is None and not parts:
            channels = 1 if first[settings.image].mode in GREY else 3
        parts.append(_HubPart(part, split, settings, channels))
    train, test = parts
    fingerprint = hashlib.sha256("\n".join(part.rows._fingerprint for part in parts).encode()).hexdigest()
    classes = tuple(train.rows.features[settings.label].names)
    return Pictures(settings.path, fingerprint, train, test, classes=classes, channels=channels)
