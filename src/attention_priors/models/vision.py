"""A vision transformer whose attention has a prior over the grid of patches.

Patches, a class token, and the layers of :mod:`attention_priors.models.encoder`; positions come from a prior, from a
table that is added (the baseline of ViT), from both or neither. Images may have any size that is whole patches, also
other ones than in training. Importing this module registers it with ``AutoConfig``, ``AutoModel`` and
``AutoModelForImageClassification``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from attention_priors.checks import check_booleans, check_choice, check_positive_integers
from attention_priors.models.encoder import EncoderAttention, EncoderLayer, EncoderPlaces, EncoderStack, StackConfig
from attention_priors.models.pretrained import PriorPreTrainedModel, refuse_unknown
from attention_priors.priors import at_spacing, grid_positions
from attention_priors.priors.base import check_on_grid

POOLINGS = ("class", "mean")
UNITS = ("patch", "image")


class PriorVisionConfig(StackConfig):
    """Configuration of a vision transformer, beside the fields of :class:`StackConfig`.

    Its ``prior`` is one for grids: ``{"name": "axial", "rows": "generalized_gaussian"}``, ``"spectral_2d"``,
    ``{"name": "radial", "prior": "laplace"}``, also with ``{"name": "key_sink_2d", "rows": 14, "columns": 14}``.

    Args:
        image_size: rows and columns of the training images, in pixels; a number for square ones. Only a position table
            is made for it.
        patch_size: side of a patch, in pixels.
        num_channels: of the images.
        position_table: whether a learned vector is added for each place, as in ViT; to images of other sizes the
            table is interpolated, to each of a batch on its own.
        position_units: what the prior's distances are counted in: ``patch``, from one patch to the next at any
            resolution, or ``image``, patches of the training grid, so that the same parts of an image are as far apart
            at every resolution and a patch weighs as much as its area (:func:`at_spacing`); without a logit scale.
        pooling: what is classified: ``class``, a token that stands outside of the grid, or ``mean`` of the patches.
    """

    model_type = "prior_vision"
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "PriorVisionConfig",
        "AutoModel": "PriorVisionModel",
        "AutoModelForImageClassification": "PriorVisionForImageClassification",
    }

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int = 16
    num_channels: int = 3
    position_table: bool = False
    position_units: str = "patch"
    pooling: str = "class"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_positive_integers(patch_size=self.patch_size, num_channels=self.num_channels)
        check_booleans(position_table=self.position_table)
        if isinstance(self.image_size, list | tuple) and len(self.image_size) != 2:
            raise ValueError(f"image_size must be one number, or rows and columns, got {self.image_size!r}")
        check_choice("pooling", self.pooling, POOLINGS)
        check_choice("position_units", self.position_units, UNITS)
        with torch.device("meta"):
            prior = self.make_prior()
        check_on_grid(prior)
        if self.position_units == "image":
            if self.logit_scale is not None:
                raise ValueError(
                    f"logit_scale={self.logit_scale!r} needs position_units='patch': it grows with the number of "
                    "patches, and would multiply their areas too"
                )
            with torch.device("meta"):
                at_spacing(self.make_prior(), self.num_attention_heads, 0.5, 0.5)  # some mean nothing between patches
        for side in self.sides:
            check_positive_integers(image_size=side)
            if side % self.patch_size:
                raise ValueError(
                    f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size} on both sides"
                )

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the training images, in pixels."""
        if isinstance(self.image_size, list | tuple):
            rows, columns = self.image_size
            return rows, columns
        return self.image_size, self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of their patches."""
        rows, columns = self.sides
        return rows // self.patch_size, columns // self.patch_size


class PatchEmbedding(nn.Module):
    """A vector for each patch, for the class token, and, if there is a table, for each place."""

    def __init__(self, config: PriorVisionConfig) -> None:
        super().__init__()
        size, width = config.patch_size, config.hidden_size
        self.patch_size = size
        self.projection = nn.Conv2d(config.num_channels, width, kernel_size=size, stride=size)
        self.class_token = nn.Parameter(torch.empty(width)) if config.pooling == "class" else None
        self.table = nn.Parameter(torch.empty(width, *config.grid)) if config.position_table else None
        self.std = config.initializer_range
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the class token and the table anew: N(0, std²)."""
        for parameter in (self.class_token, self.table):
            if parameter is not None:
                nn.init.normal_(parameter, std=self.std)

    def forward(self, pixel_values: Tensor, image_sizes: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        """``(B, C, rows, columns)`` to ``(B, L, hidden_size)``, and the rows and columns of patches.

        Args:
            pixel_values: and
            image_sizes: as in :meth:`PriorVisionModel.forward`; the table is interpolated to each image alone.
        """
        if pixel_values.dim() != 4 or pixel_values.shape[1] != self.projection.in_channels:
            raise ValueError(
                f"pixel_values must have shape (B, {self.projection.in_channels}, rows, columns), got "
                f"{tuple(pixel_values.shape)}"
            )
        for side in pixel_values.shape[2:]:
            if side % self.patch_size or not side:
                raise ValueError(
                    f"pixel_values must be whole patches of {self.patch_size} pixels on both sides, got "
                    f"{tuple(pixel_values.shape[2:])}"
                )
        grid = (pixel_values.shape[2] // self.patch_size, pixel_values.shape[3] // self.patch_size)
        if image_sizes is not None:
            self._check_sizes(image_sizes, grid, len(pixel_values))
        patches = self.projection(pixel_values.to(self.projection.weight.dtype))
        if self.table is not None:
            patches = patches + (self._table_of(grid) if image_sizes is None else self._tables_of(image_sizes, grid))
        hidden = patches.flatten(2).mT
        if self.class_token is not None:
            hidden = torch.cat([self.class_token.expand(len(hidden), 1, -1), hidden], 1)
        return hidden, grid

    def _check_sizes(self, image_sizes: Tensor, grid: tuple[int, int], batch: int) -> None:
        size = self.patch_size
        if tuple(image_sizes.shape) != (batch, 2):
            raise ValueError(f"image_sizes must have shape ({batch}, 2), got {tuple(image_sizes.shape)}")
        if torch.compiler.is_compiling():
            return  # what is compiled does not look at values
        room = torch.tensor(grid, device=image_sizes.device) * size
        if bool((image_sizes % size != 0).any() | (image_sizes < 1).any() | (image_sizes > room).any()):
            raise ValueError(
                f"image_sizes must be whole patches of {size} pixels, at most {tuple(room.tolist())}, got "
                f"{image_sizes.tolist()}"
            )

    def _tables_of(self, image_sizes: Tensor, grid: tuple[int, int]) -> Tensor:
        """``(B, hidden_size, rows, columns)``: to each image the table of its own grid, and 0 to its padding."""
        own_grids, of_image = (image_sizes // self.patch_size).long().unique(dim=0, return_inverse=True)
        tables = [
            nn.functional.pad(self._table_of((rows, columns)), (0, grid[1] - columns, 0, grid[0] - rows))
            for rows, columns in own_grids.tolist()
        ]
        return torch.stack(tables)[of_image]

    def _table_of(self, grid: tuple[int, int]) -> Tensor:
        assert self.table is not None
        if tuple(self.table.shape[1:]) == grid:
            return self.table
        # As ViT's authors fine-tune at another resolution (Dosovitskiy et al. 2021, section 3.2).
        wanted = interpolate(self.table[None].float(), size=grid, mode="bicubic", align_corners=False)[0]
        return wanted.to(self.table.dtype)


class PriorVisionPreTrainedModel(PriorPreTrainedModel):
    """Settings of transformers that all classes of the vision transformer share."""

    config: PriorVisionConfig
    config_class = PriorVisionConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012
    _no_split_modules = ["EncoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["shared_prior"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": EncoderLayer, "attentions": EncoderAttention}  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PatchEmbedding):
            module.reset_parameters()


class PriorVisionModel(PriorVisionPreTrainedModel):
    """The vision transformer without its output layer."""

    def __init__(self, config: PriorVisionConfig) -> None:
        super().__init__(config)
        self.embeddings = PatchEmbedding(config)
        self.stack = EncoderStack(config)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self, pixel_values: Tensor, image_sizes: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Hidden states of the class token, if there is one, and all patches, row by row; and what they pool to.

        Args:
            pixel_values: ``(B, C, rows, columns)``, whole patches on both sides.
            image_sizes: rows and columns of each image in pixels, ``(B, 2)``, whole patches too: what lies to the right
                and below is padding. None if images fill ``pixel_values``.
            kwargs: ``output_attentions`` and ``output_hidden_states``.
        """
        refuse_unknown(kwargs, "the vision transformer")
        hidden, grid = self.embeddings(pixel_values, image_sizes)
        outside = hidden.shape[1] - grid[0] * grid[1]
        positions = grid_positions(*grid, outside=outside, device=hidden.device)
        padding = None if image_sizes is None else self._padding(image_sizes, grid, outside)
        wants_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        places = EncoderPlaces(positions, padding, spacing=self._spacing(grid, padding is not None))
        hidden = self.stack(hidden, places, wants_weights)
        if outside:
            pooled = hidden[:, 0]
        elif padding is None:
            pooled = hidden.mean(1)
        else:
            seen = (~padding).to(hidden.dtype).unsqueeze(-1)
            pooled = (hidden * seen).sum(1) / seen.sum(1)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)

    def _spacing(self, grid: tuple[int, int], are_padded: bool) -> tuple[float, float] | None:
        """From one row and column to the next, in patches of the training grid; None where they are counted as such."""
        if self.config.position_units == "patch":
            return None
        if are_padded:
            raise ValueError(
                "image_sizes need position_units='patch': in units of the image, images of several sizes have "
                "distances of their own"
            )
        trained = self.config.grid
        return None if grid == trained else (trained[0] / grid[0], trained[1] / grid[1])

    def _padding(self, image_sizes: Tensor, grid: tuple[int, int], outside: int) -> Tensor:
        """``(B, L)``, True where a patch is none of its image."""
        rows, columns = (torch.arange(side, device=image_sizes.device) for side in grid)
        sizes = image_sizes // self.config.patch_size
        inside = (rows < sizes[:, :1]).unsqueeze(2) & (columns < sizes[:, 1:]).unsqueeze(1)
        return nn.functional.pad(~inside.flatten(1), (outside, 0), value=False)


class PriorVisionForImageClassification(PriorVisionPreTrainedModel):
    """The vision transformer as a classifier."""

    def __init__(self, config: PriorVisionConfig) -> None:
        super().__init__(config)
        self.model = PriorVisionModel(config)
        assert config.num_labels is not None
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        image_sizes: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """Logits of the classes.

        Args:
            pixel_values: and
            image_sizes: as in :meth:`PriorVisionModel.forward`.
            labels: the class of each image, ``(B,)``; or the share of each class, ``(B, num_labels)``, as Mixup and
                CutMix make it.
            kwargs: ``output_attentions``, ``output_hidden_states``; and ``num_items_in_batch``, how many entries all
                labels of a step have: the loss is then this batch's part of the mean.

        Raises:
            ValueError: an argument is unknown or does not fit the others; it says which and why.
        """
        items = kwargs.pop("num_items_in_batch", None)
        found = self.model(pixel_values, image_sizes, **kwargs)
        logits = self.classifier(found.pooler_output)
        loss = None
        if labels is not None:
            if self.config.problem_type not in (None, "single_label_classification"):
                raise ValueError(
                    f"problem_type must be 'single_label_classification' or None, got {self.config.problem_type!r}: "
                    "the loss is that of one class for each image"
                )
            if tuple(labels.shape) not in (tuple(logits.shape[:1]), tuple(logits.shape)):
                raise ValueError(
                    f"labels must have shape {tuple(logits.shape[:1])} or {tuple(logits.shape)}, got "
                    f"{tuple(labels.shape)}"
                )
            loss = _cross_entropy(logits.float(), _checked(labels, logits), items)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=found.hidden_states, attentions=found.attentions
        )


def _checked(labels: Tensor, logits: Tensor) -> Tensor:
    """Labels as the loss takes them."""
    classes, shape = logits.shape[-1], tuple(labels.shape)
    if labels.dim() == 2:
        if not labels.is_floating_point():
            raise ValueError(f"labels of shape {shape} must be shares of classes, floats; got {labels.dtype}")
        return labels
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels of shape {shape} must be classes, integers; got {labels.dtype}")
    # Values of an accelerator are not waited for, and what is compiled does not look at any.
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = [label for label in labels.tolist() if not 0 <= label < classes and label != -100]
        if wrong:
            raise ValueError(f"labels must be classes from 0 to {classes - 1}, or -100 for none; got {wrong[0]}")
    return labels.long()


def _cross_entropy(logits: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
    """The mean over the images; with ``items``, over those of all batches of a step."""
    if items is None:
        return cross_entropy(logits, labels)
    # What is counted are entries of the labels: an image has one, or one for each class.
    images = items if labels.dim() == 1 else items / labels.shape[1]
    return cross_entropy(logits, labels, reduction="sum") / images


AutoConfig.register(PriorVisionConfig.model_type, PriorVisionConfig)
AutoModel.register(PriorVisionConfig, PriorVisionModel)
AutoModelForImageClassification.register(PriorVisionConfig, PriorVisionForImageClassification)
