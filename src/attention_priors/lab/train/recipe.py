"""Recipes of ``attention-priors train``, with checks before any work, and the models that they describe."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field, model_validator
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attention_priors._io import checksum
from attention_priors.hf import attach, train_attached
from attention_priors.hf.adapter import arguments_of
from attention_priors.hf.attach import CONFIG_KEY
from attention_priors.hf.loading import check_positions, load_config, load_model, load_whole
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
    """Settings of the optimiser and its schedule, for any kind of model."""

    optimizer: Literal["adamw", "radam"] = "radam"
    """RAdam with decoupled weight decay, or AdamW."""
    learning_rate: float = Field(gt=0)
    """Learning rate after the warm-up. It follows a cosine down to its final value."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decays of the optimiser's moments."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Epsilon of the optimiser."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices. Priors, norms and logit scales have none."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps over which the learning rate rises linearly from 0."""
    minimum_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate of the cosine schedule, as a share of ``learning_rate``."""
    prior_learning_rate_multiplier: float = Field(default=1.0, gt=0)
    """Multiplier of the learning rate for the parameters of priors; our results use 15."""
    logit_scale_learning_rate_multiplier: float = Field(default=1.0, gt=0)
    """Multiplier of the learning rate for SSMax's ``s``."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of matrix products, by autocast; float16 needs CUDA. Weights, priors and moments stay in float32."""
    checkpoint_steps: int = Field(default=200, gt=0)
    """Number of steps between checkpoints, from which interrupted training resumes."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Total number of steps."""

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Number of rows, or other examples, per optimiser step."""

    @property
    def total_rows(self) -> int:
        """Total number of rows."""
        return self.total_steps * self.rows_per_step

    @property
    def step_in_words(self) -> str:
        """Description of the size of a step."""
        return f"{self.rows_per_step} rows a step"


class TrainingSettings(OptimizationSettings):
    """Settings of the optimiser, its schedule and the size of a step. Lengths are in tokens."""

    context_length: int = Field(gt=1)
    """Length of a training row, in tokens."""
    steps: int | None = Field(default=None, gt=0)
    """Number of optimiser steps."""
    tokens: int | None = Field(default=None, gt=0)
    """Alternative to ``steps``: total number of tokens, rounded down to whole steps."""
    batch_size: int | None = Field(default=None, gt=0)
    """Number of rows per step, over all processes and accumulated passes."""
    tokens_per_step: int | None = Field(default=None, gt=0)
    """Alternative to ``batch_size``: number of tokens per step, a multiple of ``context_length``."""

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
        """Number of rows per optimiser step."""
        return self.batch_size or (self.tokens_per_step or 0) // self.context_length

    @property
    def step_tokens(self) -> int:
        """Number of tokens per optimiser step."""
        return self.rows_per_step * self.context_length

    @property
    def total_steps(self) -> int:
        """Total number of steps."""
        return self.steps or (self.tokens or 0) // self.step_tokens

    @property
    def final_learning_rate(self) -> float:
        """Learning rate at the end of the schedule."""
        return self.learning_rate * self.minimum_learning_rate_ratio

    @property
    def step_in_words(self) -> str:
        """Description of the size of a step, in rows and tokens."""
        return f"{self.rows_per_step} rows a step ({self.step_tokens} tokens)"


class ProcessSettings(Strict):
    """Settings of a training process that change results only through the order of floating-point sums."""

    workers: int = Field(default=0, ge=0)
    """Number of data-loading processes per training process; 0 loads in the training process."""
    activation_checkpointing: bool = False
    """Whether to recompute activations in the backward pass: about a third more time, far less memory."""


class RunningSettings(ProcessSettings):
    """Settings of the processes, checkpoints and logs of a training run."""

    rows_at_a_time: int | None = Field(default=None, gt=0)
    """Number of rows per forward pass on one device. Gradients are accumulated over the passes of a step, so the rows
    of a step must be a multiple of this number times the number of processes. By default, each process runs its rows of
    a step in a single pass."""
    checkpoints_kept: int = Field(default=2, gt=0)
    """Number of checkpoints to keep."""
    log_every: int | None = Field(default=None, gt=0)
    """Number of steps over which a logged loss is averaged; a fiftieth of the training by default."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Services that get the losses; install their packages first."""
    fsdp: dict[str, Any] | None = None
    """Value of ``TrainingArguments.fsdp_config``, to shard parameters, gradients and moments; ``{}`` for its
    defaults."""
    ddp: dict[Literal["find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph"], Any] = Field(
        default_factory=dict
    )
    """Values of ``TrainingArguments.ddp_*``. ``find_unused_parameters`` is off by default."""
    ddp_timeout: int = Field(default=1800, gt=0)
    """Seconds that a process waits for other processes."""

    def accumulation(self, settings: OptimizationSettings, processes: int) -> tuple[int, int]:
        """Return the number of rows per forward pass on one device, and the number of passes per step.

        Raises:
            ValueError: The rows of a step cannot be divided evenly.
        """
        rows = settings.rows_per_step
        if self.rows_at_a_time is None and rows % processes:
            raise ValueError(f"{rows} rows a step cannot be divided evenly among {processes} processes")
        at_a_time = self.rows_at_a_time or rows // processes
        passes, rest = divmod(rows, at_a_time * processes)
        if rest:
            raise ValueError(
                f"{settings.step_in_words} are not a multiple of rows_at_a_time={at_a_time} "
                f"on {processes} process{'es' if processes > 1 else ''}"
            )
        return at_a_time, passes


