"""Evaluation settings of a recipe: presets and custom plans."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from attention_priors.lab.strict_yaml import Strict
from attention_priors.lab.tasks.plan import COPYING, EvaluationPlan, Lengths, check_minimum_documents


class PasskeySettings(Strict):
    """Passkey retrieval: share of texts whose five digits are all predicted correctly."""

    lengths: Lengths
    """Lengths of the texts in tokens, in rising order."""
    depths: int = Field(default=20, ge=2)
    """Number of depths, evenly spaced from the start of the text to its end."""
    trials: int = Field(default=1, gt=0)
    """Number of texts per length and depth."""
    filler: Literal["corpus", "sentence"] = "corpus"
    """Text around the pass key: windows of the corpus' held-out part, or one paragraph that repeats."""
    stop_after_zeros: int | None = Field(default=2, gt=0)
    """Number of consecutive lengths without a right answer after which longer texts are skipped; None never skips."""

    def plan(self) -> EvaluationPlan:
        """Return the plan of this preset."""
        tasks = (f"passkey_{self.filler}",)
        return EvaluationPlan(tasks=tasks, seeding="mixed", **self.model_dump(exclude={"filler"}))


class PerplexitySettings(Strict):
    """Negative log-likelihood by position, over held-out documents of at least ``length`` tokens."""

    length: int = Field(gt=1)
    """Number of tokens that are read of each document."""
    documents: int = Field(default=8, gt=0)
    """Number of documents; the first ``length`` tokens of each are read."""
    minimum_documents: int | None = Field(default=None, gt=0)
    """Smallest accepted number of documents if the corpus has fewer than ``documents``; None for ``documents``.
    Fewer documents are an error before any training."""

    @model_validator(mode="after")
    def _minimum_below_documents(self) -> PerplexitySettings:
        check_minimum_documents(self.minimum_documents, self.documents)
        return self

    def plan(self) -> EvaluationPlan:
        """Return the plan of this preset."""
        return EvaluationPlan(tasks=("perplexity",), lengths=(self.length,), **self.model_dump(exclude={"length"}))


class CopyingSettings(Strict):
    """Loss in the copy-mixture task, by kind of token and length of row."""

    lengths: Lengths
    """Lengths of the rows in tokens, in rising order."""
    tokens: int = Field(default=65536, gt=0)
    """Total number of tokens of the rows of each length; at least one row is read."""

    def plan(self) -> EvaluationPlan:
        """Return the plan of this preset."""
        return EvaluationPlan(tasks=(COPYING,), **self.model_dump())


class SinkMassSettings(Strict):
    """Attention on the first token as a function of the scale of the content logits."""

    length: int = Field(gt=1)
    """Number of tokens that are read of each text or row."""
    texts: int = Field(default=16, gt=0)
    """Number of held-out texts or rows; the first ``length`` tokens of each are read."""
    factors: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0), min_length=1
    )
    """Factors of the content logits: 0 leaves only the prior, 1 is the unchanged model."""


class EvaluationSettings(Strict):
    """Measurements of each model of a comparison. Texts are read in chunks over a KV cache, which bounds the memory."""

    passkey: PasskeySettings | None = None
    perplexity: PerplexitySettings | None = None
    copying: CopyingSettings | None = None
    sink_mass: SinkMassSettings | None = None
    plans: dict[str, EvaluationPlan] = Field(default_factory=dict)
    """Custom plans by name."""
    chunk: int = Field(default=512, gt=0)
    """Tokens per forward pass."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights in measurements. Priors stay in float32."""
    tolerance: float | None = Field(default=None, ge=0, lt=1)
    """Share of the attention weight that pruning may remove, for speed; None for the model's own setting."""

    def all_plans(self) -> list[tuple[str | None, EvaluationPlan]]:
        """Return all plans with their names; presets have the name None."""
        presets = (self.passkey, self.perplexity, self.copying)
        return [*((None, preset.plan()) for preset in presets if preset is not None), *self.plans.items()]
