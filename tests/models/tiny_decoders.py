"""Tiny decoders for every prior, every encoding, and some combinations."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_priors.encodings import ENCODINGS
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM
from attention_priors.priors import CATALOGUE

VOCABULARY = 50
_ENCODING_ARGUMENTS: dict[str, dict[str, Any]] = {"learned": {"max_length": 64}, "shaw": {"max_offset": 3}}


def prior_description(name: str) -> dict[str, Any]:
    example = CATALOGUE[name].examples(1)[0].to_config()
    return {key: value for key, value in example.items() if key != "num_heads"}


def encoding_description(name: str) -> dict[str, Any]:
    return {"name": name} | _ENCODING_ARGUMENTS.get(name, {})


KEY_SINK = {"name": "key_sink", "train_length": 16, "init": "recency"}

VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    **{f"prior {name}": {"prior": prior_description(name)} for name, prior in CATALOGUE.items() if not prior.over_grid},
    **{f"encoding {name}": {"encoding": encoding_description(name)} for name in ENCODINGS},
    "ssmax": {"logit_scale": "ssmax"},
    "ssmax and a prior": {
        "prior": {"name": "generalized_gaussian", "init": "spread"},
        "logit_scale": {"name": "ssmax", "init": 0.7},
    },
    "ssmax beside a prior": {"prior": "laplace", "logit_scale": {"name": "ssmax", "include_prior": False}},
    "prior and rotary": {"prior": "laplace", "encoding": "rotary"},
    "prior and shaw": {"prior": "laplace", "encoding": encoding_description("shaw")},
    "sum": {"prior": [prior_description("spectral"), prior_description("window"), KEY_SINK]},
    "shared prior": {"prior": "relative_buckets", "share_prior": True},
    "fire beyond its threshold": {
        "prior": {"name": "fire", "hidden_size": 5, "init": {"c": 1.0, "threshold": 3.0}},
        "logit_scale": "ssmax",
    },
    "null key": {"null_logit": {"name": "null_key", "init": 0.5}},
    "forget gate": {"key_bias": "forget_gate"},
    "cable, a prior, ssmax and a null key": {
        "key_bias": {"name": "cable", "init": -1.0},
        "prior": "laplace",
        "logit_scale": {"name": "ssmax", "init": 0.7},
        "null_logit": "null_key",
    },
    "layers that differ": {
        "layer_pattern": ["local", "global"],
        "layer_kinds": {
            "local": {
                "prior": [{"name": "window", "size": 3}, "laplace"],
                "encoding": "rotary",
                "null_logit": "null_key",
                "logit_scale": None,
            },
            "global": {"prior": {"name": "generalized_gaussian", "init": "spread"}, "key_bias": "forget_gate"},
        },
        "logit_scale": "ssmax",
    },
}

DISTINCT = [
    "prior kerple",
    "encoding learned",
    "encoding shaw",
    "sum",
    "shared prior",
    "fire beyond its threshold",
    "cable, a prior, ssmax and a null key",
    "layers that differ",
]
"""Variants that together have every kind of part. Several tests run the others only in a deep run, because
a decoder treats all priors alike."""

FAMILIES: dict[str, dict[str, Any]] = {
    "BAM": {"prior": {"name": "generalized_gaussian", "init": "spread"}},
    "T5, shared by all layers": {"prior": "relative_buckets", "share_prior": True},
    "rotary": {"encoding": "rotary"},
    "ALiBi and SSMax": {"prior": "laplace", "logit_scale": {"name": "ssmax", "init": 0.7}},
    "GOAT": {"prior": [{"name": "spectral", "init": "recency"}, KEY_SINK]},
    "Shaw": {"encoding": encoding_description("shaw")},
    "FoX": {"key_bias": {"name": "forget_gate", "init": 2.0}},
    "SWAN": {
        "layer_pattern": ["local", "global"],
        "layer_kinds": {"local": {"prior": {"name": "window", "size": 8}, "encoding": "rotary"}, "global": {}},
    },
}
"""Families of decoders in use. Each passes the tests that transformers applies to its own models."""


def tiny_config(**changes: Any) -> PriorDecoderConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,  # logits differ by more than rounding
    }
    return PriorDecoderConfig(**sizes | changes)


_made: dict[str, PriorDecoderForCausalLM] = {}


def tiny_decoder(dtype: torch.dtype = torch.float64, **changes: Any) -> PriorDecoderForCausalLM:
    """Return a decoder whose priors and scales differ between heads and layers: a copy, which is made faster."""
    key = repr((dtype, changes))
    if key not in _made:
        _made[key] = _make(dtype, **changes)
    torch.manual_seed(0)
    return copy.deepcopy(_made[key])


def _make(dtype: torch.dtype, **changes: Any) -> PriorDecoderForCausalLM:
    torch.manual_seed(0)
    model = PriorDecoderForCausalLM(tiny_config(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("prior.", "logit_scale.", "null_logit.", "key_bias.")):
                parameter.add_(0.3 * torch.randn(parameter.shape))
            elif "encoding." in name:
                parameter.normal_(std=0.5)
    model.to(dtype)  # pyright: ignore[reportArgumentType]
    return model.eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    found = model(ids, use_cache=False, **options).logits
    assert found is not None
    return found