class ValidationSettings(Strict):
    """Settings of the validation loss on held-out text during training."""

    every: int = Field(default=500, gt=0)
    """Number of steps between measurements. The last step always has a measurement."""
    tokens: int = Field(default=1_000_000, gt=0)
    """Largest number of held-out tokens to read, from the first on."""


class TrainRecipe(Strict):
    """Recipe of a training run."""

    plugins: Plugins = ()
    """Modules that register priors of your own; every process imports them before the other keys are read."""
    name: str = Field(min_length=1)
    """Title of the run."""
    description: str = ""
    """Description of the run."""
    model: ModelSettings
    tokenizer: TokenizerSpec = None
    """Path or Hugging Face name of a tokenizer, or the vocabulary size of a new byte-level BPE. The BPE is trained on
    the first 20 million characters. For a dataset, or a genome without ``held_out``, these include the held-out part,
    which comes first. None with ``data.shards``, which have a tokenizer."""
    data: DataSettings
    training: TrainingSettings
    validation: ValidationSettings | None = None
    running: RunningSettings = RunningSettings()
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of new weights, the order of rows, and dropout."""

    @model_validator(mode="after")
    def _possible(self) -> TrainRecipe:
        if (self.tokenizer is None) != (self.data.shards is not None):
            raise ValueError(
                f"tokenizer is required without data.shards and not allowed with them; got {self.tokenizer!r}"
            )
        length, most = self.training.context_length, self.data.max_tokens
        if most is not None and most < length:
            raise ValueError(
                f"data.max_tokens must be at least one row, training.context_length={length}; it is {most}"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Return all inputs that determine the result, except library versions and the tokens that a run prepares.

        Folders are identified by a hash of their content, for which weights are read in full.

        Raises:
            ShardError: The preparation of ``data.shards`` has not finished.
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
        """Return the preparation of this recipe's tokens, as in ``attention-priors prepare``.

        Raises:
            ValueError, FileNotFoundError: The tokens are prepared already, or the text cannot be read.
        """
        data = self.data
        documents = data.documents()
        limit = data.max_tokens
        if data.dataset is not None:
            # Only the tokens that training reads are prepared, because a dataset may be far larger.
            limit = limit or self.training.total_rows * self.training.context_length
        assert self.tokenizer is not None
        return Preparation(documents, self.tokenizer, data.held_out_tokens, limit, data.shard_tokens)


def load_train_recipe(path: Path) -> TrainRecipe:
    """Read and check a recipe.

    Raises:
        RecipeError: The file is not YAML, or a key or value is invalid; the message names the key, its value and the
            allowed values.
        FileNotFoundError: The file does not exist.
    """
    return read_strictly(path, TrainRecipe)


def files_fingerprint(name: str, patterns: tuple[str, ...]) -> str | None:
    """Return the SHA-256 (64 hex digits) of files in a folder; None if the folder does not exist.

    Models on the Hugging Face Hub have no fingerprint: their commit changes with every edit of the model card.

    Args:
        name: Path of the folder.
        patterns: Patterns of file names.
    """
    folder = Path(name)
    if not folder.is_dir():
        return None
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return _digest([[path.name, checksum(path)] for path in files])


def tokens_fingerprint(folder: Path) -> str | None:
    """Return the SHA-256 of prepared tokens and their tokenizer, from the manifest; None without a manifest.

    Equal tokens have equal fingerprints, also if they were prepared with different library versions.

    Raises:
        ShardError: The preparation has not finished.
    """
    if not (folder / MANIFEST).is_file():
        return None
    TokenShards(folder)  # raises ShardError if the preparation has not finished
    manifest = read_manifest(folder)
    shards = {part: [shard.sha256 for shard in shards_of(manifest, part)] for part in PARTS}
    return _digest([manifest["tokenizer_fingerprint"], shards])


def _digest(content: list) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class PositionSettings(Strict):
    """Settings of positions in our decoder."""

    prior: dict[str, Any] | list[dict[str, Any] | str] | str | None = None
    """Log-prior of all layers: a name, a mapping of ``name`` and arguments, or a list of these, which is their sum.
    None for no prior."""
    share_prior: bool = False
    """Whether all layers share one prior, as in T5. Otherwise each layer has its own."""
    encoding: dict[str, Any] | str | None = None
    """Encoding of positions, such as ``rotary``: a name, or a mapping of ``name`` and arguments. None for no
    encoding."""
    logit_scale: dict[str, Any] | str | None = None
    """Logit scale, such as ``ssmax``: a name, or a mapping of ``name`` and arguments. Each layer learns its own. None
    for no logit scale."""
    null_logit: dict[str, Any] | str | None = None
    """Null key, ``null_key``, to which a head may attend in place of all keys. None for no null key."""
    key_bias: dict[str, Any] | str | None = None
    """Bias of each key, such as ``forget_gate``: a name, or a mapping of ``name`` and arguments. None for no bias."""
    layer_pattern: list[str] | None = None
    """Names of the kinds of layers, repeated over the layers. None if all layers are alike."""
    layer_kinds: dict[str, dict[str, Any]] | None = None
    """Settings of each kind of layer, by name. A kind inherits the settings that it does not have."""


class DecoderSizes(Strict):
    """Sizes of our decoder, without positions and vocabulary."""

    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(gt=0)
    """Width of the SwiGLU layers."""
    num_hidden_layers: int = Field(gt=0)
    """Number of layers."""
    num_attention_heads: int = Field(gt=0)
    """Number of query heads."""
    num_key_value_heads: int | None = Field(default=None, gt=0)
    """Number of key and value heads; ``num_attention_heads`` by default."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    equal_projections: bool = False
    """Whether the key projection of each head starts equal to its query projection."""
    tie_word_embeddings: bool = True
    """Whether the output layer is the transpose of the embedding."""


