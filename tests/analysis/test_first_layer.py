"""The additive split of a model's first layer, on models with random weights."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoConfig, LlamaConfig, OPTConfig

from attention_priors.analysis import first_layer_logits
from attention_priors.models import PriorDecoderConfig

TEXT = torch.tensor([3, 14, 15, 9, 2, 6, 5, 35, 8, 9])


def made(config: Any) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Fresh models have positions and biases near 0, and normalisations of 1.
            parameter.normal_(1.0 if "ln_" in name or "layer_norm" in name else 0.0, 0.3)
    return model


def ours(encoding: Any) -> Any:
    return made(
        PriorDecoderConfig(vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
                           num_attention_heads=3, encoding=encoding)
    )  # fmt: skip


MODELS = {
    "GPT-2": lambda: made(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=32)),
    "OPT": lambda: made(
        OPTConfig(vocab_size=50, hidden_size=24, ffn_dim=32, num_hidden_layers=2, num_attention_heads=3,
                  max_position_embeddings=32, word_embed_proj_dim=24)
    ),
    **{f"ours, {name}": partial(ours, encoding) for name, encoding in
       (("sinusoidal", "sinusoidal"), ("learned", {"name": "learned", "max_length": 32}), ("linear", "linear"))},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_summands_are_the_attention_of_the_model(name: str) -> None:
    model = MODELS[name]()
    if not name.startswith("ours"):
        model.set_attn_implementation("eager")
    found = first_layer_logits(model, TEXT)
    assert found.total.shape == (3, 10, 10)
    weights = model(TEXT[None], output_attentions=True).attentions[0][0]
    future = torch.ones(10, 10, dtype=torch.bool).triu(1)
    # The eager attention of OPT takes its softmax in float32.
    split = found.total.masked_fill(future, -torch.inf).softmax(-1)
    torch.testing.assert_close(split, weights, rtol=1e-5 if name == "OPT" else 1e-9, atol=1e-12)
    if not name.startswith("ours"):
        assert model.config._attn_implementation == "eager"
    for part in ("content_content", "content_position", "position_content", "position_position", "bias"):
        if part == "bias" and name.startswith("ours"):
            continue  # it has none
        assert float(getattr(found, part).abs().max()) > 1e-3, part


def test_each_summand_depends_on_what_it_is_called_after() -> None:
    """Positions that a LayerNorm takes away leave nothing in the three summands that they have a part in."""
    model: Any = MODELS["GPT-2"]()
    found = first_layer_logits(model, TEXT)
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
    with pytest.raises(ValueError, match="adds no positions"):
        first_layer_logits(model, TEXT)
    with torch.no_grad():
        model.transformer.wpe.weight.fill_(7.0)  # the same for all features: what a LayerNorm takes away
    bare = first_layer_logits(model, TEXT)
    for part in ("content_position", "position_content", "position_position"):
        assert float(getattr(bare, part).abs().max()) < 1e-9 < float(getattr(found, part).abs().max())


def test_gpt_2_as_it_starts_has_little_but_content() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=32))
    spreads = first_layer_logits(model, TEXT).spreads(torch.ones(10, 10, dtype=torch.bool).tril())
    assert all(x.shape == (3,) for x in spreads.values())
    # Embeddings of tokens and of places start alike, and biases at 0.
    assert float((spreads["content_content"] / spreads["position_position"]).log().abs().max()) < 1.5
    assert float(spreads["bias"].max()) < 1e-6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3,
                     num_key_value_heads=3), "adds no positions"),
        (GPTNeoConfig(vocab_size=50, hidden_size=24, num_layers=1, num_heads=3, attention_types=[[["global"], 1]],
                      max_position_embeddings=32), "attention interface"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_split_are_refused(config: Any, message: str) -> None:
    model = made(config)
    with pytest.raises(ValueError, match=message):
        first_layer_logits(model, TEXT)


def test_a_text_is_one_row_of_tokens() -> None:
    with pytest.raises(ValueError, match="text must be the tokens of one text"):
        first_layer_logits(MODELS["GPT-2"](), TEXT[None])
