"""Recipes of ``attention-priors train``, checked before any work is done, and the model that one trains."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from attention_priors._io import checksum
from attention_priors.hf import attach, train_attached
from attention_priors.hf.adapter import arguments_of
from attention_priors.hf.attach import CONFIG_KEY
from attention_priors.hf.loading import check_positions, load_config, load_model
from attention_priors.lab.data.preparation import Preparation
from attention_priors.lab.data.shards import MANIFEST, PARTS, TokenShards, read_manifest, shards_of
from attention_priors.lab.data.sources import DataSettings, TokenizerSpec
from attention_priors.lab.strict_yaml import Plugins, Strict, check_one_of, errors_at, read_strictly
from attention_priors.models.decoder import PriorDecoderConfig, PriorDecoderForCausalLM

CONFIG = ("config.json",)
"""Files of a model that describe its architecture."""

MODEL = (*CONFIG, "adapter_config.json", "*.safetensors", "*.bin")
"""Files of a model that determine its outputs."""

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
    """Precision of matrix products; weights, priors and the optimiser's moments stay in float32."""
    checkpoint_steps: int = Field(default=200, gt=0)
    """An interrupted training goes on from the last checkpoint."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Steps of the whole training."""

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Rows, or other examples, of one step of the optimiser."""

    @property
    def total_rows(self) -> int:
        """Rows of the whole training."""
        return self.total_steps * self.rows_per_step

    @property
    def step_in_words(self) -> str:
        """Size of a step, as text."""
        return f"{self.rows_per_step} rows a step"


class TrainingSettings(OptimizationSettings):
    """The optimiser, its schedule and the size of a step, which decide the trained weights. Lengths are in tokens."""

    context_length: int = Field(gt=1)
    steps: int | None = Field(default=None, gt=0)
    tokens: int | None = Field(default=None, gt=0)
    """Alternative to ``steps``: as many whole steps as fit into this number of tokens."""
    batch_size: int | None = Field(default=None, gt=0)
    """Rows of a step, over all processes and accumulated passes."""
    tokens_per_step: int | None = Field(default=None, gt=0)
    """Alternative to ``batch_size``; a multiple of ``context_length``."""

    @model_validator(mode="after")
    def _sizes(self) -> TrainingSettings:
        check_one_of(self, "steps", "tokens")
        check_one_of(self, "batch_size", "tokens_per_step")
        if self.tokens_per_step is not None and self.tokens_per_step % self.context_length:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} must be a multiple of context_length={self.context_length}"
            )
        if self.total_steps < 1:
            raise ValueError(f"tokens={self.tokens} must be at least one step, {self.step_tokens} tokens")
        if self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be less than the {self.total_steps} steps")
        return self

    @property
    def rows_per_step(self) -> int:
        """Rows of one step of the optimiser."""
        return self.batch_size or (self.tokens_per_step or 0) // self.context_length

    @property
    def step_tokens(self) -> int:
        """Tokens of one step of the optimiser."""
        return self.rows_per_step * self.context_length

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.steps or (self.tokens or 0) // self.step_tokens

    @property
    def final_learning_rate(self) -> float:
        """Learning rate at the end of the schedule."""
        return self.learning_rate * self.minimum_learning_rate_ratio

    @property
    def step_in_words(self) -> str:
        """Size of a step, as text; also in tokens."""
        return f"{self.rows_per_step} rows a step ({self.step_tokens} tokens)"


class ProcessSettings(Strict):
    """Settings of a training process that change the result by the order of floating-point sums alone."""

    workers: int = Field(default=0, ge=0)
    """Processes that read rows ahead, for each training process; 0 reads in the training process itself."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, far less memory."""


class RunningSettings(ProcessSettings):
    """Machinery of a training, as one process or many."""

    rows_at_a_time: int | None = Field(default=None, gt=0)
    """Rows of one forward pass on one device; by default a step's rows, shared out among the processes. Several passes
    accumulate the rows of a step."""
    checkpoints_kept: int = Field(default=2, gt=0)
    log_every: int | None = Field(default=None, gt=0)
    """Steps of the mean of one logged loss; a fiftieth of the training by default."""
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
        """Return the rows of one forward pass on one device, and the number of passes in a step.

        Raises:
            ValueError: a step's rows cannot be shared out evenly.
        """
        rows = settings.rows_per_step
        if self.rows_at_a_time is None and rows % processes:
            raise ValueError(f"{rows} rows a step cannot be shared out evenly among {processes} processes")
        at_a_time = self.rows_at_a_time or rows // processes
        passes, rest = divmod(rows, at_a_time * processes)
        if rest:
            raise ValueError(
                f"{settings.step_in_words} are no multiple of rows_at_a_time={at_a_time} "
                f"on {processes} process{'es' if processes > 1 else ''}"
            )
        return at_a_time, passes


class ValidationSettings(Strict):
    """Measurements on held-out text while a model trains."""

    every: int = Field(default=500, gt=0)
    """Steps from one measurement to the next; the last step always has one."""
    tokens: int = Field(default=1_000_000, gt=0)
    """Number of held-out tokens, at most, from their beginning."""


