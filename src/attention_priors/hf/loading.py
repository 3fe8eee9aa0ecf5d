"""Trained causal language models, ours and others', and how long a text each can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    MptForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from attention_priors.encodings import LearnedTable
from attention_priors.hf.adapter import TOGETHER, adapter_folder, load_attached
from attention_priors.hf.alibi import MptAttention
from attention_priors.hf.attach import CONFIG_KEY, learned_positions, positions_are_dropped
from attention_priors.hf.files import damage_named, folder_or_repository
from attention_priors.models.decoder import PriorDecoderConfig
from attention_priors.models.encoder import PriorEncoderConfig
from attention_priors.models.vision import PriorVisionConfig


def load_any_config(name: str | Path) -> PreTrainedConfig:
    """Return the configuration of a model of any kind, ours or another; ``name`` as for :func:`load_model`."""
    adapter = adapter_folder(name)
    if adapter is None:
        with folder_or_repository("model", name, first="config.json"):
            return AutoConfig.from_pretrained(name)
    try:
        return load_any_config(adapter.base)
    except OSError as error:
        raise OSError(
            f"{str(adapter.folder)!r} is an adapter, and its base model cannot be loaded: {error}; {TOGETHER}"
        ) from error


def load_config(name: str | Path) -> PreTrainedConfig:
    """Return the configuration of a causal language model, ours or another; ``name`` as for :func:`load_model`.

    Raises:
        OSError: the configuration cannot be loaded.
        ValueError: the model is of another kind.
    """
    config = load_any_config(name)
    kind, cure = "a model of another kind", ""
    if isinstance(config, PriorVisionConfig):
        kind, cure = "a classifier of images", "; the report of its comparison shows its priors"
    elif isinstance(config, PriorEncoderConfig):
        kind, cure = "an encoder", "; attention-priors inspect takes this one"
    elif config.is_encoder_decoder:
        kind, cure = "an encoder and a decoder", "; attention-priors inspect takes T5"
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False:
        kind, cure = "an encoder", "; of encoders, attention-priors inspect takes those of this package"
    elif isinstance(config, PriorDecoderConfig) or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    raise ValueError(
        f"model {str(name)!r} is {kind} ({config.model_type}): expected a causal language model, which predicts each "
        f"token from those before it{cure}"
    )


def load_model(name: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a trained causal language model, ours or another, with the priors attached to it.

    Args:
        name: its folder, or its name on the Hugging Face Hub; or the folder of an adapter (:func:`save_adapter`, or
            PEFT's), whose base model is loaded by the name in the adapter's files. PEFT's weights are merged.
        dtype: of its weights; priors stay float32.

    Raises:
        OSError: the model cannot be loaded, or lacks weights.
        ValueError: the model is no causal language model, or its files are damaged; or the adapter does not name its
            base model, or does not fit it.
    """
    config = load_config(name)
    adapter = adapter_folder(name)
    if adapter is not None:
        return adapter.put_on(load_model(adapter.base, dtype))
    if getattr(config, CONFIG_KEY, None) is not None:
        return load_attached(name, dtype=dtype)
    return load_whole(AutoModelForCausalLM, name, dtype)


def tokenizer_of(name: str | Path) -> str:
    """Return where the tokenizer of a model is: the model's folder or name, or an adapter's base model."""
    adapter = adapter_folder(name)
    return str(name) if adapter is None or adapter.has_tokenizer else tokenizer_of(adapter.base)


def load_whole(kind: Any, name: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of a class of transformers, or of what an Auto class finds, with all of its weights.

    Raises:
        OSError: it cannot be loaded, or lacks weights.
        ValueError: its files are damaged.
    """
    with folder_or_repository("model", name), damage_named(name):
        model, found = kind.from_pretrained(name, dtype=dtype, output_loading_info=True)
    if found["missing_keys"]:
        # transformers would draw them at random, and say so in a warning.
        missing = sorted(found["missing_keys"])
        raise OSError(f"{name} is no whole {type(model).__name__}: it has no weights for {', '.join(missing[:3])}")
    return model


def number_of_positions(model: PreTrainedModel) -> int | None:
    """How many positions a model has; None where they have no end.

    Rotary positions, and ours but for learned tables, have none; nor has a table that ``attach`` has dropped.
    """
    config = model.config
    if isinstance(config, PriorDecoderConfig | PriorEncoderConfig):
        encoding = config.make_encoding()
        return encoding.max_length if isinstance(encoding, LearnedTable) else None
    if isinstance(model, MptForCausalLM):
        # transformers computes its ALiBi from a table; `use_priors` does not.
        return None if any(isinstance(module, MptAttention) for module in model.modules()) else config.max_seq_len
    if getattr(config, "rope_parameters", None) is None and not getattr(config, "alibi", False):
        return None if positions_are_dropped(model) else getattr(config, "max_position_embeddings", None)
    return None


def check_positions(model: PreTrainedModel, length: int) -> None:
    """Make sure that a model has positions for texts of a length.

    Raises:
        ValueError: it has a table that is shorter.
    """
    table = number_of_positions(model)
    if table is not None and table < length:
        raise ValueError(
            f"{type(model).__name__} has a table of {table} positions; it cannot read rows of {length} tokens"
        )


def check_chunk(model: PreTrainedModel, length: int, chunk: int) -> None:
    """Make sure that a text of a length may be read in chunks.

    Rotary positions of the kinds ``dynamic`` and ``longrope`` take other frequencies for a pass that ends beyond a
    certain length; the keys of chunks before it keep the ones that they had.

    Args:
        model: of which only the configuration is looked at.
        length: of the text, in tokens.
        chunk: tokens per pass.

    Raises:
        ValueError: the model would give another answer than in one pass.
    """
    config: Any = model.config.get_text_config(decoder=True)
    for rotary in _rotary_settings(config):
        kind = rotary.get("rope_type")
        if chunk < length and kind in _LENGTH_DEPENDENT:
            stated = (rotary.get("original_max_position_embeddings"), getattr(config, "max_position_embeddings", None))
            until = min((number for number in stated if number is not None), default=0)
            if length > until:
                raise ValueError(
                    f"chunk must be at least {length}, the tokens that are read: rotary positions of the kind {kind!r} "
                    f"change beyond {until} tokens, for all of a pass; it is {chunk}"
                )


def has_growing_frequencies(model: PreTrainedModel) -> bool:
    """Whether rotary frequencies grow with what is read, and stay so until a short text is read."""
    config: Any = model.config.get_text_config(decoder=True)
    return any(rotary.get("rope_type") == "dynamic" for rotary in _rotary_settings(config))


_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary positions of transformers."""


def _rotary_settings(config: Any) -> list[dict[str, Any]]:
    """Return a configuration's settings of rotary positions: of all layers, and of each kind of layer."""
    rotary = getattr(config, "rope_parameters", None) or {}
    return [rotary, *(each for each in rotary.values() if isinstance(each, dict))]


def note_length(model: PreTrainedModel, length: int) -> None:
    """Let a model's config say that it reads texts of a length: lm-evaluation-harness cuts them to what it says.

    Left alone where ``max_position_embeddings`` takes part in what is computed, in some scalings of rotary positions,
    or is the size of a table, which a saved model has whether or not its positions are dropped.
    """
    config: Any = model.config
    stated = getattr(config, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated >= length or learned_positions(model):
        return
    if all(rotary.get("rope_type", "default") in ("default", "linear") for rotary in _rotary_settings(config)):
        config.max_position_embeddings = length