class DecoderSettings(DecoderSizes, PositionSettings):
    """Our decoder with new weights."""

    head_dim: int | None = Field(default=None, gt=0)
    """Width of a head; ``hidden_size / num_attention_heads`` by default."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of the norms."""
    vocab_size: int | None = Field(default=None, gt=0)
    """Vocabulary size; the tokenizer's by default. May be larger, for example to be a multiple of 64."""

    def config(self, *, vocab_size: int, eos_token_id: int | None = None) -> PriorDecoderConfig:
        """Return the config of the decoder for a tokenizer."""
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eos_token_id)
        sizes = self.model_dump(exclude={"vocab_size"})
        return PriorDecoderConfig(vocab_size=self.vocab_size or vocab_size, **special, **sizes)


class AttachSettings(Strict):
    """Priors to attach to a model that is not our decoder, as :func:`attach` does."""

    prior: dict[str, Any] | list[dict[str, Any] | str] | str | None = None
    """Log-prior: a name, a mapping of ``name`` and arguments, or a list of these, which is their sum. None for
    no prior."""
    logit_scale: dict[str, Any] | str | None = None
    """Logit scale: a name, or a mapping of ``name`` and arguments. ``residual_ssmax`` starts as the identity. None for
    no logit scale."""
    layers: list[int] | None = None
    """Indices of the layers that get the prior, negative ones from the end; None for all."""
    heads: list[int] | None = None
    """Query heads of these layers that get the prior; None for all."""
    share_prior: bool = False
    """Whether all layers share one prior, as in T5. Otherwise each layer has its own."""
    drop_positions: bool = False
    """Whether to drop the model's own positions (DroPE), so that only the prior encodes positions."""
    freeze_model: bool = False
    """Whether to freeze all parameters but those of priors and logit scales."""
    layer_pattern: list[str] | None = None
    """Names of the kinds of layers, repeated over the layers. None if all layers are alike."""
    layer_kinds: dict[str, dict[str, Any]] | None = None
    """Settings of each kind of layer, by name. A kind inherits the settings that it does not have."""


class ModelSettings(Strict):
    """Model of a recipe: exactly one of ``decoder`` (ours), ``config`` (new weights) and ``pretrained``."""

    decoder: DecoderSettings | None = None
    config: str | None = None
    """Folder or name of a Hugging Face model whose config is used, with new weights."""
    pretrained: str | None = None
    """Folder or name of a model, Hugging Face's or ours, whose weights are used."""
    rope_parameters: dict[str, Any] | None = None
    """Changes of a pretrained model's rotary settings, by transformers' names, such as ``{rope_type: yarn, factor: 4.0,
    original_max_position_embeddings: 8192}``."""
    attach: AttachSettings | None = None
    train_only: Literal["attached"] | None = None
    """``attached`` to train only attached priors and logit scales of a pretrained model; None to train the whole
    model."""

    @model_validator(mode="after")
    def _one_model(self) -> ModelSettings:
        check_one_of(self, "decoder", "config", "pretrained")
        if self.decoder is not None:
            self.decoder.config(vocab_size=1)  # raises an error for invalid settings
            if self.attach is not None:
                raise ValueError("attach is not allowed with model.decoder; set the prior in model.decoder")
        for name in ("train_only", "rope_parameters"):
            if getattr(self, name) is not None and self.pretrained is None:
                raise ValueError(f"{name} needs model.pretrained, which is not set")
        return self

    @property
    def trains_attached_alone(self) -> bool:
        """Whether the model's own weights are frozen."""
        return self.train_only is not None or (self.attach is not None and self.attach.freeze_model)