class TrainRecipe(Strict):
    """One training of one model."""

    plugins: Plugins = ()
    name: str = Field(min_length=1)
    description: str = ""
    model: ModelSettings
    tokenizer: TokenizerSpec = None
    """Entries of a byte-level BPE trained on the text, or a tokenizer's path or Hugging Face name; none with
    ``data.shards``, which have theirs."""
    data: DataSettings
    training: TrainingSettings
    validation: ValidationSettings | None = None
    running: RunningSettings = RunningSettings()
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of new weights, of the order of rows and of dropout."""

    @model_validator(mode="after")
    def _possible(self) -> TrainRecipe:
        if (self.tokenizer is None) != (self.data.shards is not None):
            raise ValueError(
                f"tokenizer must be given, except with data.shards, which have theirs; got {self.tokenizer!r}"
            )
        length, most = self.training.context_length, self.data.max_tokens
        if most is not None and most < length:
            raise ValueError(
                f"data.max_tokens must be at least training.context_length, {length}, for a single row; it is {most}"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Describe what determines the result, but for the versions of libraries and the tokens that a run prepares.

        Folders are identified by their content: weights are read in full.

        Raises:
            ShardError: the preparation of ``data.shards`` has not finished.
        """
        kept = self.model_dump(mode="json", exclude={"plugins", "name", "description", "running"})
        del kept["training"]["checkpoint_steps"]
        fingerprints: dict[str, str | None] = {}
        if self.data.shards is not None:
            fingerprints["data.shards"] = tokens_fingerprint(Path(self.data.shards))
        for key, patterns in (("pretrained", MODEL), ("config", CONFIG)):
            name = getattr(self.model, key)
            if name is not None:
                fingerprints[f"model.{key}"] = files_fingerprint(name, patterns)
        return kept | {"fingerprints": fingerprints}

    def preparation(self) -> Preparation:
        """Return the preparation of this recipe's tokens, as ``attention-priors prepare`` makes them.

        Raises:
            ValueError, FileNotFoundError: there is nothing to prepare, or the text cannot be read.
        """
        data = self.data
        documents = data.documents()
        limit = data.max_tokens
        if data.dataset is not None:
            # Datasets may be far larger than the part of them that is read.
            limit = limit or self.training.total_rows * self.training.context_length
        assert self.tokenizer is not None
        return Preparation(documents, self.tokenizer, data.held_out_tokens, limit, data.shard_tokens)


def load_train_recipe(path: Path) -> TrainRecipe:
    """Read and check a recipe.

    Raises:
        RecipeError: the file is not YAML, or a key or value is impossible; the message names the key, its value and
            the allowed values.
        FileNotFoundError: there is no such file.
    """
    return read_strictly(path, TrainRecipe)


def files_fingerprint(name: str, patterns: tuple[str, ...]) -> str | None:
    """Return the SHA-256 (64 hex digits) of some files of a folder; None if there is no such folder.

    A model on the Hugging Face Hub has none: its commit changes with every word of its page.

    Args:
        name: of the folder.
        patterns: of the files' names.
    """
    folder = Path(name)
    if not folder.is_dir():
        return None
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return _digest([[path.name, checksum(path)] for path in files])


def tokens_fingerprint(folder: Path) -> str | None:
    """Return the SHA-256 of prepared tokens and their tokenizer, from the manifest; None if there are none.

    Equal tokens have equal fingerprints, whatever versions they were prepared with.

    Raises:
        ShardError: the preparation has not finished.
    """
    if not (folder / MANIFEST).is_file():
        return None
    TokenShards(folder)  # raises an error if the preparation has not finished
    manifest = read_manifest(folder)
    shards = {part: [shard.sha256 for shard in shards_of(manifest, part)] for part in PARTS}
    return _digest([manifest["tokenizer_fingerprint"], shards])


def _digest(content: list) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_none(value: object) -> bool:
    return value is None


class PositionSettings(Strict):
    """Positions in our decoder: fields of :class:`PriorDecoderConfig`."""

    prior: dict[str, Any] | list[dict[str, Any] | str] | str | None = None
    share_prior: bool = False
    encoding: dict[str, Any] | str | None = None
    logit_scale: dict[str, Any] | str | None = None
    # Runs from before these fields keep their identity.
    null_logit: dict[str, Any] | str | None = Field(default=None, exclude_if=_is_none)
    key_bias: dict[str, Any] | str | None = Field(default=None, exclude_if=_is_none)
    layer_pattern: list[str] | None = Field(default=None, exclude_if=_is_none)
    layer_kinds: dict[str, dict[str, Any]] | None = Field(default=None, exclude_if=_is_none)


class DecoderSizes(Strict):
    """Our decoder, but for its positions and its vocabulary."""

    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int | None = Field(default=None, gt=0)
    initializer_range: float = Field(default=0.02, gt=0)
    tie_word_embeddings: bool = True


