"""Loading of causal language models, this package's and others, and their length limits."""

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
    """Return the config of a model of any kind. ``name`` is as for :func:`load_model`."""
    adapter = adapter_folder(name)
    if adapter is None:
        with folder_or_repository("model", name, first="config.json"):
            return AutoConfig.from_pretrained(name)
    try:
        return load_any_config(adapter.base)
    except OSError as error:
        raise OSError(
            f"the base model of the adapter {str(adapter.folder)!r} cannot be loaded: {error}; {TOGETHER}"
        ) from error


def load_config(name: str | Path) -> PreTrainedConfig:
    """Return the config of a causal language model. ``name`` is as for :func:`load_model`.

    Raises:
        OSError: the config cannot be loaded.
        ValueError: the model is not a causal language model.
    """
    config = load_any_config(name)
    kind, cure = "another kind of model", ""
    if isinstance(config, PriorVisionConfig):
        kind, cure = "an image classifier", "; the report of its comparison shows its priors"
    elif isinstance(config, PriorEncoderConfig):
        kind, cure = "an encoder", "; attention-priors inspect supports this model"
    elif config.is_encoder_decoder:
        kind, cure = "an encoder-decoder", "; attention-priors inspect supports T5"
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False:
        kind, cure = "an encoder", "; attention-priors inspect supports encoders of this package"
    elif isinstance(config, PriorDecoderConfig) or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    raise ValueError(
        f"model {str(name)!r} must be a causal language model, which predicts each token from previous tokens; got "
        f"{kind} ({config.model_type}){cure}"
    )


def load_model(name: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a trained causal language model with its attached priors.

    Args:
        name: folder or Hugging Face name of the model, or folder of an adapter (:func:`save_adapter` or PEFT). For an
            adapter, the base model named in its files is loaded, and PEFT's weights are merged.
        dtype: dtype of the weights. Priors stay in float32.

    Raises:
        OSError: the model cannot be loaded, or weights are missing.
        ValueError: the model is not a causal language model, or its files are damaged; or an adapter does not name its
            base model or does not fit it.
    """
    config = load_config(name)
    adapter = adapter_folder(name)
    if adapter is not None:
        return adapter.put_on(load_model(adapter.base, dtype))
    if getattr(config, CONFIG_KEY, None) is not None:
        return load_attached(name, dtype=dtype)
    return load_whole(AutoModelForCausalLM, name, dtype)


def tokenizer_of(name: str | Path) -> str:
    """Return the folder or name of a model's tokenizer: the model's own, or that of an adapter's base model."""
    adapter = adapter_folder(name)
    return str(name) if adapter is None or adapter.has_tokenizer else tokenizer_of(adapter.base)


def load_whole(kind: Any, name: str | Path, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """Load a model by a class or Auto class of transformers, and check that no weights are missing.

    Args:
        kind: class whose ``from_pretrained`` loads the model.
        name: folder or Hugging Face name of the model.
        dtype: dtype of the weights.
        options: further options of ``from_pretrained``.

    Raises:
        OSError: the model cannot be loaded, or weights are missing.
        ValueError: the model's files are damaged.
    """
    with folder_or_repository("model", name), damage_named(name):
        model, found = kind.from_pretrained(name, dtype=dtype, output_loading_info=True, **options)
    if found["missing_keys"]:
        # transformers would initialise missing weights at random, with a warning only.
        missing = sorted(found["missing_keys"])
        raise OSError(f"{name} is not a complete {type(model).__name__}: no weights for {', '.join(missing[:3])}")
    return model


def number_of_positions(model: PreTrainedModel) -> int | None:
    """Return a model's maximum number of positions, or None without a limit.

    Rotary positions and priors have no limit, and neither has a position table that ``attach`` dropped. This package's
    models have a limit with a learned table only.
    """
    config = model.config
    if isinstance(config, PriorDecoderConfig | PriorEncoderConfig):
        encoding = config.make_encoding()
        return encoding.max_length if isinstance(encoding, LearnedTable) else None
    if isinstance(model, MptForCausalLM):
        # transformers computes ALiBi from a table of this size; use_priors does not.
        return None if any(isinstance(module, MptAttention) for module in model.modules()) else config.max_seq_len
    if getattr(config, "rope_parameters", None) is None and not getattr(config, "alibi", False):
        return None if positions_are_dropped(model) else getattr(config, "max_position_embeddings", None)
    return None


def check_positions(model: PreTrainedModel, length: int) -> None:
    """Raise a ValueError if a model's position table is shorter than ``length``."""
    table = number_of_positions(model)
    if table is not None and table < length:
        raise ValueError(
            f"{type(model).__name__} has a table of {table} positions and cannot read rows of {length} tokens"
        )


def check_chunk(model: PreTrainedModel, length: int, chunk: int) -> None:
    """Raise a ValueError if reading a row in chunks would change the result.

    Rotary positions of types ``dynamic`` and ``longrope`` change their frequencies for a pass that ends beyond a
    certain length, while keys of earlier chunks keep the old frequencies.

    Args:
        model: the model, of which only the config is read.
        length: length of the row in tokens.
        chunk: tokens per pass.

    Raises:
        ValueError: the result would differ from that of one pass.
    """
    config: Any = model.config.get_text_config(decoder=True)
    for rotary in _rotary_settings(config):
        kind = rotary.get("rope_type")
        if chunk < length and kind in _LENGTH_DEPENDENT:
            stated = (rotary.get("original_max_position_embeddings"), getattr(config, "max_position_embeddings", None))
            until = min((number for number in stated if number is not None), default=0)
            if length > until:
                raise ValueError(
                    f"chunk must be at least the row's length, {length} tokens, got {chunk}: rotary positions of type "
                    f"{kind!r} change for a pass beyond {until} tokens"
                )


def has_growing_frequencies(model: PreTrainedModel) -> bool:
    """Return whether rotary frequencies adapt to long inputs, and keep their values until a short input."""
    config: Any = model.config.get_text_config(decoder=True)
    return any(rotary.get("rope_type") == "dynamic" for rotary in _rotary_settings(config))


_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of rotary positions in transformers whose frequencies depend on the length."""


def _rotary_settings(config: Any) -> list[dict[str, Any]]:
    """Return the rotary settings of a config: for all layers, and for each layer type."""
    rotary = getattr(config, "rope_parameters", None) or {}
    return [rotary, *(each for each in rotary.values() if isinstance(each, dict))]


def note_length(model: PreTrainedModel, length: int) -> None:
    """Increase ``max_position_embeddings`` in a model's config to ``length``, to which lm-evaluation-harness truncates.

    The config is unchanged if ``max_position_embeddings`` affects the computation (in some rotary scalings), or is the
    size of a table, which a saved model has even if its positions are dropped.
    """
    config: Any = model.config
    stated = getattr(config, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated >= length or learned_positions(model):
        return
    if all(rotary.get("rope_type", "default") in ("default", "linear") for rotary in _rotary_settings(config)):
        config.max_position_embeddings = length
