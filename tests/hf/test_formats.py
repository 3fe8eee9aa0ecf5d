"""Format numbers of configs and adapters: older files load, and newer ones are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny, tokens

from attention_priors.config import FORMAT
from attention_priors.hf import attach, load_adapter, load_attached, load_model, save_adapter
from attention_priors.hf.adapter import DESCRIPTION
from attention_priors.models import (
    PriorDecoderConfig,
    PriorDecoderForCausalLM,
    PriorEncoderConfig,
    PriorVisionConfig,
)

CURE = rf"format {FORMAT + 1}; this version .* reads formats 1 to {FORMAT}; .* pip install --upgrade attention-priors"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def changed(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens(1, 9)).logits


def attached() -> Any:
    return attach(tiny("llama"), {"name": "generalized_gaussian", "init": "spread"})


@pytest.mark.parametrize("number", [None, 1])
def test_older_configs_load_and_are_saved_anew(number: int | None, tmp_path: Path) -> None:
    model = PriorDecoderForCausalLM(PriorDecoderConfig(**SIZES, prior="laplace"))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention_priors_format"] == FORMAT

    def age(content: dict[str, Any]) -> None:
        del content["attention_priors_format"]
        if number is not None:
            content["attention_priors_format"] = number

    changed(tmp_path / "config.json", age)
    loaded = load_model(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config.attention_priors_format == FORMAT


@pytest.mark.parametrize("kind", [PriorDecoderConfig, PriorEncoderConfig, PriorVisionConfig])
def test_newer_configs_are_refused(kind: Any, tmp_path: Path) -> None:
    kind().save_pretrained(tmp_path)
    changed(tmp_path / "config.json", lambda content: content.update(attention_priors_format=FORMAT + 1))
    with pytest.raises(ValueError, match=f"the model's config has {CURE}"):
        kind.from_pretrained(tmp_path)


def without_what_is_new(description: dict[str, Any]) -> None:
    for name in ("format", "layer_pattern", "layer_kinds"):
        del description[name]


def test_older_adapters_and_attached_models_load(tmp_path: Path) -> None:
    model = attached()
    save_adapter(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "adapter" / DESCRIPTION).read_text())["format"] == FORMAT

    def age(content: dict[str, Any]) -> None:
        content["format"] = 1
        without_what_is_new(content["attached"])

    changed(tmp_path / "adapter" / DESCRIPTION, age)
    changed(tmp_path / "model" / "config.json", lambda content: without_what_is_new(content["attached_priors"]))
    expected = logits(model)
    for loaded in (load_adapter(tiny("llama"), tmp_path / "adapter"), load_attached(tmp_path / "model")):
        assert torch.equal(logits(loaded), expected)
        assert loaded.config.attached_priors == model.config.attached_priors


def test_newer_adapters_and_attached_models_are_refused(tmp_path: Path) -> None:
    model = attached()
    save_adapter(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "model")
    changed(tmp_path / "adapter" / DESCRIPTION, lambda content: content.update(format=FORMAT + 1))
    changed(
        tmp_path / "model" / "config.json", lambda content: content["attached_priors"].update(format=FORMAT + 1, new=1)
    )
    with pytest.raises(ValueError, match=f"{DESCRIPTION} has {CURE}"):
        load_adapter(tiny("llama"), tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"the config of {tmp_path / 'model'} has {CURE}"):
        load_attached(tmp_path / "model")


@pytest.mark.parametrize("number", [None, "2", 0, True])
def test_other_values_are_refused_without_that_cure(number: Any, tmp_path: Path) -> None:
    save_adapter(attached(), tmp_path)
    changed(tmp_path / DESCRIPTION, lambda content: content.update(format=number))
    with pytest.raises(ValueError, match=rf"has format {number!r}; this version .* reads formats 1 to {FORMAT}$"):
        load_adapter(tiny("llama"), tmp_path)
