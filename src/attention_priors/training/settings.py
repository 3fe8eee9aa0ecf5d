"""How a model is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Decay = Annotated[float, Field(ge=0, lt=1)]


class TrainingSettings(BaseModel):
    """The optimiser, its schedule and the mixture of rows. Lengths are in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    context_length: int = Field(gt=1)
    steps: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    optimizer: Literal["adamw", "radam"] = "radam"
    learning_rate: float = Field(gt=0)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    weight_decay: float = Field(default=0.1, ge=0)
    gradient_clip: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    minimum_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    """The cosine schedule ends at this share of the learning rate."""
    prior_learning_rate_multiplier: float = Field(default=1.0, gt=0)
    """Multiplies the learning rate of every parameter of a prior."""
    logit_scale_learning_rate_multiplier: float = Field(default=1.0, gt=0)
    """Multiplies the learning rate of SSMax's ``s``."""
    passkey_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of rows that begin with a passkey text."""
    passkey_filler: Literal["corpus", "sentence"] = "corpus"
    passkey_minimum_length: int | None = Field(default=None, gt=0)
    """Shortest passkey text, its answer included; the shortest there is by default."""
    passkey_decoys: int = Field(default=0, ge=0)
    """Up to so many other numbers are strewn into the filler of each passkey text."""
    passkey_answer_weight: float = Field(default=1.0, gt=0)
    """Weight of an answer token's loss; every other token has weight 1."""
    checkpoint_steps: int = Field(default=200, gt=0)
    """An interrupted training goes on from the last checkpoint."""
