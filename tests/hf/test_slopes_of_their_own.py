"""BLOOM and MPT with trained or chosen slopes: gradients, saving, loading."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alibi_models import TOLERANCE, bloom, difference, logits, mpt, tokens
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BloomForCausalLM,
    BloomModel,
    Trainer,
    TrainingArguments,
)

from attention_priors.hf import restore_attention, use_priors

Make = Callable[..., Any]
both_families = pytest.mark.parametrize("make", [bloom, mpt])


def slopes_of(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "prior" in name}


@both_families
def test_trained_slopes_start_at_the_models_slopes(make: Make) -> None:
    model = make()
    expected = logits(model, tokens())
    use_priors(model, learn=True)
    assert difference(expected, logits(model, tokens())) < TOLERANCE
    model(tokens(), labels=tokens()).loss.backward()
    slopes = slopes_of(model)
    assert len(slopes) == 2
    assert all(bool((parameter.grad != 0).all()) for parameter in slopes.values())


@both_families
def test_models_with_default_slopes_are_saved_as_plain_models(make: Make, tmp_path: Path) -> None:
    model = make()
    expected, kind = logits(model, tokens()), type(model)
    use_priors(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is kind
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [kind.__name__]
    assert torch.equal(logits(loaded, tokens()), expected)


def test_base_models_keep_their_name(tmp_path: Path) -> None:
    use_priors(BloomModel(bloom().config)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BloomModel"]


@both_families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_are_saved_with_the_model(make: Make, dtype: torch.dtype, tmp_path: Path) -> None:
    model = use_priors(make(), learn=True)
    with torch.no_grad():
        for parameter in slopes_of(model).values():
            parameter += 0.3 * torch.randn(4)
    model.to(dtype).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(loaded) is type(model)
    assert all(parameter.requires_grad for parameter in slopes_of(loaded).values())
    for name, parameter in slopes_of(model).items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, slopes_of(loaded)[name])
    assert torch.equal(logits(model, tokens()), logits(loaded, tokens()))


@both_families
def test_chosen_slopes_are_saved_in_the_config(make: Make, tmp_path: Path) -> None:
    model = make()
    keys, expected = list(model.state_dict()), logits(model, tokens())
    use_priors(model, slopes=[0.9, 0.5, 0.2, 0.1])
    assert list(model.state_dict()) == keys
    assert difference(expected, logits(model, tokens())) > 0.01
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(model, tokens()), logits(loaded, tokens()))
    assert type(restore_attention(loaded)).__name__ == type(make()).__name__
    assert loaded.config.model_type == make().config.model_type
    assert torch.equal(logits(loaded, tokens()), expected)


def test_a_training_run_resumes_with_its_slopes(tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 9)]
    options = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.01}
    options |= {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = use_priors(bloom(), learn=True)
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=rows)  # pyright: ignore[reportArgumentType]
        trainer.train(resume_from_checkpoint=resume)
        runs.append(slopes_of(model))
    start = slopes_of(use_priors(bloom(), learn=True))
    for name, slope in runs[0].items():
        assert not torch.equal(slope, start[name])
        assert torch.equal(slope, runs[1][name])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert all(torch.equal(slope, runs[0][name]) for name, slope in slopes_of(saved).items())


@both_families
def test_restoring_drops_learned_slopes(make: Make, tmp_path: Path) -> None:
    model = make()
    kind, expected, config = type(model), logits(model, tokens()), model.config.to_dict()
    use_priors(model, learn=True)
    with torch.no_grad():
        for parameter in slopes_of(model).values():
            parameter += 1
    restore_attention(model)
    assert type(model) is kind
    assert not slopes_of(model)
    assert model.config.to_dict() == config
    assert torch.equal(logits(model, tokens()), expected)
    model.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is kind


def test_other_models_of_the_config_are_unchanged(tmp_path: Path) -> None:
    first = bloom()
    second = BloomForCausalLM(first.config)
    use_priors(first, learn=True)
    assert first.config is first.transformer.config
    assert first.config.model_type == "bloom_with_priors"
    assert second.config.model_type == "bloom"
    second.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "bloom"


def test_models_with_slopes_do_not_load_as_plain_bloom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_priors(bloom(), learn=True).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "bloom_with_priors"
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "bloom_with_priors")  # without an import of this package
    with pytest.raises(ValueError, match="bloom_with_priors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slopes": [1.0, 2.0]}, "slopes must hold num_heads=4 numbers, got 2"),
        ({"slopes": [1.0, 2.0, -1.0, 1.0]}, "slopes must be positive"),
    ],
)
def test_invalid_slopes_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = bloom()
    with pytest.raises(ValueError, match=message):
        use_priors(model, **arguments)
    assert type(model).__name__ == "BloomForCausalLM"
    assert use_priors(model) is model


def test_learned_slopes_need_a_model_that_can_be_saved() -> None:
    with pytest.raises(ValueError, match="need a model that can be saved with them"):
        use_priors(BloomModel(bloom().config), learn=True)
