"""Small decoders of transformers with random weights, one of every kind that attach() supports."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers as hf

VOCABULARY = 64
WINDOW = 6
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
LLAMA: dict[str, Any] = _SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_OPT = {key: value for key, value in _SIZES.items() if key != "initializer_range"}

_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "mistral": ("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": WINDOW}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {"head_dim": 8}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        LLAMA
        | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        LLAMA | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW},
    ),
    "granite_swa": ("GraniteSWAForCausalLM", "GraniteSWAConfig", LLAMA | {"sliding_window": WINDOW}),
    "mimo_v2_flash": (
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        LLAMA
        | {"head_dim": 8, "v_head_dim": 12, "sliding_window": WINDOW}
        | {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _HALF)}
        | {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24},
    ),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", LLAMA),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES | {"intermediate_size": 48}),
    "opt": ("OPTForCausalLM", "OPTConfig", _OPT | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}),
}
"""Model class, config class, and the config's arguments."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
"""Rotary scaling that also multiplies the logits."""
WITH_SINKS = ("gpt_oss", "granite_swa", "mimo_v2_flash")
"""Families that have a place beside the keys, whose logits are parameters."""
LAYERS = 2
HEADS = 4


_made: dict[str, Any] = {}


def tiny(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return the model in evaluation mode. A copy of a model is made faster than a model."""
    key = repr((family, seed, changes))
    if key not in _made:
        _made[key] = _make(family, seed, **changes)
    torch.manual_seed(seed)
    return copy.deepcopy(_made[key])


def _make(family: str, seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    model, config, arguments = FAMILIES[family]
    made = getattr(hf, model)(getattr(hf, config)(**arguments | changes)).eval()
    for module in made.modules():
        if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
            torch.nn.init.normal_(module.sinks)
    return made


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens without the special ones."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
