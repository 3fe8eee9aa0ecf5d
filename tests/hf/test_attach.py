"""Priors attached to models of transformers: at the uniform start, away from it, with caches, padding and packing."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import dense_logits
from tiny_models import FAMILIES, HEADS, LAYERS, LLAMA, WINDOW, WITH_SINKS, YARN, tiny, tokens
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    StaticCache,
)

from attention_priors import Laplace, attend
from attention_priors.attention import tables
from attention_priors.hf import attach, attached_priors, detach, load_model
from attention_priors.hf.heads import OnHeads
from attention_priors.hf.loading import check_positions, note_length
from attention_priors.models import pretrained
from attention_priors.priors import CATALOGUE
from thoroughness import each_once

UNIFORM: dict[str, Any] = {"prior": "generalized_gaussian", "logit_scale": "residual_ssmax"}
STATIONARY: dict[str, Any] = {
    "prior": {"name": "generalized_gaussian", "init": "spread", "learn": True},
    "logit_scale": "residual_ssmax",
}
ABSOLUTE: dict[str, Any] = {
    "prior": [{"name": "laplace"}, {"name": "key_sink", "train_length": 16}],
    "logit_scale": {"name": "residual_ssmax", "train_length": 3, "include_prior": False},
}
IDS = tokens(2, 20)
PADDED = torch.ones(2, 20, dtype=torch.long).index_fill(1, torch.arange(5), 0)
PADDED[1] = 1
PACKED = torch.tensor([[*range(9), *range(11)]] * 2)


def scatter(model: Any) -> Any:
    """Move every attached parameter to a random value, different in each layer."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in attached_priors(model).values():
            for name, parameter in part.named_parameters():
                if not name.endswith("log_slope"):
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def everything(model: Any) -> dict[str, Tensor]:
    """Return the logits of every use of a model, at tokens that are not padding."""
    seen = {
        "plain": model(IDS).logits,
        "without cache": model(IDS, use_cache=False).logits,
        "padded": model(IDS, attention_mask=PADDED).logits[PADDED.bool()],
        "in chunks": in_chunks(model, DynamicCache(config=model.config), PADDED)[PADDED.bool()],
        "static cache": in_chunks(model, StaticCache(config=model.config, max_cache_len=30), None).flatten(0, 1),
    }
    if model.config.model_type != "opt":
        seen["packed"] = model(IDS, position_ids=PACKED, use_cache=False).logits
    return seen


@torch.no_grad()
def in_chunks(model: Any, cache: Any, mask: Tensor | None, ends: tuple[int, ...] = (7, 8, 15, 16, 20)):
    """Feed a text as prefill, decoding, prefill, decoding, prefill."""
    found, start = [], 0
    for end in ends:
        seen = None if mask is None else mask[:, :end]
        found.append(model(IDS[:, start:end], attention_mask=seen, cache=cache, use_cache=True).logits)
        start = end
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_uniform_start_changes_nothing(family: str) -> None:
    model = tiny(family)
    before = everything(model)
    # Beside a sink, constants matter. The Generalized Gaussian's uniform start is -1.
    options: dict[str, Any] = UNIFORM | ({"prior": "relative_buckets"} if family in WITH_SINKS else {})
    attach(model, **options)
    assert len(attached_priors(model)) == LAYERS
    after = everything(model)
    for name, logits in before.items():
        assert float((after[name] - logits).abs().max()) <= 1e-5, name


@pytest.mark.parametrize(("family", "layer"), each_once(WITH_SINKS, range(LAYERS)))
def test_sinks_stay_in_layers_without_a_prior(family: str, layer: int) -> None:
    model = tiny(family)
    before = everything(model)
    attach(model, "uniform", layers=[layer])
    for name, logits in everything(model).items():
        assert float((before[name] - logits).abs().max()) <= 1e-5, name


def test_a_constant_beside_sinks_raises_a_warning() -> None:
    """The Generalized Gaussian's uniform start is -1 nat everywhere."""
    with pytest.warns(UserWarning, match="layer 0 has sinks beside its keys, and the prior's maximum is -1 nats"):
        attach(tiny("gpt_oss"), "generalized_gaussian")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(tiny("gpt_oss"), "laplace")
        attach(tiny("llama"), "generalized_gaussian")