def check_model(settings: ModelSettings, *, length: int, tokenizer_size: int | None = None) -> PreTrainedModel:
    """Check, before any work, that :func:`make_model` can make a model, by making it on the meta device.

    Args:
        settings: Description of the model.
        length: Length of training rows in tokens.
        tokenizer_size: Number of entries of the tokenizer; None if unknown.

    Returns:
        The model without its weights.

    Raises:
        OSError: The config cannot be loaded.
        ValueError: The priors cannot be attached, no parameter would be trained, or the model has too few positions or
            too small a vocabulary.
    """
    with torch.device("meta"):
        model = _new_model(settings, tokenizer_size or 1)
        described = None if settings.pretrained is None else getattr(model.config, CONFIG_KEY, None)
        if described is not None:
            if settings.attach is not None:
                raise ValueError(
                    f"model.attach: {settings.pretrained} already has attached priors; remove model.attach to train "
                    "these priors further"
                )
            delattr(model.config, CONFIG_KEY)
            attach(model, **arguments_of(described, f"the config of {settings.pretrained}"))
        _finish(settings, model, tokenizer_size)
    check_positions(model, length)
    return model


def make_model(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Make a model in float32; new weights are drawn from PyTorch's global generator.

    Raises:
        OSError: The model cannot be loaded.
        ValueError: The vocabulary is smaller than the tokenizer's, the priors cannot be attached, or no parameter would
            be trained.
    """
    special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if settings.pretrained is None:
        model = _new_model(settings, len(tokenizer), **special)
    elif settings.rope_parameters is None:
        model = load_model(settings.pretrained)
    else:
        model = load_whole(AutoModelForCausalLM, settings.pretrained, config=_config(settings, settings.pretrained))
    _finish(settings, model, len(tokenizer))
    return model


def _new_model(settings: ModelSettings, vocab_size: int, **special: Any) -> PreTrainedModel:
    """Make a model with new weights; ``special`` has the ids of special tokens."""
    if settings.decoder is not None:
        eos = special.get("eos_token_id")
        config: PreTrainedConfig = settings.decoder.config(vocab_size=vocab_size, eos_token_id=eos)
    else:
        config = _config(settings, cast(str, settings.config or settings.pretrained))
        if settings.config is not None:
            config.update({"vocab_size": vocab_size, **special})
    if isinstance(config, PriorDecoderConfig):
        return PriorDecoderForCausalLM(config)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _config(settings: ModelSettings, name: str) -> PreTrainedConfig:
    """Return the config of a model, with the rotary settings of the recipe."""
    key = "pretrained" if settings.config is None else "config"
    try:
        config: Any = load_config(name)
    except (OSError, ValueError) as error:
        raise OSError(f"model.{key}: {error}") from error
    changes = settings.rope_parameters
    if changes is None:
        return config
    before = getattr(config, "rope_parameters", None)
    if not isinstance(before, dict) or "rope_type" not in before or getattr(config, CONFIG_KEY, None) is not None:
        raise ValueError(
            f"model.rope_parameters: {name} must be a model with one kind of rotary positions and without attached "
            f"priors; its config has rope_parameters={before}"
        )
    config.rope_parameters = before | changes
    kind = config.rope_parameters["rope_type"]
    try:
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(f"unknown rope_type {kind!r}: expected default, {', '.join(ROPE_INIT_FUNCTIONS)}")
        config.validate_rope()
    except (KeyError, ValueError) as error:
        raise ValueError(f"model.rope_parameters: {error}") from error
    first, factor = (config.rope_parameters.get(key) for key in ("original_max_position_embeddings", "factor"))
    if first is not None and factor is not None:
        config.max_position_embeddings = int(first * factor)
    return config


def _finish(settings: ModelSettings, model: PreTrainedModel, tokenizer_size: int | None) -> None:
    """Attach priors, freeze parameters, and check the vocabulary."""
    if settings.attach is not None:
        with errors_at("model.attach"):
            attach(model, **settings.attach.model_dump())
    if settings.train_only is not None:
        model.requires_grad_(False)
        if not train_attached(model):
            raise ValueError("model.train_only: no trainable prior or logit scale is attached to the model")
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    if size < (tokenizer_size or 0):
        raise ValueError(
            f"the tokenizer has {tokenizer_size} entries: expected at most {size}, the size of the model's vocabulary"
        )
