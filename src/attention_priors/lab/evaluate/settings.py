"""What is measured of a trained model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from attention_priors.lab.evaluate.plan import EvaluationPlan


def _rising(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if list(lengths) != sorted(set(lengths)):
        raise ValueError(f"lengths must rise, got {list(lengths)}")
    return lengths


class PasskeySettings(BaseModel):
    """Passkey retrieval: share of texts whose five digits all come out right. Lengths are in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lengths: Annotated[tuple[Annotated[int, Field(gt=0)], ...], AfterValidator(_rising)] = Field(min_length=1)
    depths: int = Field(default=20, ge=2)
    """Depths, evenly spaced from the start of the text to its end."""
    trials: int = Field(default=1, gt=0)
    """Texts per length and depth."""
    filler: Literal["corpus", "sentence"] = "corpus"
    stop_after_zeros: int | None = Field(default=2, gt=0)
    """A scheme that has got nothing right at so many lengths running need not go on; null to go on."""


class PerplexitySettings(BaseModel):
    """Negative log-likelihood against position, over held-out documents of at least ``length`` tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    length: int = Field(gt=1)
    documents: int = Field(default=8, gt=0)
    """At most so many documents, the first ``length`` tokens of each."""


class CopyingSettings(BaseModel):
    """Loss in the copy-mixture task, by what a token copies and by the length of the row. Lengths are in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lengths: Annotated[tuple[Annotated[int, Field(gt=1)], ...], AfterValidator(_rising)] = Field(min_length=1)
    tokens: int = Field(default=65536, gt=0)
    """As many rows of each length as hold so many tokens; one at least."""


class SinkMassSettings(BaseModel):
    """The attention that the first token gets while the content logits grow from nothing. Lengths are in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    length: int = Field(gt=1)
    texts: int = Field(default=16, gt=0)
    """Held-out texts or rows; their beginnings are read."""
    factors: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0), min_length=1
    )
    """What content logits are multiplied by: 0 leaves the prior alone, 1 the model as it is."""


class EvaluationSettings(BaseModel):
    """Everything that is measured, in chunks over a KV cache so that memory stays bounded."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    passkey: PasskeySettings | None = None
    perplexity: PerplexitySettings | None = None
    copying: CopyingSettings | None = None
    sink_mass: SinkMassSettings | None = None
    plans: dict[str, EvaluationPlan] = Field(default_factory=dict)
    """What ``attention-priors evaluate`` is to measure beside these, by any name."""
    chunk: int = Field(default=512, gt=0)
    """Tokens per forward pass."""
    tolerance: float | None = Field(default=None, ge=0, lt=1)
    """Leave out keys that weigh no more than this together, which is faster; the model's own where none is given."""