@pytest.mark.parametrize(("family", "layers"), each_once(WITH_SINKS, [None, [0], [1]]))
def test_sinks_get_their_gradients(family: str, layers: list[int] | None) -> None:
    """Sinks train as in the original model."""
    grads = []
    for attached in (False, True):
        model = tiny(family)
        if attached:
            attach(model, "uniform", layers=layers)
        model(IDS, labels=IDS).loss.backward()
        sinks = {name: x.grad for name, x in model.named_parameters() if name.endswith("sinks")}
        assert len(sinks) == (1 if family == "mimo_v2_flash" else LAYERS)
        grads.append(sinks)
    for name, grad in grads[0].items():
        assert grad is not None
        assert float(grad.abs().min()) > 0
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_detach_restores_the_original_model(family: str) -> None:
    model = tiny(family)
    before, state, config = everything(model), copy.deepcopy(model.state_dict()), model.config.to_dict()
    implementation = model.config._attn_implementation
    learned = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    attach(model, **STATIONARY, drop_positions=True, freeze_model=True)
    assert not torch.equal(model(IDS).logits, before["plain"])
    detach(model)
    for name, logits in everything(model).items():
        assert torch.equal(logits, before[name]), name
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == implementation
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == learned


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_one_config_are_independent(family: str) -> None:
    one = tiny(family)
    other = type(one)(one.config).eval()
    assert other.config is one.config
    before, implementation = other.config.to_dict(), other.config._attn_implementation
    attach(one, **STATIONARY)
    assert other.config.to_dict() == before
    assert other.config._attn_implementation == implementation
    assert all(getattr(module, "config", None) is not other.config for module in one.modules())
    attach(other, "laplace")
    assert one.config.attached_priors["prior"] == STATIONARY["prior"]
    for model in (one, other):
        detach(model)
        assert model.config.to_dict() == before
        assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(("family", "what"), each_once(FAMILIES, ["stationary", "absolute"]))
def test_logits_match_the_dense_formula(family: str, what: str) -> None:
    """Uses transformers' own mask matrices: causal, padded, windows, packed."""
    model = scatter(attach(tiny(family), **(STATIONARY if what == "stationary" else ABSOLUTE)))
    cases: dict[str, dict[str, Any]] = {"plain": {}, "padded": {"attention_mask": PADDED}}
    if family != "opt" and what == "stationary":
        cases["packed"] = {"position_ids": PACKED}
    for name, options in cases.items():
        expected = dense_logits(model, input_ids=IDS, **options)
        found = model(IDS, use_cache=False, **options).logits
        seen = PADDED.bool() if name == "padded" else torch.ones_like(IDS, dtype=torch.bool)
        assert float((found - expected)[seen].abs().max().detach()) <= 2e-5, name
        unattached = dense_logits(detach(copy.deepcopy(model)), input_ids=IDS, **options)
        assert float((expected - unattached)[seen].abs().max()) > 1e-3, "the prior does nothing"


@pytest.mark.parametrize(("family", "what"), each_once(FAMILIES, ["stationary", "absolute"]))
def test_caches_change_no_logits(family: str, what: str) -> None:
    model = scatter(attach(tiny(family), **(STATIONARY if what == "stationary" else ABSOLUTE)))
    with torch.no_grad():
        for mask in (None, PADDED):
            expected = model(IDS, attention_mask=mask, use_cache=False).logits
            caches: dict[str, Any] = {"dynamic": DynamicCache(config=model.config), "plain dynamic": DynamicCache()}
            if mask is None:
                caches["static"] = StaticCache(config=model.config, max_cache_len=32)
            for name, cache in caches.items():
                found = in_chunks(model, cache, mask)
                seen = PADDED.bool() if mask is not None else torch.ones_like(IDS, dtype=torch.bool)
                assert float((found - expected)[seen].abs().max()) <= 2e-5, (name, mask is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_no_generated_token(family: str) -> None:
    model = scatter(attach(tiny(family), **ABSOLUTE))
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    together = model.generate(IDS.masked_fill(PADDED == 0, 0), attention_mask=PADDED, **options)
    assert isinstance(together, Tensor)
    for row, pad in ((0, 5), (1, 0)):
        alone = model.generate(IDS[row : row + 1, pad:], attention_mask=PADDED[row : row + 1, pad:], **options)
        assert isinstance(alone, Tensor)
        assert torch.equal(together[row, pad:], alone[0])


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_generation_modes_agree(options: dict[str, Any]) -> None:
    model = scatter(attach(tiny("llama"), **STATIONARY))
    common: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "attention_mask": PADDED}
    found = model.generate(IDS, **common, **options)
    if "num_beams" in options:
        # A beam is at least as likely as the greedy text.
        greedy = model.generate(IDS, **common)
        assert isinstance(greedy, Tensor)
        assert isinstance(found, Tensor)
        assert bool((_log_likelihood(model, found) >= _log_likelihood(model, greedy) - 1e-4).all())
    else:
        assert torch.equal(found, model.generate(IDS, **common))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["stationary", "alibi, prior unscaled"])
