"""How a model is trained: what is computed, and on what machinery."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from attention_priors.lab.strict_yaml import Strict

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizationSettings(Strict, ABC):
    """The optimiser and its schedule, whatever is trained."""

    optimizer: Literal["adamw", "radam"] = "radam"
    learning_rate: float = Field(gt=0)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    gradient_clip: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    minimum_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    """The cosine schedule ends at this share of the learning rate."""
    prior_learning_rate_multiplier: float = Field(default=1.0, gt=0)
    """Multiplies the learning rate of every parameter of a prior."""
    logit_scale_learning_rate_multiplier: float = Field(default=1.0, gt=0)
    """Multiplies the learning rate of SSMax's ``s``."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of matrix products; weights, priors and the optimiser's moments stay in float32."""
    checkpoint_steps: int = Field(default=200, gt=0)
    """An interrupted training goes on from the last checkpoint."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Steps of the whole training."""

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Rows, or other examples, that one step of the optimiser reads."""

    @property
    def total_rows(self) -> int:
        """Rows that the whole training reads."""
        return self.total_steps * self.rows_per_step

    @property
    def step_in_words(self) -> str:
        """How large a step is."""
        return f"{self.rows_per_step} rows a step"


class TrainingSettings(OptimizationSettings):
    """The optimiser, its schedule and the size of a step: what the trained weights depend on. Lengths are in tokens."""

    context_length: int = Field(gt=1)
    steps: int | None = Field(default=None, gt=0)
    tokens: int | None = Field(default=None, gt=0)
    """In place of ``steps``: as many whole steps as fit into so many tokens."""
    batch_size: int | None = Field(default=None, gt=0)
    """Rows of a step, over all processes and accumulated passes."""
    tokens_per_step: int | None = Field(default=None, gt=0)
    """In place of ``batch_size``; a multiple of ``context_length``."""

    @model_validator(mode="after")
    def _sizes(self) -> TrainingSettings:
        for one, other in (("steps", "tokens"), ("batch_size", "tokens_per_step")):
            given = [name for name in (one, other) if getattr(self, name) is not None]
            if len(given) != 1:
                raise ValueError(f"give either {one} or {other}, got {' and '.join(given) or 'neither'}")
        if self.tokens_per_step is not None and self.tokens_per_step % self.context_length:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} must be a multiple of context_length={self.context_length}"
            )
        if self.total_steps < 1:
            raise ValueError(f"tokens={self.tokens} must be at least one step, {self.step_tokens} tokens")
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be less than the {self.total_steps} steps there are"
            )
        return self

    @property
    def rows_per_step(self) -> int:
        """Rows that one step of the optimiser reads."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.tokens_per_step is not None
        return self.tokens_per_step // self.context_length

    @property
    def step_tokens(self) -> int:
        """Tokens that one step of the optimiser reads."""
        return self.rows_per_step * self.context_length

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return self.tokens // self.step_tokens

    @property
    def final_learning_rate(self) -> float:
        """What the schedule ends with."""
        return self.learning_rate * self.minimum_learning_rate_ratio

    @property
    def step_in_words(self) -> str:
        """How large a step is, also in tokens."""
        return f"{self.rows_per_step} rows a step ({self.step_tokens} tokens)"


class ProcessSettings(Strict):
    """How a process trains. Up to the order of floating-point sums, it changes nothing of the result."""

    workers: int = Field(default=0, ge=0)
    """Processes that read rows ahead, for each training process; 0 reads in the training process itself."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, far less memory."""


class RunningSettings(ProcessSettings):
    """On what machinery a training runs, as one process or many."""

    rows_at_a_time: int | None = Field(default=None, gt=0)
    """Rows of one forward pass on one device; by default a step's rows, shared out among the processes. What is missing
    to a step's rows is accumulated."""
    checkpoints_kept: int = Field(default=2, gt=0)
    log_every: int | None = Field(default=None, gt=0)
    """Steps that one logged loss is the mean over; a fiftieth of the training by default."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    fsdp: dict[str, Any] | None = None
    """Shard parameters, gradients and moments: ``TrainingArguments.fsdp_config``; ``{}`` for its defaults."""
    ddp: dict[Literal["find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph"], Any] = Field(
        default_factory=dict
    )
    """``TrainingArguments.ddp_*``."""
    ddp_timeout: int = Field(default=1800, gt=0)
    """Seconds that a process waits for the others."""

    def accumulation(self, settings: OptimizationSettings, processes: int) -> tuple[int, int]:
        """Rows of one forward pass on one device, and how many passes make a step.

        Raises:
            ValueError: if a step's rows cannot be shared out evenly.
        """
        rows = settings.rows_per_step
        at_a_time = self.rows_at_a_time
        if at_a_time is None:
            at_a_time, rest = divmod(rows, processes)
            if rest:
                raise ValueError(f"{rows} rows a step cannot be shared out evenly among {processes} processes")
            return at_a_time, 1
        passes, rest = divmod(rows, at_a_time * processes)
        if rest:
            raise ValueError(
                f"{settings.step_in_words} are no multiple of rows_at_a_time={at_a_time} "
                f"on {processes} process{'es' if processes > 1 else ''}"
            )
        return at_a_time, passes
