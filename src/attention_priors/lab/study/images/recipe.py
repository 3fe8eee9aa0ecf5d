"""Recipe of a comparison of image classifiers, validated before any work."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from attention_priors.lab.strict_yaml import Plugins, Strict, check_one_of, errors_at
from attention_priors.lab.study.runs import OwnFolders, Seeds
from attention_priors.lab.study.sweep import varied
from attention_priors.lab.train.recipe import OptimizationSettings, ProcessSettings
from attention_priors.models.vision import PriorVisionConfig

Share = Annotated[float, Field(ge=0, le=1)]


class HubPictures(Strict):
    """Labelled images from Hugging Face's ``datasets``."""

    path: str = Field(min_length=1)
    """Name on the Hub (``uoft-cs/cifar10``, ``ILSVRC/imagenet-1k``), or ``imagefolder`` for local files."""
    name: str | None = None
    """Name of the dataset's configuration."""
    data_dir: str | None = None
    """Folder with the files of the dataset."""
    revision: str | None = None
    """Commit of the repository; it pins the data."""
    train: str = "train"
    """Training split; ``train[:1000]`` selects a part."""
    test: str = "test"
    """Test split."""
    image: str = "image"
    """Field of the image."""
    label: str = "label"
    """Field of the class."""
    channels: Literal[1, 3] | None = None
    """Grey (1) or colour (3). None takes the mode of the first training image; a colour image among grey ones is then
    an error."""


class PictureSettings(Strict):
    """Source of the images; exactly one field must be set."""

    source: Literal["digits"] | None = None
    """``digits`` selects scikit-learn's 1797 handwritten digits of 8 x 8 pixels, 500 of them held out; needs no
    network."""
    dataset: HubPictures | None = None

    @model_validator(mode="after")
    def _one(self) -> PictureSettings:
        check_one_of(self, "source", "dataset")
        return self


class VisionSizes(Strict):
    """Sizes of the classifier, without positions."""

    image_size: int = Field(gt=0)
    """Rows and columns of the training images, in pixels."""
    patch_size: int = Field(gt=0)
    """Side of a patch, in pixels."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(gt=0)
    """Width of the feed-forward layers."""
    num_hidden_layers: int = Field(gt=0)
    """Number of layers."""
    num_attention_heads: int = Field(gt=0)
    """Number of heads."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    drop_path: float = Field(default=0.0, ge=0, lt=1)
    """Probability of skipping the last layer in training (stochastic depth); it rises linearly from 0 in the first
    layer."""
    pooling: Literal["class", "mean"] = "class"
    """Input of the classifier: a class token outside the grid, or the mean of the patches."""


class Augmentation(Strict):
    """Augmentation of training images by kornia. Nothing is changed by default."""

    shift: Share = 0.0
    """Largest shift as a share of the side, in both directions."""
    zoom: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (1.0, 1.0)
    """Smallest and largest zoom factor."""
    moved: Share = 1.0
    """Probability of shift and zoom. Both resample and smooth an image, so a value below 1 also shows images at full
    sharpness."""
    crop: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] | None = None
    """Smallest and largest share of the area in a random crop, which is scaled to the training size."""
    flip: Share = 0.0
    """Probability of a horizontal flip."""
    rand_augment: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0, lt=30)]] | None = None
    """Number and strength of RandAugment's operations per image."""
    mixup: float | None = Field(default=None, gt=0)
    """Parameter of the Beta distribution of mixup's weights."""
    cutmix: float | None = Field(default=None, gt=0)
    """Parameter of the Beta distribution of cutmix's areas. With both set, each batch uses one of the two at random."""
    erase: Share = 0.0
    """Probability of random erasing."""

    @model_validator(mode="after")
    def _rising(self) -> Augmentation:
        for name in ("zoom", "crop"):
            span = getattr(self, name)
            if span is not None and span[0] > span[1]:
                raise ValueError(f"{name} must be the smallest and the largest value, got {list(span)}")
        return self


