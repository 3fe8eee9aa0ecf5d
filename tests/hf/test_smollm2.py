"""SmolLM2-135M-Instruct with attached priors: unchanged at first, exact afterwards, and at home in every tool."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import dense_logits
from peft import LoraConfig, PeftModel, get_peft_model
from published import TEXTS, save_smollm2
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from attention_priors.hf import (
    attach,
    attached_priors,
    detach,
    export_program,
    load_adapter,
    load_attached,
    load_model,
    save_adapter,
    train_attached,
)
from attention_priors.lab.cli import app

pytestmark = pytest.mark.checkpoint

ROUNDING = 1e-4
"""Largest difference of two logits of one token, computed in another order; the largest logit is 39."""
ATTACHED: dict[str, Any] = {"prior": "generalized_gaussian", "logit_scale": "residual_ssmax"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("smollm2")
    save_smollm2(found)
    return found


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]


def logits(model: Any, texts: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(text).logits for text in texts]


def moved(model: Any) -> Any:
    """Move every attached parameter, differently in each layer and head."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part in attached_priors(model).values():
            for parameter in part.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)


def test_attached_priors_change_nothing_at_first(model: Any, texts: list[Tensor]) -> None:
    before = logits(model, texts)
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    written = [model.generate(text, attention_mask=torch.ones_like(text), **settings) for text in texts]
    attach(model, **ATTACHED)
    assert len(attached_priors(model)) == 30
    assert_close(logits(model, texts), before)
    for text, expected in zip(texts, written, strict=True):
        assert model.generate(text, attention_mask=torch.ones_like(text), **settings).equal(expected)
    detach(model)
    assert_close(logits(model, texts), before)


def test_moved_priors_match_the_dense_formula(model: Any, texts: list[Tensor]) -> None:
    before = logits(model, texts)
    found = logits(moved(attach(model, **ATTACHED)), texts)
    assert_close(found, [dense_logits(model, input_ids=text) for text in texts])
    assert min(float((one - other).abs().max()) for one, other in zip(found, before, strict=True)) > 1


def test_a_cache_changes_nothing(model: Any, texts: list[Tensor]) -> None:
    moved(attach(model, **ATTACHED))
    whole, parts, cache = logits(model, texts[:1])[0], [], None
    with torch.no_grad():
        for part in texts[0].split(7, dim=1):
            out = model(part, cache=cache, use_cache=True)
            parts.append(out.logits)
            cache = out.cache
    assert_close([torch.cat(parts, dim=1)], [whole])


def test_without_positions_long_texts_are_read(model: Any) -> None:
    attach(model, "laplace", drop_positions=True)
    with torch.no_grad():
        found = model(torch.arange(3, 3 + 300).view(1, -1), logits_to_keep=1).logits
    assert bool(found.isfinite().all())


def test_lora_and_priors_train_and_load_together(folder: Path, model: Any, texts: list[Tensor], tmp_path: Path) -> None:
    trained: Any = get_peft_model(attach(model, **ATTACHED), LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    priors = train_attached(trained)
    others = [p for p in trained.parameters() if p.requires_grad and not any(p is prior for prior in priors)]
    optimizer = torch.optim.AdamW([{"params": others, "lr": 1e-3}, {"params": priors, "lr": 1e-2, "weight_decay": 0}])
    losses = []
    for _ in range(4):
        loss = trained(texts[0], labels=texts[0]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    save_adapter(trained, tmp_path)
    trained.save_pretrained(tmp_path)
    expected = logits(trained.eval(), texts)
    apart = load_adapter(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    assert_close(logits(PeftModel.from_pretrained(apart, str(tmp_path)).eval(), texts), expected)
    assert_close(logits(load_model(tmp_path).eval(), texts), expected)


def test_saved_models_load(model: Any, texts: list[Tensor], tmp_path: Path) -> None:
    moved(attach(model, **ATTACHED)).save_pretrained(tmp_path)
    assert_close(logits(load_attached(tmp_path).eval(), texts), logits(model, texts))


def test_evaluate_finds_pass_keys(folder: Path, tmp_path: Path) -> None:
    given = ["--task", "passkey", "--lengths", "512,1k", "--depths", "3", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, ["evaluate", str(folder), *given])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert [(row["length"], row["mean"]) for row in rows] == [(512, 1.0), (1024, 1.0)]


def test_inspect_explains_its_heads(folder: Path, tmp_path: Path) -> None:
    moved(attach(load_model(folder), **ATTACHED)).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "model")
    given = ["inspect", str(tmp_path / "model"), "--tokens", "64", "--output", str(tmp_path / "page")]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "page" / "inspection.json").read_text())
    assert [layer["heads"] for layer in content["layers"]] == [9] * 30
    assert len(content["priors"]) == 30 * 9


def test_lm_eval_scores_as_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wrapper: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    instance: Any = importlib.import_module("lm_eval.api.instance").Instance
    asked = [("The capital of France is", " Paris"), ("The capital of France is", " Berlin"), ("2 + 2 =", " 4")]
    requests = [instance("loglikelihood", {}, pair, index) for index, pair in enumerate(asked)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for prior in (None, ATTACHED):
        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        if prior is not None:
            attach(model, **prior)
        scores.append([score for score, _ in wrapper(pretrained=model, tokenizer=tokenizer).loglikelihood(requests)])
    assert scores[1] == pytest.approx(scores[0], abs=ROUNDING)
    assert scores[0][0] > scores[0][1]


def test_exported_programs_compute_the_same(model: Any, tmp_path: Path) -> None:
    """export_program compares the program's logits with the model's and raises an error if they differ."""
    export_program(moved(attach(model, **ATTACHED)), tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").stat().st_size > 5e8
