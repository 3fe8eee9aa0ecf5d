"""What is measured of a trained model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from attention_priors.evaluation.plan import EvaluationPlan


class PasskeySettings(BaseModel):
    """Passkey retrieval: share of texts whose five digits all come out right. Lengths are in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lengths: tuple[Annotated[int, Field(gt=0)], ...] = Field(min_length=1)
    depths: int = Field(default=20, ge=2)
    """Depths, evenly spaced from the start of the text to its end."""
    trials: int = Field(default=1, gt=0)
    """Texts per length and depth."""
    filler: Literal["corpus", "sentence"] = "corpus"
    stop_after_zeros: int | None = Field(default=2, gt=0)
    """A scheme that has got nothing right at so many lengths running need not go on; null to go on."""

    @field_validator("lengths")
    @classmethod
    def _rising(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if list(lengths) != sorted(set(lengths)):
            raise ValueError(f"lengths must rise, got {list(lengths)}")
        return lengths


class PerplexitySettings(BaseModel):
    """Negative log-likelihood against position, over held-out documents of at least ``length`` tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    length: int = Field(gt=1)
    documents: int = Field(default=8, gt=0)
    """At most so many documents, the first ``length`` tokens of each."""


class EvaluationSettings(BaseModel):
    """Everything that is measured, in chunks over a KV cache so that memory stays bounded."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    passkey: PasskeySettings | None = None
    perplexity: PerplexitySettings | None = None
    plans: dict[str, EvaluationPlan] = Field(default_factory=dict)
    """What ``attention-priors evaluate`` is to measure beside these, by any name."""
    chunk: int = Field(default=512, gt=0)
    """Tokens per forward pass."""
