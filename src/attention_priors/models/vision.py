"""Vision transformer whose attention has a prior over the grid of patches.

The model consists of patches, a class token, and the layers of :mod:`attention_priors.models.encoder`. Positions enter
by a prior, by an additive table (the baseline of ViT), by both or neither. Images may have any size in whole patches,
also sizes not seen in training. Importing this module registers the model with ``AutoConfig``, ``AutoModel`` and
``AutoModelForImageClassification``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from attention_priors.checks import check_booleans, check_choice, check_positive_integers
from attention_priors.models.encoder import EncoderStack, StackConfig, StackPreTrainedModel
from attention_priors.models.masks import keys_of_call
from attention_priors.models.pretrained import refuse_unknown
from attention_priors.priors import at_spacing, grid_positions
from attention_priors.priors.base import check_on_grid

POOLINGS = ("class", "mean")
UNITS = ("patch", "image")


class PriorVisionConfig(StackConfig):
    """Configuration of a vision transformer, in addition to :class:`StackConfig`.

    ``prior`` must be over a grid: ``{"name": "axial", "rows": "generalized_gaussian"}``, ``"spectral_2d"`` or
    ``{"name": "radial", "prior": "laplace"}``, each also in a sum with
    ``{"name": "key_sink_2d", "rows": 14, "columns": 14}``.

    Args:
        image_size: rows and columns of the training images in pixels, or one number for square images. The position
            table and ``position_units="image"`` depend on it.
        patch_size: side of a patch in pixels.
        num_channels: number of image channels.
        position_table: whether to add a learned vector per place, as in ViT. For images of other sizes the table is
            interpolated, separately for each image of a batch.
        position_units: unit of the prior's distances. ``patch`` counts patches at any resolution. ``image`` counts
            patches of the training grid, so that distances within an image do not depend on the resolution, and weights
            patches by area (:func:`at_spacing`). ``image`` does not work with a logit scale.
        pooling: input of the classifier. ``class`` is a class token outside the grid, ``mean`` the mean of the patches.
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
            raise ValueError(f"image_size must be one number, or rows and columns; got {self.image_size!r}")
        check_choice("pooling", self.pooling, POOLINGS)
        check_choice("position_units", self.position_units, UNITS)
        with torch.device("meta"):
            prior = self.make_prior()
        check_on_grid(prior)
        if self.position_units == "image":
            if self.logit_scale is not None:
                raise ValueError(
                    f"logit_scale={self.logit_scale!r} needs position_units='patch': with position_units='image' a "
                    "logit scale would multiply the areas of patches too"
                )
            with torch.device("meta"):
                at_spacing(self.make_prior(), self.num_attention_heads, 0.5, 0.5)  # raises for whole-patch priors
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
        """Rows and columns of the training images, in patches."""
        rows, columns = self.sides
        return rows // self.patch_size, columns // self.patch_size


