"""Layers of several kinds: patterns, configs, errors, and generation beyond a window."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import VOCABULARY, logits_of, tiny_config, tiny_decoder, tokens
from torch import Tensor
from transformers import DynamicCache

from attention_priors import Rotary, Window
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM
from attention_priors.models.repositioning import with_positions

KINDS: dict[str, Any] = {
    "local": {"encoding": "rotary", "prior": {"name": "window", "size": 4}},
    "global": {"logit_scale": "ssmax", "key_bias": "forget_gate", "null_logit": "null_key"},
}
PATTERN = ["local", "local", "global"]


def test_patterns_repeat_over_the_layers() -> None:
    model = tiny_decoder(layer_pattern=PATTERN, layer_kinds=KINDS, num_hidden_layers=5)
    for index, layer in enumerate(model.model.layers):
        attention: Any = layer.self_attn
        parts = [attention.prior, attention.encoding, attention.logit_scale, attention.key_bias, attention.null_logit]
        is_there = [part is not None for part in parts]
        assert is_there == ([False, False, True, True, True] if index == 2 else [True, True, False, False, False])
    assert model.config.layer_types == ["sliding_attention"] * 2 + ["indexed_attention"] + ["sliding_attention"] * 2


def test_kinds_inherit_missing_parts() -> None:
    kinds = {"a": {"prior": None}, "b": {"encoding": {"name": "rotary", "base": 500.0}}}
    model: Any = tiny_decoder(
        prior={"name": "window", "size": 3}, encoding="rotary", layer_pattern=["a", "b"], layer_kinds=kinds
    )
    first, second = (layer.self_attn for layer in model.model.layers)
    assert first.prior is None
    assert isinstance(second.prior, Window)
    assert isinstance(first.encoding, Rotary)
    assert (first.encoding.base, second.encoding.base) == (10000.0, 500.0)


def test_configs_survive_saving(tmp_path: Path) -> None:
    model = tiny_decoder(torch.float32, layer_pattern=PATTERN, layer_kinds=KINDS, num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["layer_pattern"], written["layer_kinds"]) == (PATTERN, KINDS)
    loaded = PriorDecoderForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    ids = tokens(2, 9)
    assert torch.equal(logits_of(loaded.eval(), ids), logits_of(model, ids))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_pattern": ["a"]}, "layer_pattern and layer_kinds must be set together"),
        ({"layer_kinds": {"a": {}}}, "layer_pattern and layer_kinds must be set together"),
        ({"layer_pattern": "a", "layer_kinds": {"a": {}}}, "layer_pattern must be a list"),
        ({"layer_pattern": [], "layer_kinds": {}}, "layer_pattern must be a list"),
        ({"layer_pattern": ["a", "b"], "layer_kinds": {"a": {}}}, "must name exactly the kinds in layer_kinds"),
        ({"layer_pattern": ["a"], "layer_kinds": {"a": {}, "b": {}}}, "must name exactly the kinds in layer_kinds"),
        ({"layer_pattern": ["a"], "layer_kinds": {"a": {"size": 3}}}, r"layer_kinds\['a'\] may describe prior, "),
        ({"layer_pattern": ["a"], "layer_kinds": {"a": "laplace"}}, r"layer_kinds\['a'\] may describe prior, "),
        ({"layer_pattern": ["a"], "layer_kinds": {"a": {"prior": "alibi"}}}, "unknown prior 'alibi'"),
        ({"layer_pattern": ["a"], "layer_kinds": {"a": {"encoding": "sinusoidal"}}}, "is added to the embeddings"),
        (
            {
                "prior": "laplace",
                "share_prior": True,
                "layer_pattern": ["a"],
                "layer_kinds": {"a": {"prior": "laplace"}},
            },
            "share_prior=True, but layer_kinds",
        ),
    ],
)
def test_invalid_kinds_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        PriorDecoderConfig(**changes)


def test_additive_encodings_belong_to_the_whole_model() -> None:
    config = tiny_config(encoding="sinusoidal", layer_pattern=["a"], layer_kinds={"a": {"prior": "laplace"}})
    assert PriorDecoderForCausalLM(config).model.encoding is not None


def test_a_trained_model_generates_beyond_its_window() -> None:
    """Seven tokens later, the model repeats the first token, which only the global layer sees."""
    torch.manual_seed(0)
    kinds: dict[str, Any] = {"local": {"encoding": "rotary", "prior": {"name": "window", "size": 4}}, "global": {}}
    model: Any = PriorDecoderForCausalLM(
        tiny_config(layer_pattern=["local", "global"], layer_kinds=kinds, initializer_range=0.1)
    )
    optimizer, between = torch.optim.AdamW(model.parameters(), 5e-3), torch.arange(1, 7)

    def texts(number: int, periods: int) -> Tensor:
        first = torch.randint(10, VOCABULARY, (number, 1))
        return torch.cat([first, between.expand(number, -1)], 1).repeat(1, periods)

    for _ in range(150):
        text = texts(32, 3)
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()
    whole = texts(8, 4)
    options: dict[str, Any] = {"max_new_tokens": 21, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(whole[:, :7], **options), whole)
    assert torch.equal(model.generate(whole[:, :7], use_cache=False, **options), whole)


def test_caches_keep_no_keys_outside_windows() -> None:
    """A gate sums over all keys and a logit scale counts them, so their layers keep all keys."""
    window = {"name": "window", "size": 4}
    kinds: dict[str, Any] = {
        "window": {"prior": window},
        "larger window": {"prior": {"name": "sum", "priors": ["laplace", {"name": "window", "size": 6}]}},
        "scaled": {"prior": window, "logit_scale": "ssmax"},
        "gated": {"prior": window, "key_bias": "forget_gate"},
        "far": {"prior": "laplace"},
    }
    model = tiny_decoder(layer_pattern=[*kinds], layer_kinds=kinds, num_hidden_layers=5)
    cache = DynamicCache(config=model.config)
    parts = [model(ids, cache=cache, use_cache=True).logits for ids in tokens(2, 20).split([9, 8, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), logits_of(model, tokens(2, 20)))
    layers: list[Any] = cache.layers
    assert [layer.keys.shape[2] for layer in layers] == [5, 5, 20, 20, 20]


def test_keys_that_a_cache_dropped_are_not_missed() -> None:
    """Padding between tokens, which ``position_ids`` skips, brings keys close that the cache has dropped."""
    model = tiny_decoder(prior={"name": "window", "size": 4}, encoding="rotary")
    ids, mask = tokens(1, 9), torch.tensor([[1, 1, 1, 0, 0, 0, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = logits_of(model, ids, attention_mask=mask, position_ids=positions)

    def steps(cache: DynamicCache) -> Tensor:
        said = ({"attention_mask": mask[:, :end], "position_ids": positions[:, :end]} for end in (6, 9))
        parts = zip(ids.split([6, 3], 1), said, strict=True)
        return torch.cat([model(new, cache=cache, use_cache=True, **rest).logits for new, rest in parts], 1)

    assert_close = torch.testing.assert_close
    assert_close(steps(DynamicCache())[mask.bool()], whole[mask.bool()])
    with pytest.raises(ValueError, match="position_ids skips padding between tokens, so a window of 4 positions"):
        steps(DynamicCache(config=model.config))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0) * 2
    whole = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    assert_close(steps(DynamicCache(config=model.config))[mask.bool()], whole[mask.bool()])


def test_positions_may_change_in_one_kind_of_layer() -> None:
    model = tiny_decoder(torch.float32, layer_pattern=PATTERN, layer_kinds=KINDS, num_hidden_layers=3)
    kinds = {**KINDS, "global": {**KINDS["global"], "null_logit": None}}
    changed: Any = with_positions(model, {"layer_kinds": kinds})
    assert all(layer.self_attn.null_logit is None for layer in changed.model.layers)
    kept, now = model.state_dict(), changed.state_dict()
    assert kept.keys() - now.keys() == {"model.layers.2.self_attn.null_logit.logit"}
    assert all(torch.equal(kept[name], now[name]) for name in now)
