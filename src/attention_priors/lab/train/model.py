"""The model that a recipe trains."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from attention_priors.hf import attach, train_attached
from attention_priors.hf.attach import CONFIG_KEY
from attention_priors.hf.loading import check_positions, load_config, load_model
from attention_priors.lab.strict_yaml import Strict, check_one_of
from attention_priors.models.decoder import PriorDecoderConfig, PriorDecoderForCausalLM


class PositionSettings(Strict):
    """Positions in our decoder: fields of :class:`PriorDecoderConfig`."""

    prior: dict[str, Any] | list[dict[str, Any] | str] | str | None = None
    share_prior: bool = False
    encoding: dict[str, Any] | str | None = None
    logit_scale: dict[str, Any] | str | None = None


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
            attach(model, **described)
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
        try:
            attach(model, **settings.attach.model_dump())
        except ValueError as error:
            raise ValueError(f"model.attach: {error}") from error
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