def test_generated_tokens_skip_the_general_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"prior": "laplace", "logit_scale": {"name": "residual_ssmax", "include_prior": False}}
    model = scatter(attach(tiny("llama"), **(STATIONARY if name == "stationary" else options)))
    common: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = model.generate(IDS, **common, use_cache=False)
    queries: list[int] = []

    def counted(query: Tensor, *inputs: Any, **options: Any) -> Tensor:
        queries.append(query.shape[2])
        return attend(query, *inputs, **options)

    monkeypatch.setattr(pretrained, "attend", counted)
    found = model.generate(IDS, **common)
    assert torch.equal(found, expected)  # pyright: ignore[reportArgumentType]
    # A layer's first step without gradients caches its table.
    assert queries == [20] * LAYERS


@torch.no_grad()
def _log_likelihood(model: Any, texts: Tensor) -> Tensor:
    mask = torch.cat([PADDED, torch.ones(2, texts.shape[1] - 20, dtype=torch.long)], dim=1)
    logs = model(texts, attention_mask=mask).logits.log_softmax(-1)[:, 19:-1]
    return logs.gather(-1, texts[:, 20:, None]).sum((1, 2))


# ---- training


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_priors_and_training_changes_the_logits(family: str) -> None:
    """At the uniform start, θα has no gradient because its curve is flat. It learns from the second step on."""
    model = attach(tiny(family), **UNIFORM)
    before = model(IDS).logits.detach()
    optimizer = torch.optim.SGD([p for part in attached_priors(model).values() for p in part.parameters()], lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        for part in attached_priors(model).values():
            gradients = {name.split(".")[-1]: p.grad for name, p in part.named_parameters() if p.requires_grad}
            for name in ("theta_beta", "s", *(("theta_alpha",) if step else ())):
                grad = gradients[name]
                assert grad is not None
                assert bool((grad != 0).all()), (step, name)
        optimizer.step()
    assert float((model(IDS).logits - before).abs().max()) > 1e-5


def test_gradient_checkpointing_keeps_gradients() -> None:
    model = scatter(attach(tiny("gemma3"), **STATIONARY)).train()
    found = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if options is not None:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        model.zero_grad()
        model(IDS, attention_mask=PADDED, labels=IDS, use_cache=False).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for other in found[1:]:
        assert len(other) == len(found[0]) > 10
        for a, b in zip(other, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_frozen_models_train_only_their_priors() -> None:
    model = attach(tiny("llama"), **UNIFORM, freeze_model=True).train()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names
    assert all(".attached_prior." in name for name in names)
    model(IDS, labels=IDS).loss.backward()


# ---- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_priors_stay_float32(dtype: torch.dtype) -> None:
    model = attach(tiny("llama").to(dtype), **STATIONARY)
    model.to(dtype)
    for part in attached_priors(model).values():
        assert {parameter.dtype for parameter in part.parameters()} == {torch.float32}
    with torch.no_grad():
        assert model(IDS).logits.dtype == dtype
        exact = attach(tiny("llama"), **STATIONARY)(IDS).logits
        assert float((model(IDS).logits.float() - exact).abs().max()) <= 0.1 * float(exact.abs().max())


def test_mixed_precision_keeps_float32_priors() -> None:
    model = scatter(attach(tiny("llama"), **STATIONARY))
    exact = model(IDS).logits.detach()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(IDS, labels=IDS)
    out.loss.backward()
    assert float((out.logits.float() - exact).abs().max()) <= 0.1 * float(exact.abs().max())
    for part in attached_priors(model).values():
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in part.parameters() if p.requires_grad)


# ---- packing, weights, custom masks


def test_packed_sequences_match_separate_ones() -> None:
    model = scatter(attach(tiny("llama"), **ABSOLUTE))
    with torch.no_grad():
        packed = model(IDS, position_ids=PACKED, use_cache=False).logits
        torch.testing.assert_close(packed[:, :9], model(IDS[:, :9]).logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(packed[:, 9:], model(IDS[:, 9:]).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_packing_with_a_cache_raises_a_warning(family: str) -> None:
    model = attach(tiny(family), **UNIFORM)
    with pytest.warns(UserWarning, match="use_cache=False"):
        model(IDS, position_ids=PACKED, use_cache=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS, position_ids=PACKED, use_cache=False)
        model(IDS, position_ids=torch.arange(20).expand(2, -1), use_cache=True)


def test_opt_refuses_packing() -> None:
    model = attach(tiny("opt"), **UNIFORM)
    with pytest.raises(ValueError, match="OPT does not support packed"):
        model(IDS, position_ids=PACKED, use_cache=False)


@pytest.mark.parametrize("layers", [None, [1]])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_attention_weights_are_returned(family: str, layers: list[int] | None) -> None:
    model = scatter(attach(tiny(family), **STATIONARY, layers=layers))
    with torch.no_grad():
        out = model(IDS, attention_mask=PADDED, output_attentions=True)
        torch.testing.assert_close(out.logits, model(IDS, attention_mask=PADDED).logits, rtol=0, atol=1e-5)
    assert len(out.attentions) == LAYERS
    for weights in out.attentions:
        assert weights.shape == (2, HEADS, 20, 20)
        torch.testing.assert_close(weights[1].sum(-1), torch.ones(HEADS, 20))
        assert float(weights[1].triu(1).abs().max()) == 0
        assert float(weights[0, :, 5:, :5].abs().max()) == 0
        if family == "mistral":
            assert float(weights[1].tril(-WINDOW).abs().max()) == 0


def test_custom_masks_match_the_dense_formula() -> None:
    """A mask ``(B, 1, Lq, Lk)`` as in transformers: boolean, True = visible, or additive."""
    model = scatter(attach(tiny("llama"), **STATIONARY))
    visible = torch.ones(20, 20, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    visible[:, :, 12:, 3:7] = False
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.no_grad():
        found = model(IDS, attention_mask=visible, use_cache=False).logits
        expected = dense_logits(model, input_ids=IDS, attention_mask=visible)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        same = model(IDS, attention_mask=added, use_cache=False).logits
        torch.testing.assert_close(same, found, rtol=0, atol=2e-5)
        dynamic = DynamicCache(config=model.config)
        model(IDS[:, :12], attention_mask=visible[:, :, :12, :12], cache=dynamic)
        rest = model(IDS[:, 12:], attention_mask=visible[:, :, 12:], cache=dynamic).logits
        torch.testing.assert_close(rest, found[:, 12:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@torch.no_grad()
def test_masks_without_query_positions_are_refused(dtype: torch.dtype) -> None:
    model = scatter(attach(tiny("llama"), **STATIONARY))
    visible = torch.ones(20, 32, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask = visible if dtype == torch.bool else torch.zeros(visible.shape).masked_fill(~visible, -3.4e38)
    static = StaticCache(config=model.config, max_cache_len=32)
    model(IDS[:, :12], cache=static)
    with pytest.raises(ValueError, match="hides the last of 32 keys from all queries"):
        model(IDS[:, 12:], attention_mask=mask[:, :, 12:], cache=static)
    sliding = scatter(attach(tiny("mistral"), **STATIONARY))
    cache = DynamicCache(config=sliding.config)
    sliding(IDS[:, :16], cache=cache)
    with pytest.raises(ValueError, match=r"with Lk=6, got \(2, 1, 1, 17\)"):
        sliding(IDS[:, 16:17], attention_mask=mask[:, :, 16:17, :17], cache=cache)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@torch.no_grad()
def test_windows_do_not_count_padding_inside_a_text(family: str) -> None:
    """The result does not depend on whether the cache has dropped keys before the window."""
    model = scatter(attach(tiny(family), **STATIONARY))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, 8:11] = 0
    mask[1, 3:5] = 0
    whole = model(IDS, attention_mask=mask, use_cache=False).logits
    found = in_chunks(model, DynamicCache(config=model.config), mask)
    seen = mask.bool()
    torch.testing.assert_close(found[seen], whole[seen], rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@torch.no_grad()
def test_unattached_layers_see_no_future_in_a_static_cache(family: str) -> None:
    model = tiny(family)
    expected = model(IDS).logits
    attach(model, "uniform", layers=[1])
    cache = StaticCache(config=model.config, max_cache_len=32)
    torch.testing.assert_close(in_chunks(model, cache, None), expected, rtol=0, atol=2e-5)
    cache.reset()
    torch.testing.assert_close(model(IDS, cache=cache).logits, expected, rtol=0, atol=2e-5)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    plain = tiny(family).generate(IDS, **options)
    found = model.generate(IDS, **options, cache_implementation="static", prefill_chunk_size=4)
    assert torch.equal(found, plain)  # pyright: ignore[reportArgumentType]


# ---- selected layers and heads


def test_selected_layers_match_the_dense_formula() -> None:
    model = scatter(attach(tiny("llama"), **STATIONARY, layers=[-1]))
    assert list(attached_priors(model)) == [LAYERS - 1]
    torch.testing.assert_close(model(IDS).logits, dense_logits(model, input_ids=IDS), rtol=0, atol=2e-5)


def test_layer_kinds_may_have_different_parts() -> None:
    """Each layer has the parts of its kind and the common parts. A kind without parts leaves its layers unchanged."""
    kinds = {"own": {"prior": {"name": "window", "size": 4}}, "plain": {"logit_scale": None}}
    model = scatter(
        attach(tiny("llama"), logit_scale="residual_ssmax", layer_pattern=["plain", "own"], layer_kinds=kinds)
    )
    assert list(attached_priors(model)) == [1]
    part = attached_priors(model)[1]
    assert part.prior is not None
    assert part.prior.name == "window"
    assert part.logit_scale is not None
    torch.testing.assert_close(model(IDS).logits, dense_logits(model, input_ids=IDS), rtol=0, atol=2e-5)
    alone = scatter(attach(tiny("llama"), kinds["own"]["prior"], logit_scale="residual_ssmax", layers=[1]))
    torch.testing.assert_close(model(IDS).logits, alone(IDS).logits, rtol=0, atol=0)


def test_positions_can_be_dropped_in_one_layer_kind() -> None:
    kinds: dict[str, Any] = {"rotary": {}, "set": {"drop_positions": True}}
    model = attach(tiny("llama"), "laplace", layer_pattern=["rotary", "set"], layer_kinds=kinds)
    torch.testing.assert_close(model(IDS).logits, dense_logits(model, input_ids=IDS), rtol=0, atol=2e-5)
    first, everywhere = (attach(tiny("llama"), "laplace", layers=layers, drop_positions=True) for layers in ([0], None))
    for other in (first, everywhere):
        assert float((model(IDS).logits - other(IDS).logits).detach().abs().max()) > 1e-3
    assert float((model(IDS).logits - attach(tiny("llama"), "laplace")(IDS).logits).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("options", [STATIONARY, ABSOLUTE])
def test_selected_heads_match_the_dense_formula(options: dict[str, Any]) -> None:
    model = scatter(attach(tiny("qwen3"), **options, heads=[3, 1]))
    part = attached_priors(model)[0]
    assert part.prior is not None
    bias = part.prior.log_prior(torch.tensor([9]), torch.arange(10))
    assert float(bias[[0, 2]].abs().max()) == 0
    assert float(bias[[1, 3]].abs().amax((1, 2)).min().detach()) > 0
    assert part.logit_scale is not None
    scale = part.logit_scale(torch.full((1, 1, 1), 50))
    assert scale[0, [0, 2], 0].tolist() == [1.0, 1.0]
    torch.testing.assert_close(model(IDS).logits, dense_logits(model, input_ids=IDS), rtol=0, atol=2e-5)
    model(IDS, labels=IDS).loss.backward()


def test_selected_heads_may_have_a_network_of_a_scaled_distance() -> None:
    model = scatter(attach(tiny("llama"), "fire", heads=[3, 1]))
    torch.testing.assert_close(model(IDS).logits, dense_logits(model, input_ids=IDS), rtol=0, atol=2e-5)


def test_parameters_of_some_heads_are_named_after_their_priors() -> None:
    prior = attached_priors(attach(tiny("qwen3"), **ABSOLUTE, heads=[3, 1]))[0].prior
    assert prior is not None
    found = prior.natural_parameters()
    assert {name.split(".")[0] for name in found} == {"laplace", "key_sink"}
    slopes = found["laplace.slope"].tolist()
    # Parameters belong to the heads with the prior, in the order of the layer. The other heads have none.
    assert [math.isnan(slope) for slope in slopes] == [True, False, True, False]
    assert (slopes[3], slopes[1]) == pytest.approx(Laplace(2).slope.tolist())
    with pytest.raises(TypeError, match="has no description"):
        prior.to_config()


def test_layers_may_share_a_prior() -> None:
    model = attach(tiny("llama"), {"name": "relative_buckets", "num_buckets": 8}, share_prior=True)
    first, second = (part.prior for part in attached_priors(model).values())
    assert first is second
    names = [name for name, _ in model.named_parameters() if "attached" in name]
    assert len(names) == 1
    duplicate = copy.deepcopy(model)
    first, second = (part.prior for part in attached_priors(duplicate).values())
    assert first is second
    model(IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize("family", FAMILIES)
def test_dropped_positions_leave_no_unused_parameters(family: str) -> None:
    """DistributedDataParallel waits for every gradient, so learned positions without effect are frozen."""
    model = tiny(family)
    before = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    attach(model, **STATIONARY, drop_positions=True)
    model(IDS, labels=IDS).loss.backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    detach(model)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == before


@pytest.mark.parametrize("family", FAMILIES)
def test_without_positions_a_model_sees_a_set(family: str) -> None:
    """Without a prior, the last token's logits do not depend on the order of the earlier tokens (in one layer)."""
    sizes: dict[str, Any] = {"n_layer" if family == "gpt2" else "num_hidden_layers": 1}
    if family == "mistral":
        sizes["sliding_window"] = None  # a window depends on positions
    if family in ("gemma3", *WITH_SINKS):
        sizes["layer_types"] = ["full_attention"]
    order = torch.cat([torch.arange(18, -1, -1), torch.tensor([19])])
    one_layer = tiny(family, **sizes)
    kept = one_layer(IDS).logits[:, -1] - one_layer(IDS[:, order]).logits[:, -1]
    attach(one_layer, "uniform", drop_positions=True)
    dropped = one_layer(IDS).logits[:, -1] - one_layer(IDS[:, order]).logits[:, -1]
    assert float(dropped.abs().max().detach()) <= 1e-5
    if family != "smollm3":
        assert float(kept.abs().max().detach()) > 1e-4


def test_complex_rotary_positions_are_dropped() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
    experts = {"intermediate_size_mlp": 48, "num_local_experts": 1, "moe_layers": [], "no_rope_layers": [1]}
    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, **heads, **experts, pad_token_id=0)).eval()
    order = torch.cat([torch.arange(18, -1, -1), torch.tensor([19])])
    kept = model(IDS).logits[:, -1] - model(IDS[:, order]).logits[:, -1]
    attach(model, "uniform", drop_positions=True)
    dropped = model(IDS).logits[:, -1] - model(IDS[:, order]).logits[:, -1]
    assert float(dropped.abs().max().detach()) <= 1e-5
    assert float(kept.abs().max().detach()) > 1e-4


def test_rotary_positions_of_unknown_form_are_refused() -> None:
    model = attach(tiny("llama"), "laplace", drop_positions=True)
    with pytest.raises(ValueError, match="cosines and sines; LlamaAttention gets a"):
        model.model.layers[0].self_attn(torch.zeros(1, 3, 32), position_embeddings=torch.ones(3, 8))


def test_dropping_positions_of_a_model_without_them_changes_nothing() -> None:
    experts: dict[str, Any] = {
        "shared_intermediate_size": 16,
        "num_local_experts": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "layer_types": ["attention"] * LAYERS,
    }
    config = GraniteMoeHybridConfig(**LLAMA | experts)
    model = GraniteMoeHybridForCausalLM(config).eval()
    assert model.config.position_embedding_type is None
    with torch.no_grad():
        expected = model(IDS).logits
        assert torch.allclose(attach(model, "uniform", drop_positions=True)(IDS).logits, expected, atol=1e-6)


@pytest.mark.parametrize("attached", [STATIONARY, ABSOLUTE], ids=["stationary", "absolute"])
def test_layers_may_borrow_the_keys_of_others(attached: dict[str, Any]) -> None:
    """In Gemma 4, the last layers compute only the last queries, with their rows of the mask."""
    torch.manual_seed(0)
    layers: dict[str, Any] = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
    types: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
    widths: dict[str, Any] = {
        "head_dim": 8,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
    }
    config = Gemma4TextConfig(**LLAMA | layers | types | widths)
    model = scatter(attach(Gemma4ForCausalLM(config).eval(), **attached))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.shape != (1, 1):
                parameter.normal_(std=0.2)
        alone = model(IDS[:1, 5:]).logits
        for keep in (0, 1, 4):
            padded = model(IDS[:1], attention_mask=PADDED[:1], logits_to_keep=keep, use_cache=False).logits
            expected = alone[:, -keep:]
            torch.testing.assert_close(padded[:, -expected.shape[1] :], expected, rtol=0, atol=1e-4)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    plain = model.generate(IDS, attention_mask=PADDED, **options)
    static = model.generate(IDS, attention_mask=PADDED, cache_implementation="static", **options)
    assert torch.equal(plain, static)


def with_a_table_of(family: str, length: int, other: Any = None) -> Any:
    """Return a model with a table of learned positions of a given length, and otherwise the weights of another
    model.
    """
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    model = tiny(family, **{name: length})
    if other is not None:
        same = {key: x for key, x in other.state_dict().items() if "wpe" not in key and "embed_positions" not in key}
        model.load_state_dict(same, strict=False)
    return model


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_without_positions_a_text_may_be_longer_than_the_table(family: str, tmp_path: Path) -> None:
    """Results equal those with a table that is long enough."""
    dropped: dict[str, Any] = STATIONARY | {"drop_positions": True}
    short = with_a_table_of(family, 12)
    long = attach(with_a_table_of(family, 128, short), **dropped)
    with pytest.raises(IndexError):
        short(IDS)
    with pytest.raises(ValueError, match="a table of 12 positions"):
        check_positions(short, 20)
    attach(short, **dropped)
    check_positions(short, 20)
    expected = everything(long)
    assert expected.keys() == everything(short).keys()
    for name, logits in everything(short).items():
        assert torch.equal(logits, expected[name]), name
    for options in ({}, {"attention_mask": PADDED}, {"num_beams": 2}, {"cache_implementation": "static"}):
        told: dict[str, Any] = {"min_new_tokens": 9, "max_new_tokens": 9, "do_sample": False} | options
        assert torch.equal(short.generate(IDS, **told), long.generate(IDS, **told)), options

    # A saved model keeps its table after reading longer texts.
    note_length(short, 20)
    short.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    check_positions(loaded, 20)
    for name, logits in everything(loaded).items():
        assert torch.equal(logits, expected[name]), name
    for model in (short, loaded):
        detach(model)
        with pytest.raises(IndexError):
            model(IDS)
        with pytest.raises(ValueError, match="a table of 12 positions"):
            check_positions(model, 20)


def test_without_positions_a_model_keeps_yarns_attention_factor() -> None:
    """Results equal those with every token at position 0. YaRN's factor multiplies the logits at every position."""
    model = tiny("llama", rope_parameters=YARN)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(1 + 0.1 * math.log(4))
    at_no_place = model(IDS, position_ids=torch.zeros_like(IDS), attention_mask=torch.ones_like(IDS)).logits
    attach(model, "uniform", drop_positions=True)
    assert float((model(IDS).logits - at_no_place).abs().max().detach()) <= 1e-5


@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - {"sum"}))
def test_cached_tables_depend_on_the_selected_heads(name: str) -> None:
    prior = CATALOGUE[name].examples(2)[0]
    state = tables._State.of(OnHeads(3, prior, (0, 2)))
    assert state is not None
    assert state.is_of(OnHeads(3, prior, (0, 2)))
    assert not state.is_of(OnHeads(3, prior, (0, 1)))
