"""Observed calls of attention in layers while models read, and their accounts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoConfig,
    JambaConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from attention_priors.attention import SSMax
from attention_priors.attention.problem import Problem, make_problem
from attention_priors.hf import attach
from attention_priors.lab.inspect import (
    AttentionLogits,
    content_range,
    decompose,
    effective_reach,
    head_accounts,
    observed_attention,
    sink_margin,
    sink_mass_rows,
)
from attention_priors.lab.inspect.posterior import problem_logits
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM
from attention_priors.priors import KeySink, Prior, RelativeBuckets

TEXT = torch.tensor([3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 2, 3, 8])
SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 24, "num_attention_heads": 4}


def made(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def attached() -> Any:
    config = LlamaConfig(**SMALL, intermediate_size=32, num_hidden_layers=3, num_key_value_heads=2)
    return attach(made(config), "generalized_gaussian", logit_scale="ssmax", layers=[1])


MODELS = {
    "ours": lambda: made(PriorDecoderConfig(**SMALL, intermediate_size=32, num_hidden_layers=2, prior="laplace")),
    "GPT-2": lambda: made(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4, n_positions=32)),
    "Llama": lambda: made(LlamaConfig(**SMALL, intermediate_size=32, num_hidden_layers=2, num_key_value_heads=2)),
    "BLOOM": lambda: made(BloomConfig(vocab_size=50, hidden_size=24, n_layer=2, n_head=4)),
    "MPT": lambda: made(MptConfig(vocab_size=50, d_model=24, n_layers=2, n_heads=4)),
    "attached to one layer": attached,
}


def seen(model: Any, **inputs: Any) -> list[Any]:
    layers: list[Any] = []
    with torch.no_grad(), observed_attention(model, layers.append):
        model(**inputs)
    return layers


@pytest.mark.parametrize("name", MODELS)
def test_observed_attention_matches_the_model(name: str) -> None:
    model = MODELS[name]()
    before = model(TEXT[None]).logits
    layers = seen(model, input_ids=TEXT[None])
    torch.testing.assert_close(model(TEXT[None]).logits, before, rtol=0, atol=0)  # and the model is unchanged
    assert [layer.index for layer in layers] == [*range(len(layers))]
    modules = dict(model.named_modules())
    assert all(modules[layer.name] is layer.module for layer in layers)
    assert len({layer.name for layer in layers}) == len(layers) == model.config.num_hidden_layers
    if name in ("BLOOM", "MPT", "GPT-2", "Llama"):
        model.set_attn_implementation("eager")
    weights = model(TEXT[None], output_attentions=True).attentions
    for layer, expected in zip(layers, weights, strict=True):
        found = problem_logits(layer.problem).total.softmax(-1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_t5_has_biases_in_both_stacks_and_none_in_cross_attention() -> None:
    torch.manual_seed(0)
    model: Any = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4)
    ).eval()
    layers = seen(model, input_ids=TEXT[None], decoder_input_ids=TEXT[None, :-1])
    kinds = [(type(layer.problem.prior).__name__, layer.problem.geometry.causal) for layer in layers]
    buckets = "BorrowedBuckets"
    assert kinds == [(buckets, False)] * 2 + [(buckets, True), ("NoneType", False)] * 2
    for layer, stack in ((layers[1], model.encoder), (layers[4], model.decoder)):
        published = stack.block[0].layer[0].SelfAttention.compute_bias(15, 15)[0]
        causal = layer.problem.geometry.causal
        prior = layer.problem.prior
        assert isinstance(prior, RelativeBuckets)
        positions = torch.arange(15)
        found = prior.log_prior(positions, positions)
        past = torch.ones(15, 15, dtype=torch.bool).tril() if causal else torch.ones(15, 15, dtype=torch.bool)
        torch.testing.assert_close(found.masked_fill(~past, 0.0), published.masked_fill(~past, 0.0))


def test_an_error_while_reading_leaves_the_model_unchanged() -> None:
    model = MODELS["Llama"]()

    def fail(layer: Any) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), observed_attention(model, fail):
        model(TEXT[None])
    hooks = [*model._forward_hooks, *model.model.layers[0]._forward_hooks, *model.model.layers[0]._forward_pre_hooks]
    assert not hooks
    assert not hasattr(model.model.layers[0].self_attn, "attached_prior")
    assert seen(model, input_ids=TEXT[None])[0].index == 0


def test_models_without_observable_attention_are_refused_with_the_reason() -> None:
    model = made(
        GPTNeoConfig(
            vocab_size=50, hidden_size=24, num_layers=1, num_heads=4, attention_types=[[["global"], 1]],
            max_position_embeddings=32,
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="attention interface"):
        seen(model, input_ids=TEXT[None])


@pytest.mark.parametrize("name", MODELS)
def test_accounts_are_means_over_the_queries(name: str) -> None:
    for layer in seen(MODELS[name](), input_ids=TEXT[None]):
        logits = problem_logits(layer.problem)
        expected = decompose(AttentionLogits(logits.content.double(), logits.position.double(), logits.visible))
        rows = head_accounts(layer.problem)
        assert [row["head"] for row in rows] == [0, 1, 2, 3]
        positions = torch.arange(len(TEXT))
        away = (positions[:, None] - positions).abs()

        def mean(values: Tensor, head: int) -> float:
            return float(values[0, head, 1:].detach().mean())

        for row in rows:
            head = row["head"]
            assert row["position_share"] == pytest.approx(mean(expected.position_share, head), abs=1e-4)
            assert row["agreement"] == pytest.approx(mean(expected.agreement, head), abs=1e-4)
            assert row["first"] == pytest.approx(mean(expected.posterior[..., 0], head), abs=1e-5)
            scale = layer.problem.row_scale
            temperature = 1.0 if scale is None else mean(scale, head)
            assert row["inverse_temperature"] == pytest.approx(temperature, rel=1e-6)
            assert row["distance"] == pytest.approx(mean((expected.posterior * away).sum(-1), head), rel=1e-4)
            leads = expected.posterior[0, head, 1:].argmax(-1) == 0
            assert row["sink"] == pytest.approx(float(leads.double().mean()))
            assert (row["sink_content"] is None) == (row["sink"] == 0) == (row["sink_position"] is None)
            assert 0 <= row["entropy"] <= math.log(len(TEXT))


def test_accounts_do_not_depend_on_the_block_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention_priors.lab.inspect import inspection as account

    layer = seen(MODELS["ours"](), input_ids=TEXT[None])[0]
    whole = head_accounts(layer.problem)
    monkeypatch.setattr(account, "block_length", lambda size: 3)
    for found, expected in zip(head_accounts(layer.problem), whole, strict=True):
        assert [*found] == [*expected]
        for name, value in expected.items():
            assert found[name] is None if value is None else found[name] == pytest.approx(value, rel=1e-6), name


def test_accounts_include_gates_and_null_keys() -> None:
    config = PriorDecoderConfig(
        **SMALL, intermediate_size=32, num_hidden_layers=1, key_bias="forget_gate", null_logit="null_key"
    )
    model = made(config)
    with torch.no_grad():
        model.model.layers[0].self_attn.null_logit.logit.copy_(torch.tensor([-3.0, 0.0, 1.0, 4.0]))
    (layer,) = seen(model, input_ids=TEXT[None])
    rows = head_accounts(layer.problem)
    with torch.no_grad():
        weights = model(TEXT[None], output_attentions=True).attentions[0][0]
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(TEXT[None]))
        steps = -model.model.layers[0].self_attn.key_bias.log_forget(hidden)[0, 1:].mean(0)
    for row in rows:
        head = row["head"]
        assert row["nothing"] == pytest.approx(float(1 - weights[head, 1:].sum(-1).mean()), abs=1e-5)
        assert row["forgotten"] == pytest.approx(float(steps[head]), rel=1e-5)
    plain = head_accounts(seen(MODELS["ours"](), input_ids=TEXT[None])[0].problem)[0]
    assert (plain["nothing"], plain["forgotten"]) == (0.0, None)


def test_a_text_of_one_token_has_no_account() -> None:
    (layer, _) = seen(MODELS["ours"](), input_ids=TEXT[None, :1])
    with pytest.raises(ValueError, match="no query of the text sees two keys"):
        head_accounts(layer.problem)


def problem(query: Tensor, key: Tensor, prior: Prior | None, **options: Any) -> Problem:
    """Build causal attention with the given options only."""
    names = "logit_scale softmax_scale query_positions key_positions document_ids key_padding_mask attn_mask"
    nothing: dict[str, Any] = dict.fromkeys(names.split())
    nothing |= {"causal": True, "relative": None, "dropout_p": 0.0}
    return make_problem(query, key, key, prior, **nothing | options)


def test_every_number_of_an_account_matches_its_definition() -> None:
    torch.manual_seed(0)
    query, key = 2 * torch.randn(2, 2, 40, 8, dtype=torch.float64), torch.randn(2, 2, 40, 8, dtype=torch.float64)
    sink = KeySink(2, train_length=40)
    with torch.no_grad():
        sink.bump.fill_(2.0)
    places = 3 * torch.arange(40)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[1, :20] = True  # of the second text, which the account skips
    scale = SSMax(2, init=0.4)
    asked = problem(query, key, sink, logit_scale=scale, query_positions=places, key_positions=places,
                       key_padding_mask=padding)  # fmt: skip
    logits = problem_logits(asked)
    parts, margin = decompose(logits), sink_margin(logits, 0)
    rows = head_accounts(asked)
    away = (places[:, None] - places).abs()
    for head, row in enumerate(rows):

        def mean(values: Tensor, head: int = head) -> Any:
            return pytest.approx(float(values[0, head, 1:].detach().double().mean()), rel=1e-9)

        leads = margin.total[0, head, 1:] > 0
        assert 0 < int(leads.sum()) < 39
        p = parts.posterior
        assert row["position_share"] == mean(parts.position_share)
        assert row["agreement"] == mean(parts.agreement)
        assert row["divergence_from_position"] == mean(parts.divergence_from_position)
        assert row["divergence_from_content"] == mean(parts.divergence_from_content)
        assert row["content_range"] == mean(content_range(logits))
        assert row["inverse_temperature"] == mean(logits.inverse_temperature)
        assert row["entropy"] == mean(-torch.special.xlogy(p, p).sum(-1))
        assert row["distance"] == mean((p * away).sum(-1))
        assert row["first"] == mean(p[..., 0])
        assert row["sink"] == pytest.approx(float(leads.double().mean()))
        for name, values in (("sink_content", margin.content), ("sink_position", margin.position)):
            middle = sorted(values[0, head, 1:][leads].tolist())[(int(leads.sum()) - 1) // 2]
            assert row[name] == pytest.approx(middle, rel=1e-9)


def test_heads_that_see_one_key_have_no_account() -> None:
    only_itself = torch.stack([torch.zeros(4, 4), torch.zeros(4, 4).masked_fill(~torch.eye(4).bool(), -torch.inf)])
    query = torch.randn(1, 2, 4, 4)
    with pytest.raises(ValueError, match="no query of the text sees two keys"):
        head_accounts(problem(query, query, None, attn_mask=only_itself[None]))


def test_the_first_key_has_index_0_even_if_it_is_padding() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 2, 6, 4)
    padding = torch.zeros(1, 6, dtype=torch.bool)
    padding[0, 0] = True
    for row in head_accounts(problem(query, query, None, key_padding_mask=padding)):
        assert row["first"] == row["sink"] == 0
        assert row["sink_content"] is row["sink_position"] is None
    # In the second of two documents, queries give the first document's first key nothing.
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    for row in head_accounts(problem(0 * query, query, None, document_ids=documents)):
        assert row["first"] == pytest.approx((1 / 2 + 1 / 3 + 0 + 0) / 4)


def test_a_tie_has_no_sink() -> None:
    (row, _) = head_accounts(problem(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4), None))
    assert row["sink"] == 0
    assert row["sink_content"] is None


def test_sinks_of_other_models_are_observed() -> None:
    model = MODELS["GPT-2"]()
    rows = sink_mass_rows(model, [TEXT], factors=[0.0, 1.0])
    assert len(rows) == 2 * 4 * 2
    uniform = sum(1 / (query + 1) for query in range(1, len(TEXT))) / (len(TEXT) - 1)
    assert all(row["mass"] == pytest.approx(uniform, rel=1e-5) for row in rows if row["factor"] == 0)


def test_sinks_of_hybrid_models_are_observed() -> None:
    config = JambaConfig(
        **SMALL,
        intermediate_size=32,
        num_hidden_layers=8,
        num_key_value_heads=2,
        num_experts=2,
        use_mamba_kernels=False,
    )
    model = made(config)
    rows = sink_mass_rows(model, [TEXT, TEXT.flip(0)], factors=[0.0, 1.0])
    layers = sum(kind == "attention" for kind in config.layers_block_type)
    assert 1 <= layers < 8
    assert [(row["layer"], row["head"], row["factor"]) for row in rows] == [
        (layer, head, factor) for layer in range(layers) for head in range(4) for factor in (0.0, 1.0)
    ]
    uniform = sum(1 / (query + 1) for query in range(1, len(TEXT))) / (len(TEXT) - 1)
    assert all(row["mass"] == pytest.approx(uniform, rel=1e-5) for row in rows if row["factor"] == 0)


def test_our_decoders_are_observed_with_their_scales() -> None:
    torch.manual_seed(0)
    config = PriorDecoderConfig(
        **SMALL, intermediate_size=32, num_hidden_layers=2, prior="generalized_gaussian", logit_scale="ssmax"
    )
    layers = seen(PriorDecoderForCausalLM(config).eval(), input_ids=TEXT[None])
    assert all(layer.problem.row_scale is not None and layer.problem.scales_prior for layer in layers)


def test_the_inverse_temperature_is_the_logit_scale() -> None:
    layer = seen(attached(), input_ids=TEXT[None])[1]
    n = torch.arange(2, len(TEXT) + 1).double()
    for row in head_accounts(layer.problem):
        assert row["inverse_temperature"] == pytest.approx(float(n.log().mean()), rel=1e-6)  # SSMax starts at s = 1
    with pytest.raises(ValueError, match=r"inverse_temperature must .* without its keys, \(3,\), got \(2,\)"):
        AttentionLogits(torch.zeros(3, 4), torch.zeros(4), torch.ones(4, dtype=torch.bool), torch.ones(2))


def test_sliding_windows_bound_the_logit_scale() -> None:
    """Observations give the scale at other lengths as the layer would."""
    config = MistralConfig(**SMALL, intermediate_size=32, num_hidden_layers=1, num_key_value_heads=2, sliding_window=8)
    (layer,) = seen(attach(made(config), "laplace", logit_scale="ssmax"), input_ids=TEXT[None])
    scale = layer.problem.logit_scale
    visible = torch.arange(1, len(TEXT) + 1)
    torch.testing.assert_close(scale(visible[None], torch.float32), layer.problem.row_scale[0])
    assert scale(torch.tensor([[4096]]), torch.float64).flatten().tolist() == pytest.approx([math.log(8)] * 4)
    assert effective_reach(layer.problem.prior, 4096, (0.5,), logit_scale=scale).max() < 8
