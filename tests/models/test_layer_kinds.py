"""Layers of several kinds: patterns, configs, errors, and generation beyond a window."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import VOCABULARY, logits_of, tiny_config, tiny_decoder, tokens
from torch import Tensor
from transformers import DynamicCache, StaticCache

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


def in_chunks(model: Any, ids: Tensor, sizes: list[int], cache: Any, **whole: Tensor) -> Tensor:
    """Return the logits of a text fed in chunks; 2-D arguments and 4-D masks are cut to the tokens so far."""
    parts, start = [], 0
    for size in sizes:
        stop = start + size
        cut = {n: x[:, :stop] if x.dim() == 2 else x[..., start:stop, :stop] for n, x in whole.items()}
        parts.append(model(ids[:, start:stop], cache=cache, use_cache=True, **cut).logits)
        start = stop
    return torch.cat(parts, 1)


HALVES, BRANCH = (torch.ones(12, 12, dtype=torch.bool).tril() for _ in range(2))
HALVES[6:, :6] = False
BRANCH[10:, 3:10] = False

DROPPED: dict[str, tuple[list[int], bool, dict[str, Tensor]]] = {
    # Sizes of the chunks; whether a query sees a key that a window of 3 slots drops; arguments over all tokens.
    "left padding, positions with gaps": (
        [6, 3, 3],
        False,
        {
            "attention_mask": torch.tensor([[0] * 3 + [1] * 9]),
            "position_ids": torch.tensor([[0, 0, 0, 0, 2, 3, 5, 6, 7, 9, 10, 11]]),
        },
    ),
    "padding that positions skip": (
        [8, 4],
        True,
        {
            "attention_mask": torch.tensor([[1] * 4 + [0] * 5 + [1] * 3]),
            "position_ids": torch.tensor([[0, 1, 2, 3, 3, 3, 3, 3, 3, 4, 5, 6]]),
        },
    ),
    "packed documents": ([7, 1, 4], False, {"document_ids": torch.tensor([[0] * 5 + [1] * 7])}),
    "packed positions": ([7, 1, 4], False, {"position_ids": torch.tensor([[*range(6), *range(6)]])}),
    "interleaved documents": (
        [4, 3, 1, 4],
        True,
        {"document_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 0, 0]])},
    ),
    "positions that fall where a mask divides": (
        [7, 1, 4],
        False,
        {"attention_mask": HALVES[None, None], "position_ids": torch.tensor([[*range(6), *range(6)]])},
    ),
    "a branch of a tree": (
        [9, 3],
        True,
        {"attention_mask": BRANCH[None, None], "position_ids": torch.tensor([[*range(10), 3, 4]])},
    ),
}


@pytest.mark.parametrize("case", DROPPED)
def test_keys_that_a_cache_dropped_are_not_missed(case: str) -> None:
    """Windows count positions within documents, caches count slots."""
    sizes, is_lost, whole = DROPPED[case]
    model = tiny_decoder(prior={"name": "window", "size": 3}, encoding="rotary")
    ids, mask = tokens(1, 12), whole.get("attention_mask", torch.ones(1, 12))
    real = mask.bool() if mask.dim() == 2 else torch.ones(1, 12, dtype=torch.bool)
    expected = logits_of(model, ids, **whole)[real]
    torch.testing.assert_close(in_chunks(model, ids, sizes, DynamicCache(), **whole)[real], expected)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=12)):
        if is_lost:
            with pytest.raises(ValueError, match="the cache of layer 0 has dropped keys that new tokens see"):
                in_chunks(model, ids, sizes, cache, **whole)
        else:
            torch.testing.assert_close(in_chunks(model, ids, sizes, cache, **whole)[real], expected)


def test_caches_of_other_models_are_refused_if_they_lack_keys() -> None:
    other = tiny_config(prior={"name": "window", "size": 3})
    for prior in ("laplace", {"name": "window", "size": 4}):
        with pytest.raises(ValueError, match="or the cache was made for another model"):
            in_chunks(tiny_decoder(prior=prior), tokens(1, 8), [4, 4], DynamicCache(config=other))


def test_masks_may_cover_the_free_slots_of_windows() -> None:
    """With windows in all layers, a static cache does not tell its size."""
    model, ids = tiny_decoder(prior={"name": "window", "size": 3}), tokens(1, 5)
    for mask in (torch.ones(1, 20, dtype=torch.long), torch.ones(5, 20, dtype=torch.bool).tril()[None, None]):
        cache = StaticCache(config=model.config, max_cache_len=20)
        found = model(ids, cache=cache, use_cache=True, attention_mask=mask).logits
        torch.testing.assert_close(found, logits_of(model, ids))


def test_sliding_windows_follow_from_priors() -> None:
    with pytest.raises(ValueError, match="sliding_window=4 cannot be set, because it follows from the priors"):
        tiny_config(sliding_window=4)
    nested = {"name": "sum", "priors": [{"name": "window", "size": 7}, ["laplace", {"name": "window", "size": 5}]]}
    assert tiny_config(prior=nested).sliding_window == 5
    assert tiny_config(prior={"name": "window", "size": 1}).sliding_window == 2
    assert tiny_config(prior="laplace").sliding_window is None


def test_positions_may_change_in_one_kind_of_layer() -> None:
    model = tiny_decoder(torch.float32, layer_pattern=PATTERN, layer_kinds=KINDS, num_hidden_layers=3)
    kinds = {**KINDS, "global": {**KINDS["global"], "null_logit": None}}
    changed: Any = with_positions(model, {"layer_kinds": kinds})
    assert all(layer.self_attn.null_logit is None for layer in changed.model.layers)
    kept, now = model.state_dict(), changed.state_dict()
    assert kept.keys() - now.keys() == {"model.layers.2.self_attn.null_logit.logit"}
    assert all(torch.equal(kept[name], now[name]) for name in now)