class DecoderSettings(DecoderSizes, PositionSettings):
    """Our decoder with new weights."""

    head_dim: int | None = Field(default=None, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    vocab_size: int | None = Field(default=None, gt=0)
    """The tokenizer's by default; may be larger, to be a multiple of something."""

    def config(self, *, vocab_size: int, eos_token_id: int | None = None) -> PriorDecoderConfig:
        """Return the decoder's config for a tokenizer."""
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eos_token_id)
        sizes = self.model_dump(exclude={"vocab_size"})
        return PriorDecoderConfig(vocab_size=self.vocab_size or vocab_size, **special, **sizes)


class AttachSettings(Strict):
    """Arguments of :func:`attach` for a model of another architecture."""

    prior: dict[str, Any] | list[dict[str, Any] | str] | str | None = None
    logit_scale: dict[str, Any] | str | None = None
    layers: list[int] | None = None
    heads: list[int] | None = None
    share_prior: bool = False
    drop_positions: bool = False
    freeze_model: bool = False
    layer_pattern: list[str] | None = None
    layer_kinds: dict[str, dict[str, Any]] | None = None


class ModelSettings(Strict):
    """Exactly one of: our decoder, another architecture with new weights, a trained model."""

    decoder: DecoderSettings | None = None
    config: str | None = None
    """A Hugging Face model's folder or name, whose config alone is used."""
    pretrained: str | None = None
    """A Hugging Face model's folder or name (or a folder of ours), with its weights."""
    attach: AttachSettings | None = None
    """Priors for a model that is not our decoder."""
    train_only: Literal["attached"] | None = None
    """Whether all of a trained model learns (None), or its attached priors and logit scales alone."""

    @model_validator(mode="after")
    def _one_model(self) -> ModelSettings:
        check_one_of(self, "decoder", "config", "pretrained")
        if self.decoder is not None:
            self.decoder.config(vocab_size=1)  # a mistake in a description shows here
            if self.attach is not None:
                raise ValueError("attach is for models of other makes; a decoder has its prior under model.decoder")
        if self.train_only is not None and self.pretrained is None:
            raise ValueError("train_only is for a trained model, model.pretrained; new weights would never learn")
        return self

    @property
    def trains_attached_alone(self) -> bool:
        """Whether the model's own weights stay as they are."""
        return self.train_only is not None or (self.attach is not None and self.attach.freeze_model)


def check_model(settings: ModelSettings, *, length: int, tokenizer_size: int | None = None) -> None:
    """Make sure, before any work, that :func:`make_model` can make the model, by making it without its weights.

    Args:
        settings: describe it.
        length: tokens of the rows that it will read.
        tokenizer_size: entries of the tokenizer, where they are known already.

    Raises:
        OSError: its config cannot be loaded.
        ValueError: nothing can be attached, nothing would learn, or its vocabulary or its positions are too few.
    """
    with torch.device("meta"):
        model = _new_model(settings, tokenizer_size or 1)
        described = None if settings.pretrained is None else getattr(model.config, CONFIG_KEY, None)
        if described is not None:
            if settings.attach is not None:
                raise ValueError(
                    f"model.attach: {settings.pretrained} has priors attached already; leave model.attach out, and "
                    "they are trained further"
                )
            delattr(model.config, CONFIG_KEY)
            attach(model, **arguments_of(described, f"the config of {settings.pretrained}"))
        _finish(settings, model, tokenizer_size)
    check_positions(model, length)


def make_model(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Make the model, in float32; new weights are drawn from torch's generator.

    Raises:
        OSError: the model cannot be loaded.
        ValueError: its vocabulary is smaller than the tokenizer's, nothing can be attached, or nothing would learn.
    """
    special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    new = settings.pretrained is None
    model = _new_model(settings, len(tokenizer), **special) if new else load_model(str(settings.pretrained))
    _finish(settings, model, len(tokenizer))
    return model


def _new_model(settings: ModelSettings, vocab_size: int, **special: Any) -> PreTrainedModel:
    """Make a model with new weights; ``special`` are the ids of special tokens."""
    if settings.decoder is not None:
        eos = special.get("eos_token_id")
        config: PreTrainedConfig = settings.decoder.config(vocab_size=vocab_size, eos_token_id=eos)
    else:
        key = "pretrained" if settings.config is None else "config"
        try:
            config = load_config(getattr(settings, key))
        except (OSError, ValueError) as error:
            raise OSError(f"model.{key}: {error}") from error
        if settings.config is not None:
            config.update({"vocab_size": vocab_size, **special})
    if isinstance(config, PriorDecoderConfig):
        return PriorDecoderForCausalLM(config)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _finish(settings: ModelSettings, model: PreTrainedModel, tokenizer_size: int | None) -> None:
    """Attach priors, choose the parameters that learn, and check the vocabulary."""
    if settings.attach is not None:
        with errors_at("model.attach"):
            attach(model, **settings.attach.model_dump())
    if settings.train_only is not None:
        model.requires_grad_(False)
        if not train_attached(model):
            raise ValueError("model.train_only: nothing that learns is attached to the model")
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    if size < (tokenizer_size or 0):
        raise ValueError(
            f"the model's vocabulary has {size} entries, the tokenizer's {tokenizer_size}: expected no more than the "
            "model's"
        )