class ImageTrainingSettings(OptimizationSettings):
    """Training settings of a classifier."""

    steps: int = Field(gt=0)
    """Number of optimiser steps."""
    batch_size: int = Field(gt=0)
    """Number of images per step."""
    augmentation: Augmentation = Augmentation()
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of each label that is spread evenly over all classes."""

    @model_validator(mode="after")
    def _warm(self) -> ImageTrainingSettings:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be less than the {self.steps} training steps")
        return self

    @property
    def total_steps(self) -> int:
        """Number of training steps."""
        return self.steps

    @property
    def rows_per_step(self) -> int:
        """Number of images per step."""
        return self.batch_size


class ImageEvaluation(Strict):
    """Evaluation settings; the metric is accuracy on the test images."""

    sizes: tuple[Annotated[int, Field(gt=0)], ...] = Field(min_length=1)
    """Rows and columns of the scaled test images, in pixels."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation that scales the test images."""
    batch_size: int = Field(default=64, gt=0)
    """Number of test images per forward pass."""

    @field_validator("sizes")
    @classmethod
    def _rising(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if list(sizes) != sorted(set(sizes)):
            raise ValueError(f"sizes must rise, got {list(sizes)}")
        return sizes


class VisionScheme(Strict):
    """Positional scheme of a classifier."""

    prior: dict[str, Any] | list[dict[str, Any] | str] | str | None = None
    """Log-prior over the grid of patches: a name, a mapping of ``name`` and arguments, or a list of these, which is
    their sum. None for no prior."""
    share_prior: bool = False
    """Whether all layers share one prior, as in T5. Otherwise each layer has its own."""
    logit_scale: dict[str, Any] | str | None = None
    """Logit scale, such as ``ssmax``: a name, or a mapping of ``name`` and arguments. Each layer learns its own. None
    for no logit scale."""
    position_table: bool = False
    """Whether to add a learned vector for each place, as in ViT. For other resolutions, the table is interpolated."""
    position_units: Literal["patch", "image"] = "patch"
    """Unit of the prior's distances: patches at any resolution, or patches of the training grid, so that distances
    within an image do not depend on the resolution."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Training settings that differ for this scheme."""

    def positions(self) -> dict[str, Any]:
        """Return the arguments of the config."""
        return self.model_dump(exclude={"training"})


class ImageRecipe(Strict):
    """Comparison of classifiers: for each seed, all schemes train and are tested on the same images."""

    plugins: Plugins = ()
    """Modules that register priors of your own; every process imports them before the other keys are read."""
    name: str = Field(min_length=1)
    """Title of the report."""
    description: str = ""
    """Description in the report."""
    images: PictureSettings
    model: VisionSizes
    training: ImageTrainingSettings
    evaluation: ImageEvaluation
    running: ProcessSettings = ProcessSettings()
    seeds: Seeds = (0,)
    """Seeds of initial weights, augmentation and the order of images."""
    threads_per_run: int = Field(default=1, gt=0)
    """Number of CPU threads of one run."""
    processes: int | None = Field(default=None, gt=0)
    """Largest number of runs at a time, regardless of the number of cores."""
    schemes: Annotated[dict[str, VisionScheme], OwnFolders] = Field(min_length=1)
    """Schemes by name. Each scheme is trained with every seed."""

    @model_validator(mode="after")
    def _possible(self) -> ImageRecipe:
        for name in self.schemes:
            self.training_of(name)
            with errors_at(f"schemes.{name}"):
                self.config_of(name, channels=3, classes=2)
        for size in self.evaluation.sizes:
            if size % self.model.patch_size:
                raise ValueError(
                    f"evaluation.sizes must be multiples of the patch size, {self.model.patch_size} pixels, got "
                    f"{list(self.evaluation.sizes)}"
                )
        return self

    def training_of(self, scheme: str) -> ImageTrainingSettings:
        """Return the training settings of one scheme."""
        return varied(self.training, self.schemes[scheme].training, f"schemes.{scheme}.training")

    def config_of(self, scheme: str, *, channels: int, classes: int) -> PriorVisionConfig:
        """Return the model config of one scheme."""
        sizes = self.model.model_dump() | {"num_channels": channels, "num_labels": classes}
        return PriorVisionConfig(**sizes, **self.schemes[scheme].positions())