class PatchEmbedding(nn.Module):
    """Embedding of patches, with the class token and the position table if configured."""

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
        """Reset the class token and the table to N(0, std²)."""
        for parameter in (self.class_token, self.table):
            if parameter is not None:
                nn.init.normal_(parameter, std=self.std)

    def forward(self, pixel_values: Tensor, image_sizes: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        """Return the embeddings ``(B, L, hidden_size)`` of images, and the number of rows and columns of patches.

        Args:
            pixel_values: images, ``(B, C, rows, columns)``.
            image_sizes: as in :meth:`PriorVisionModel.forward`. The table is interpolated separately for each image.
        """
        if pixel_values.dim() != 4 or pixel_values.shape[1] != self.projection.in_channels:
            raise ValueError(
                f"pixel_values must have shape (B, {self.projection.in_channels}, rows, columns), got "
                f"{tuple(pixel_values.shape)}"
            )
        for side in pixel_values.shape[2:]:
            if side % self.patch_size or not side:
                raise ValueError(
                    f"both sides of pixel_values must be positive multiples of patch_size={self.patch_size}, got "
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
            return  # compiled code cannot read values
        room = torch.tensor(grid, device=image_sizes.device) * size
        if bool((image_sizes % size != 0).any() | (image_sizes < 1).any() | (image_sizes > room).any()):
            raise ValueError(
                f"image_sizes must be positive multiples of patch_size={size}, at most {tuple(room.tolist())}, got "
                f"{image_sizes.tolist()}"
            )

    def _tables_of(self, image_sizes: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return each image's interpolated table, padded with zeros, ``(B, hidden_size, rows, columns)``."""
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
        # ViT is fine-tuned at another resolution in this way (Dosovitskiy et al. 2021, section 3.2).
        wanted = interpolate(self.table[None].float(), size=grid, mode="bicubic", align_corners=False)[0]
        return wanted.to(self.table.dtype)


class PriorVisionPreTrainedModel(StackPreTrainedModel):
    """Base class of the vision transformer's models, with settings for transformers."""

    config: PriorVisionConfig
    config_class = PriorVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PatchEmbedding):
            module.reset_parameters()


class PriorVisionModel(PriorVisionPreTrainedModel):
    """Vision transformer without its output layer."""

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
        """Return the hidden states of all tokens, and the pooled state.

        The class token, if any, comes first, then the patches in row-major order.

        Args:
            pixel_values: images ``(B, C, rows, columns)``, whole patches on both sides.
            image_sizes: rows and columns of each image in pixels, ``(B, 2)``, whole patches. Pixels to the right of and
                below an image are padding. None if all images fill ``pixel_values``.
            kwargs: ``output_attentions`` and ``output_hidden_states``.
        """
        refuse_unknown(kwargs, "the vision transformer")
        hidden, grid = self.embeddings(pixel_values, image_sizes)
        outside = hidden.shape[1] - grid[0] * grid[1]
        positions = grid_positions(*grid, outside=outside, device=hidden.device)[None]
        padding = None if image_sizes is None else self._padding(image_sizes, grid, outside)
        wants_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        keys = keys_of_call(len(hidden), hidden.shape[1], hidden.device)
        keys = replace(keys, causal=False, padding=padding, query_positions=positions, key_positions=positions)
        spacing = self._spacing(grid, padding is not None)
        hidden = self.stack(hidden, keys, spacing=spacing, output_attentions=wants_weights)
        if outside:
            pooled = hidden[:, 0]
        elif padding is None:
            pooled = hidden.mean(1)
        else:
            seen = (~padding).to(hidden.dtype).unsqueeze(-1)
            pooled = (hidden * seen).sum(1) / seen.sum(1)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)

    def _spacing(self, grid: tuple[int, int], are_padded: bool) -> tuple[float, float] | None:
        """Return the distances between adjacent rows and columns in training patches; None for the training spacing."""
        if self.config.position_units == "patch":
            return None
        if are_padded:
            raise ValueError(
                "image_sizes needs position_units='patch': with position_units='image', each image of a batch would "
                "need distances of its own"
            )
        trained = self.config.grid
        return None if grid == trained else (trained[0] / grid[0], trained[1] / grid[1])

    def _padding(self, image_sizes: Tensor, grid: tuple[int, int], outside: int) -> Tensor:
        """Return the padding mask ``(B, L)``, True for patches outside their image."""
        rows, columns = (torch.arange(side, device=image_sizes.device) for side in grid)
        sizes = image_sizes // self.config.patch_size
        inside = (rows < sizes[:, :1]).unsqueeze(2) & (columns < sizes[:, 1:]).unsqueeze(1)
        return nn.functional.pad(~inside.flatten(1), (outside, 0), value=False)


class PriorVisionForImageClassification(PriorVisionPreTrainedModel):
    """Vision transformer with a classification head."""

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
        """Return the logits of the classes.

        Args:
            pixel_values: as in :meth:`PriorVisionModel.forward`.
            image_sizes: as in :meth:`PriorVisionModel.forward`.
            labels: class of each image, ``(B,)``. Or probabilities ``(B, num_labels)``, as from Mixup and CutMix.
            kwargs: ``output_attentions``, ``output_hidden_states`` and ``num_items_in_batch``. ``num_items_in_batch``
                is the number of label entries of a whole step; the loss is then this batch's part of the mean.

        Raises:
            ValueError: an argument is unknown or conflicts with another. The message says which and why.
        """
        items = kwargs.pop("num_items_in_batch", None)
        found = self.model(pixel_values, image_sizes, **kwargs)
        logits = self.classifier(found.pooler_output)
        loss = None
        if labels is not None:
            if self.config.problem_type not in (None, "single_label_classification"):
                raise ValueError(
                    f"problem_type must be 'single_label_classification' or None, got {self.config.problem_type!r}"
                )
            if tuple(labels.shape) not in (tuple(logits.shape[:1]), tuple(logits.shape)):
                raise ValueError(
                    f"labels must have shape {tuple(logits.shape[:1])} or {tuple(logits.shape)}, got "
                    f"{tuple(labels.shape)}"
                )
            if items is not None and labels.dim() == 2:  # it counts one entry per class and image
                items = items / labels.shape[1]
            loss = fixed_cross_entropy(logits.float(), _checked(labels, logits), items)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=found.hidden_states, attentions=found.attentions
        )


def _checked(labels: Tensor, logits: Tensor) -> Tensor:
    """Check labels and return them as the loss takes them."""
    classes, shape = logits.shape[-1], tuple(labels.shape)
    if labels.dim() == 2:
        if not labels.is_floating_point():
            raise ValueError(f"labels of shape {shape} must be floating-point probabilities, got {labels.dtype}")
        return labels
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels of shape {shape} must be integer classes, got {labels.dtype}")
    # Reading values would synchronise with an accelerator, and compiled code cannot read them.
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = [label for label in labels.tolist() if not 0 <= label < classes and label != -100]
        if wrong:
            raise ValueError(f"labels must be classes from 0 to {classes - 1}, or -100 to ignore; got {wrong[0]}")
    return labels.long()


AutoConfig.register(PriorVisionConfig.model_type, PriorVisionConfig)
AutoModel.register(PriorVisionConfig, PriorVisionModel)
AutoModelForImageClassification.register(PriorVisionConfig, PriorVisionForImageClassification)
