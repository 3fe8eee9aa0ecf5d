"""Recipes of comparisons of classifiers of images, checked before any work is done."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from attention_priors.lab.strict_yaml import Plugins, Strict, check_one_of, errors_at
from attention_priors.lab.study.runs import OwnFolders, Seeds
from attention_priors.lab.study.sweep import varied
from attention_priors.lab.train import OptimizationSettings, ProcessSettings
from attention_priors.models.vision import PriorVisionConfig

Share = Annotated[float, Field(ge=0, le=1)]


class HubPictures(Strict):
    """Images and their classes from Hugging Face's ``datasets``."""

    path: str = Field(min_length=1)
    """A name on the Hub (``uoft-cs/cifar10``, ``ILSVRC/imagenet-1k``), or ``imagefolder`` for local files."""
    name: str | None = None
    data_dir: str | None = None
    revision: str | None = None
    train: str = "train"
    """The split to train on; ``train[:1000]`` is a part of it."""
    test: str = "test"
    image: str = "image"
    """The field that holds the image."""
    label: str = "label"
    """The field that holds the class."""
    channels: Literal[1, 3] | None = None
    """Grey or colour; None: as the first image of training is, and a colour image among grey ones is an error."""


class PictureSettings(Strict):
    """What is classified: exactly one of these."""

    source: Literal["digits"] | None = None
    """``digits``: scikit-learn's 1797 handwritten digits of 8 x 8 pixels, 500 of them held out; no network."""
    dataset: HubPictures | None = None

    @model_validator(mode="after")
    def _one(self) -> PictureSettings:
        check_one_of(self, "source", "dataset")
        return self


class VisionSizes(Strict):
    """A :class:`PriorVisionConfig`, but for how positions come in."""

    image_size: int = Field(gt=0)
    """Rows and columns of the training images, in pixels."""
    patch_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    initializer_range: float = Field(default=0.02, gt=0)
    drop_path: float = Field(default=0.0, ge=0, lt=1)
    pooling: Literal["class", "mean"] = "class"


class Augmentation(Strict):
    """How training images are changed; by kornia."""

    shift: Share = 0.0
    """Up to this share of the side, in both directions."""
    zoom: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (1.0, 1.0)
    """Smallest and largest factor."""
    moved: Share = 1.0
    """Chance that an image is shifted and zoomed. One that is has been resampled, and is smoother than it was: below 1,
    a model has seen images as they are, too."""
    crop: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] | None = None
    """Cut out a piece of this share of the area, at least and at most, and scale it to the training size."""
    flip: Share = 0.0
    """Chance of a mirror image."""
    rand_augment: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0, lt=30)]] | None = None
    """Number and strength of RandAugment's changes, drawn for each image."""
    mixup: float | None = Field(default=None, gt=0)
    """Parameter of the Beta distribution that two images' shares are drawn from."""
    cutmix: float | None = Field(default=None, gt=0)
    """Likewise, of their areas. Of both, one is drawn for each batch."""
    erase: Share = 0.0
    """Chance that a piece is blanked."""

    @model_validator(mode="after")
    def _rising(self) -> Augmentation:
        for name in ("zoom", "crop"):
            span = getattr(self, name)
            if span is not None and span[0] > span[1]:
                raise ValueError(f"{name} must be the smallest and the largest value, got {list(span)}")
        return self


class ImageTrainingSettings(OptimizationSettings):
    """How a classifier is trained."""

    steps: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    augmentation: Augmentation = Augmentation()
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _warm(self) -> ImageTrainingSettings:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be less than the {self.steps} steps there are")
        return self

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.steps

    @property
    def rows_per_step(self) -> int:
        """Images of one step."""
        return self.batch_size


class ImageEvaluation(Strict):
    """What is measured: the share of test images that are classified right."""

    sizes: tuple[Annotated[int, Field(gt=0)], ...] = Field(min_length=1)
    """Rows and columns that test images are scaled to, in pixels."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    batch_size: int = Field(default=64, gt=0)

    @field_validator("sizes")
    @classmethod
    def _rising(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if list(sizes) != sorted(set(sizes)):
            raise ValueError(f"sizes must rise, got {list(sizes)}")
        return sizes


class VisionScheme(Strict):
    """One way to put positions into the model, as :class:`PriorVisionConfig` takes it."""

    prior: dict[str, Any] | list[dict[str, Any] | str] | str | None = None
    share_prior: bool = False
    logit_scale: dict[str, Any] | str | None = None
    position_table: bool = False
    position_units: Literal["patch", "image"] = "patch"
    training: dict[str, Any] = Field(default_factory=dict)
    """Settings of the training that differ for this scheme, key by key."""

    def positions(self) -> dict[str, Any]:
        """What goes into the config."""
        return self.model_dump(exclude={"training"})


class ImageRecipe(Strict):
    """A comparison of classifiers: every scheme is trained on the same images, and tested on the same, seed by seed."""

    plugins: Plugins = ()
    name: str = Field(min_length=1)
    description: str = ""
    images: PictureSettings
    model: VisionSizes
    training: ImageTrainingSettings
    evaluation: ImageEvaluation
    running: ProcessSettings = ProcessSettings()
    seeds: Seeds = (0,)
    threads_per_run: int = Field(default=1, gt=0)
    processes: int | None = Field(default=None, gt=0)
    """Runs at a time at most, however many cores there are."""
    schemes: Annotated[dict[str, VisionScheme], OwnFolders] = Field(min_length=1)

    @model_validator(mode="after")
    def _possible(self) -> ImageRecipe:
        for name in self.schemes:
            self.training_of(name)
            with errors_at(f"schemes.{name}"):
                self.config_of(name, channels=3, classes=2)
        for size in self.evaluation.sizes:
            if size % self.model.patch_size:
                raise ValueError(
                    f"evaluation.sizes must be whole patches of {self.model.patch_size} pixels, got "
                    f"{list(self.evaluation.sizes)}"
                )
        return self

    def training_of(self, scheme: str) -> ImageTrainingSettings:
        """The training settings of one scheme."""
        return varied(self.training, self.schemes[scheme].training, f"schemes.{scheme}.training")

    def config_of(self, scheme: str, *, channels: int, classes: int) -> PriorVisionConfig:
        """The model of one scheme."""
        sizes = self.model.model_dump() | {"num_channels": channels, "num_labels": classes}
        return PriorVisionConfig(**sizes, **self.schemes[scheme].positions())
