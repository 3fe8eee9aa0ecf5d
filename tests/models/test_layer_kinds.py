"""Layers of several kinds: which layer has what, descriptions, errors, and a model that reads beyond its window."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import logits_of, tiny_config, tiny_decoder, tokens

from attention_priors import Rotary, Window
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM
from attention_priors.models.repositioning import with_positions

KINDS: dict[str, Any] = {
    "local": {"encoding": "rotary", "prior": {"name": "window", "size": 4}},
    "global": {"logit_scale": "ssmax", "key_bias": "forget_gate", "null_logit": "null_key"},
}
PATTERN = ["local", "local", "global"]


def test_the_pattern_repeats() -> None:
    model = tiny_decoder(layer_pattern=PATTERN, layer_kinds=KINDS, num_hidden_layers=5)
    for index, layer in enumerate(model.model.layers):
        attention: Any = layer.self_attn
        parts = [attention.prior, attention.encoding, attention.logit_scale, attention.key_bias, attention.null_logit]
        is_there = [part is not None for part in parts]
        assert is_there == ([False, False, True, True, True] if index == 2 else [True, True, False, False, False])
    assert model.config.layer_types == ["full_attention"] * 2 + ["indexed_attention"] + ["full_attention"] * 2


def test_a_kind_inherits_what_it_does_not_describe() -> None:
    kinds = {"a": {"prior": None}, "b": {"encoding": {"name": "rotary", "base": 500.0}}}
    model = tiny_decoder(
        prior={"name": "window", "size": 3}, encoding="rotary", layer_pattern=["a", "b"], layer_kinds=kinds
    )
    first, second = (layer.self_attn for layer in model.model.layers)
    assert first.prior is None
    assert isinstance(second.prior, Window)
    assert isinstance(first.encoding, Rotary)
    assert (first.encoding.base, second.encoding.base) == (10000.0, 500.0)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_config_comes_back(tmp_path: Path) -> None:
    model = tiny_decoder(torch.float32, layer_pattern=PATTERN, layer_kinds=KINDS, num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["layer_pattern"], written["layer_kinds"]) == (PATTERN, KINDS)
    loaded = PriorDecoderForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.to_dict() == model.config.to_dict()
    ids = tokens(2, 9)
    assert torch.equal(logits_of(loaded.eval(), ids), logits_of(model, ids))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_pattern": ["a"]}, "layer_pattern names the kinds that layer_kinds describes"),
        ({"layer_kinds": {"a": {}}}, "layer_pattern names the kinds that layer_kinds describes"),
        ({"layer_pattern": "a", "layer_kinds": {"a": {}}}, "layer_pattern must be a list"),
        ({"layer_pattern": [], "layer_kinds": {}}, "layer_pattern must be a list"),
        ({"layer_pattern": ["a", "b"], "layer_kinds": {"a": {}}}, "must name every kind in layer_kinds"),
        ({"layer_pattern": ["a"], "layer_kinds": {"a": {}, "b": {}}}, "must name every kind in layer_kinds"),
        ({"layer_pattern": ["a"], "layer_kinds": {"a": {"size": 3}}}, r"layer_kinds\['a'\] may describe prior, "),
        ({"layer_pattern": ["a"], "layer_kinds": {"a": "laplace"}}, r"layer_kinds\['a'\] may describe prior, "),
        ({"layer_pattern": ["a"], "layer_kinds": {"a": {"prior": "alibi"}}}, "unknown prior 'alibi'"),
        ({"layer_pattern": ["a"], "layer_kinds": {"a": {"encoding": "sinusoidal"}}}, "is added to embeddings"),
        (
            {
                "prior": "laplace",
                "share_prior": True,
                "layer_pattern": ["a"],
                "layer_kinds": {"a": {"prior": "laplace"}},
            },
            "share_prior: all layers share one prior",
        ),
    ],
)
def test_mistakes(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        PriorDecoderConfig(**changes)


def test_an_added_encoding_is_the_whole_models() -> None:
    config = tiny_config(encoding="sinusoidal", layer_pattern=["a"], layer_kinds={"a": {"prior": "laplace"}})
    assert PriorDecoderForCausalLM(config).model.encoding is not None


@pytest.mark.slow
def test_a_trained_model_generates_beyond_its_window() -> None:
    """It repeats a period that is longer than its window, which the global layer alone sees."""
    torch.manual_seed(0)
    kinds: dict[str, Any] = {"local": {"encoding": "rotary", "prior": {"name": "window", "size": 4}}, "global": {}}
    config = tiny_config(layer_pattern=["local", "global"], layer_kinds=kinds, hidden_size=64, initializer_range=0.05)
    model: Any = PriorDecoderForCausalLM(config)
    optimizer, period = torch.optim.AdamW(model.parameters(), 3e-3), 8
    for step in range(250):
        text = tokens(16, period, seed=step).repeat(1, 3)
        optimizer.zero_grad()
        labels = text.clone()
        labels[:, :period] = -100
        model(text, labels=labels).loss.backward()
        optimizer.step()
    text = tokens(8, period, seed=-1)
    options: dict[str, Any] = {"max_new_tokens": 2 * period, "do_sample": False, "pad_token_id": 0}
    prompt = text.repeat(1, 2)
    found = model.eval().generate(prompt, **options)[:, prompt.shape[1] :]
    assert float((found == text.repeat(1, 2)).float().mean()) > 0.9
    assert torch.equal(found, model.generate(prompt, use_cache=False, **options)[:, prompt.shape[1] :])


def test_positions_may_change_in_one_kind_of_layer() -> None:
    model = tiny_decoder(torch.float32, layer_pattern=PATTERN, layer_kinds=KINDS, num_hidden_layers=3)
    kinds = {**KINDS, "global": {**KINDS["global"], "null_logit": None}}
    changed = with_positions(model, {"layer_kinds": kinds})
    assert all(layer.self_attn.null_logit is None for layer in changed.model.layers)
    kept, now = model.state_dict(), changed.state_dict()
    assert kept.keys() - now.keys() == {"model.layers.2.self_attn.null_logit.logit"}
    assert all(torch.equal(kept[name], now[name]) for name in now)
