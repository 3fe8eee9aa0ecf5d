"""Format numbers of configs and adapters: files of another format are refused, with the number."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny

from attention_priors.config import FORMAT
from attention_priors.hf import attach, load_adapter, load_attached, save_adapter
from attention_priors.hf.adapter import DESCRIPTION
from attention_priors.models import (
    PriorDecoderConfig,
    PriorDecoderForCausalLM,
    PriorEncoderConfig,
    PriorVisionConfig,
)

CURE = rf"format {FORMAT + 1}; this version .* reads format {FORMAT}; .* pip install --upgrade attention-priors"
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


def attached() -> Any:
    return attach(tiny("llama"), {"name": "generalized_gaussian", "init": "spread"})


def test_saved_configs_have_the_number(tmp_path: Path) -> None:
    PriorDecoderForCausalLM(PriorDecoderConfig(**SIZES, prior="laplace")).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention_priors_format"] == FORMAT


@pytest.mark.parametrize("kind", [PriorDecoderConfig, PriorEncoderConfig, PriorVisionConfig])
def test_newer_configs_are_refused(kind: Any, tmp_path: Path) -> None:
    kind().save_pretrained(tmp_path)
    changed(tmp_path / "config.json", lambda content: content.update(attention_priors_format=FORMAT + 1))
    with pytest.raises(ValueError, match=f"the model's config has {CURE}"):
        kind.from_pretrained(tmp_path)


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


@pytest.mark.parametrize("number", [None, str(FORMAT), FORMAT - 1, True])
def test_other_values_are_refused_without_that_cure(number: Any, tmp_path: Path) -> None:
    model = attached()
    save_adapter(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "model")
    changed(tmp_path / "adapter" / DESCRIPTION, lambda content: content.update(format=number))
    changed(tmp_path / "model" / "config.json", lambda content: content["attached_priors"].update(format=number))
    refused = rf"has format {number!r}; this version .* reads format {FORMAT}$"
    with pytest.raises(ValueError, match=refused):
        load_adapter(tiny("llama"), tmp_path / "adapter")
    with pytest.raises(ValueError, match=refused):
        load_attached(tmp_path / "model")


def test_older_configs_are_refused(tmp_path: Path) -> None:
    PriorDecoderConfig(**SIZES).save_pretrained(tmp_path)
    changed(tmp_path / "config.json", lambda content: content.update(attention_priors_format=FORMAT - 1))
    with pytest.raises(ValueError, match=rf"config has format {FORMAT - 1}; this version .* reads format {FORMAT}$"):
        PriorDecoderConfig.from_pretrained(tmp_path)
