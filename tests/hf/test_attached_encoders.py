"""Priors attached to encoders of transformers, against the dense formula under transformers' own masks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from dense_attention import dense_logits
from tiny_models import LLAMA, VOCABULARY, tokens
from torch import Tensor

from attention_priors.hf import attach, attached_priors, detach, load_adapter, load_attached, save_adapter

SIZES: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
ENCODERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "bert": (hf.BertForMaskedLM, hf.BertConfig, SIZES),
    "roberta": (hf.RobertaForMaskedLM, hf.RobertaConfig, SIZES),
    # Its layers alternate between all keys and a window of both sides.
    "modernbert": (hf.ModernBertForMaskedLM, hf.ModernBertConfig, SIZES | {"local_attention": 8}),
}
IDS = tokens(2, 20)
RIGHT = torch.ones(2, 20, dtype=torch.long)
RIGHT[0, 15:] = 0
MASKS = {"whole": None, "right padding": RIGHT, "left padding": RIGHT.flip(1)}
PRIORS: dict[str, Any] = {
    "near": {"name": "generalized_gaussian", "init": "neighbours", "learn": True},
    "two sides": {"name": "relative_buckets", "bidirectional": True},
    "of keys": [{"name": "laplace"}, {"name": "key_sink", "init": "uniform", "learn": ["gain"], "train_length": 16}],
}


def encoder(name: str) -> Any:
    torch.manual_seed(0)
    model, config, arguments = ENCODERS[name]
    return model(config(**arguments)).eval()


def logits(model: Any, mask: Tensor | None, of: Any = None) -> Tensor:
    """Return the logits at tokens that are not padding."""
    with torch.no_grad():
        found = model(IDS, attention_mask=mask).logits if of is None else of(model, input_ids=IDS, attention_mask=mask)
    return found.flatten(0, 1) if mask is None else found[mask.bool()]


def scatter(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in attached_priors(model).values():
            for parameter in part.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ENCODERS)
def test_the_uniform_start_changes_nothing(name: str, mask: str) -> None:
    model = encoder(name)
    before = logits(model, MASKS[mask])
    attach(model, "generalized_gaussian", logit_scale="residual_ssmax")
    assert len(attached_priors(model)) == 2
    torch.testing.assert_close(logits(model, MASKS[mask]), before, rtol=0, atol=1e-5)
    detach(model)
    torch.testing.assert_close(logits(model, MASKS[mask]), before, rtol=0, atol=0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", ENCODERS)
def test_logits_match_the_dense_formula(name: str, prior: str, mask: str) -> None:
    model = encoder(name)
    before = logits(model, MASKS[mask])
    attach(model, PRIORS[prior], logit_scale="residual_ssmax")
    scatter(model)
    found = logits(model, MASKS[mask])
    torch.testing.assert_close(found, logits(model, MASKS[mask], dense_logits), rtol=0, atol=1e-5)
    assert float((found - before).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ENCODERS)
def test_saved_encoders_and_adapters_compute_the_same(name: str, tmp_path: Path) -> None:
    model = attach(encoder(name), PRIORS["near"], logit_scale="residual_ssmax")
    scatter(model)
    expected = logits(model, RIGHT)
    model.save_pretrained(tmp_path / "model")
    save_adapter(model, tmp_path / "adapter")
    for again in (load_attached(tmp_path / "model"), load_adapter(encoder(name), tmp_path / "adapter")):
        torch.testing.assert_close(logits(again.eval(), RIGHT), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ENCODERS)
def test_without_positions_an_encoder_reads_beyond_its_table(name: str) -> None:
    model = encoder(name)
    long = torch.randint(3, VOCABULARY, (1, SIZES["max_position_embeddings"] + 20))
    attach(model, "laplace", drop_positions=True)
    places = {} if name == "modernbert" else {"position_ids": torch.zeros_like(long)}
    kinds = {} if name == "modernbert" else {"token_type_ids": torch.zeros_like(long)}
    with torch.no_grad():
        found = model(long, **places, **kinds).logits
        turned = model(long.flip(1), **places, **kinds).logits
    assert float((turned.flip(1) - found).abs().max()) <= 1e-4  # Laplace's prior sees both sides alike
    with torch.no_grad():
        mixed = model(long[:, torch.randperm(long.shape[1])], **places, **kinds).logits
    assert float((mixed.mean(1) - found.mean(1)).abs().max()) > 1e-4
