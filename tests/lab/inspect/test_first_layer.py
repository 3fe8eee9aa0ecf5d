"""The additive split of a model's first layer, on models with random weights."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    GPT2Config,
    GPTNeoConfig,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
)

from attention_priors.lab.inspect import first_layer_linear_audit, first_layer_logits
from attention_priors.models import PriorDecoderConfig

TEXT = torch.tensor([3, 14, 15, 9, 2, 6, 5, 35, 8, 9])


def made(config: Any) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # In new models, positions and biases are near 0, and normalisations are 1.
            parameter.normal_(1.0 if "ln_" in name or "layer_norm" in name else 0.0, 0.3)
    return model


def ours(encoding: Any, **options: Any) -> Any:
    return made(
        PriorDecoderConfig(vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
                           num_attention_heads=3, encoding=encoding, **options)
    )  # fmt: skip


MODELS = {
    "GPT-2": lambda: made(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=32)),
    "OPT": lambda: made(
        OPTConfig(vocab_size=50, hidden_size=24, ffn_dim=32, num_hidden_layers=2, num_attention_heads=3,
                  max_position_embeddings=32, word_embed_proj_dim=24)
    ),
    **{f"ours, {name}": partial(ours, encoding) for name, encoding in
       (("sinusoidal", "sinusoidal"), ("learned", {"name": "learned", "max_length": 32}), ("linear", "linear"))},
    "ours, SSMax": lambda: ours("sinusoidal", logit_scale="ssmax"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_summands_match_the_attention_of_the_model(name: str) -> None:
    model = MODELS[name]()
    if not name.startswith("ours"):
        model.set_attn_implementation("eager")
    found = first_layer_logits(model, TEXT)
    assert found.total.shape == (3, 10, 10)
    weights = model(TEXT[None], output_attentions=True).attentions[0][0]
    future = torch.ones(10, 10, dtype=torch.bool).triu(1)
    # OPT's eager attention takes its softmax in float32.
    split = found.total.masked_fill(future, -torch.inf).softmax(-1)
    torch.testing.assert_close(split, weights, rtol=1e-5 if name == "OPT" else 1e-9, atol=1e-12)
    if not name.startswith("ours"):
        assert model.config._attn_implementation == "eager"
    for part in ("content_content", "content_position", "position_content", "position_position", "bias"):
        if part == "bias" and name.startswith("ours"):
            continue  # the model has none
        assert float(getattr(found, part).abs().max()) > 1e-3, part


def test_heads_that_share_keys_are_adjacent() -> None:
    model = made(
        PriorDecoderConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=2, encoding="sinusoidal")
    )  # fmt: skip
    found = first_layer_logits(model, TEXT).total
    weights = model(TEXT[None], output_attentions=True).attentions[0][0]
    future = torch.ones(10, 10, dtype=torch.bool).triu(1)
    torch.testing.assert_close(found.masked_fill(future, -torch.inf).softmax(-1), weights, rtol=1e-9, atol=1e-12)


def test_summands_depend_only_on_the_parts_in_their_names() -> None:
    """Positions that a LayerNorm removes leave zeros in the three positional summands."""
    model: Any = MODELS["GPT-2"]()
    found = first_layer_logits(model, TEXT)
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
    with pytest.raises(ValueError, match="adds no positions"):
        first_layer_logits(model, TEXT)
    with torch.no_grad():
        model.transformer.wpe.weight.fill_(7.0)  # equal for all features, which a LayerNorm removes
    bare = first_layer_logits(model, TEXT)
    for part in ("content_position", "position_content", "position_position"):
        assert float(getattr(bare, part).abs().max()) < 1e-9 < float(getattr(found, part).abs().max())


def test_a_new_gpt_2_attends_by_content() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=32))
    spreads = first_layer_logits(model, TEXT).spreads(torch.ones(10, 10, dtype=torch.bool).tril())
    assert all(x.shape == (3,) for x in spreads.values())
    # Embeddings of tokens and positions have equal initial distributions, and biases are 0.
    assert float((spreads["content_content"] / spreads["position_position"]).log().abs().max()) < 1.5
    assert float(spreads["bias"].max()) < 1e-6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3,
                     num_key_value_heads=3), "adds no positions"),
        (GPTNeoConfig(vocab_size=50, hidden_size=24, num_layers=1, num_heads=3, attention_types=[[["global"], 1]],
                      max_position_embeddings=32), "attention interface"),
        # As in OPT-350m, positions are added to embeddings of another width.
        (OPTConfig(vocab_size=50, hidden_size=24, ffn_dim=32, num_hidden_layers=1, num_attention_heads=3,
                   max_position_embeddings=32, word_embed_proj_dim=12, do_layer_norm_before=False),
         "brings its embeddings from a width of 12 to 24 before its first layer"),
        # Normalisations and factors of embeddings are not positions.
        (BloomConfig(vocab_size=50, hidden_size=24, n_layer=1, n_head=3), "changes its embeddings before"),
        (GraniteConfig(vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3,
                       num_key_value_heads=3, embedding_multiplier=12.0), "changes its embeddings before"),
        (BertConfig(vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3,
                    is_decoder=True), "changes its embeddings before"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused(config: Any, message: str) -> None:
    model = made(config)
    with pytest.raises(ValueError, match=message):
        first_layer_logits(model, TEXT)


def test_equal_tokens_do_not_hide_a_normalisation() -> None:
    model = made(BloomConfig(vocab_size=50, hidden_size=24, n_layer=1, n_head=3))
    with pytest.raises(ValueError, match="changes its embeddings before"):
        first_layer_logits(model, torch.full((6,), 49))


@pytest.mark.parametrize("name", MODELS)
def test_rounding_is_not_an_error(name: str) -> None:
    assert first_layer_logits(MODELS[name]().float(), TEXT).total.shape == (3, 10, 10)


def test_nonlinear_queries_are_refused_and_the_mode_is_kept() -> None:
    model: Any = MODELS["GPT-2"]().train()
    first_layer_logits(model, TEXT)
    assert model.training
    model.transformer.h[0].attn.c_attn.register_forward_hook(lambda module, args, output: output.tanh())
    with pytest.raises(ValueError, match="not a linear function of its embeddings"):
        first_layer_logits(model, TEXT)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_not_mistaken_for_rotary_positions(name: str, dtype: torch.dtype) -> None:
    assert first_layer_logits(MODELS[name]().to(dtype), TEXT).total.isfinite().all()


def test_a_text_is_one_row_of_tokens() -> None:
    with pytest.raises(ValueError, match="text must be the tokens of one text"):
        first_layer_logits(MODELS["GPT-2"](), TEXT[None])


def test_a_text_of_one_token_has_no_split() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        first_layer_logits(MODELS["GPT-2"](), TEXT[:1])


@pytest.mark.parametrize("logit_scale", [None, "ssmax"])
def test_the_audit_and_the_split_have_equal_logits(logit_scale: str | None) -> None:
    model = ours("linear", logit_scale=logit_scale, num_key_value_heads=1)
    audit, split = first_layer_linear_audit(model, TEXT), first_layer_logits(model, TEXT)
    for part in ("content_content", "content_position", "position_content", "position_position"):
        torch.testing.assert_close(getattr(audit.logits, part), getattr(split, part), rtol=1e-6, atol=1e-9)
    assert len(audit.cases) == 3
    # For fractional places, the slope times the difference is still the difference of the logits.
    embedding = model.get_input_embeddings().weight[TEXT]
    places = torch.arange(10.0, dtype=torch.float64).unsqueeze(-1)
    places = (places / ((embedding + places).square().mean(-1, keepdim=True) + 1e-6).sqrt()).squeeze(-1)
    by_position = split.content_position + split.position_position
    expected = audit.slope[..., 9] * (places[9] - places[4])
    torch.testing.assert_close(by_position[:, 9, 9] - by_position[:, 9, 4], expected, rtol=1e-5, atol=1e-8)


def test_audits_cover_visible_keys_only() -> None:
    audit = first_layer_linear_audit(ours("linear"), TEXT)
    assert (audit.drift[:, 0] == 0).all()  # the first query sees only itself


def test_audits_work_with_a_logit_scale_of_0() -> None:
    """A head with scale 0 has zeros. The other heads are unchanged."""
    model = ours("linear", logit_scale="ssmax")
    plain = first_layer_linear_audit(model, TEXT)
    with torch.no_grad():
        model.model.layers[0].self_attn.logit_scale.s[1] = 0.0
    audit = first_layer_linear_audit(model, TEXT)
    for name in ("query_share", "key_share", "quadratic_share", "slope", "drift"):
        found, expected = getattr(audit, name), getattr(plain, name)
        assert (found[1] == 0).all(), name
        assert torch.equal(found[[0, 2]], expected[[0, 2]]), name
    assert audit.cases[1] == "i"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_audits_in_half_precision_match_within_rounding(dtype: torch.dtype) -> None:
    model = ours("linear", logit_scale="ssmax").to(dtype)
    audit, exact = first_layer_linear_audit(model, TEXT), first_layer_linear_audit(model.double(), TEXT)
    assert audit.cases == exact.cases
    for name in ("query_share", "key_share", "quadratic_share", "slope"):
        found, expected = getattr(audit, name), getattr(exact, name)
        assert found.dtype == torch.float32
        assert float((found - expected).abs().max()) < 16 * torch.finfo(dtype).eps * float(expected.abs().max()), name


def test_heads_that_are_blind_to_ones_are_case_i() -> None:
    model = ours("linear")
    attention = model.model.layers[0].self_attn
    norm = model.model.layers[0].input_layernorm.weight
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            # The norm multiplies the vector of ones by its weight. The projections remove that vector.
            projection.weight -= torch.outer(projection.weight @ norm, norm) / norm.square().sum()
    assert first_layer_linear_audit(model, TEXT).cases == ["i"] * 3


def test_audits_need_the_linear_toy() -> None:
    with pytest.raises(ValueError, match="does not add each token's position, as a number"):
        first_layer_linear_audit(ours("sinusoidal"), TEXT)
