"""Attached models train like others: Trainer, PEFT, torch.compile, parameter groups of our optimiser."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import tiny, tokens
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from attention_priors.hf import (
    attach,
    attached_priors,
    detach,
    load_adapter,
    load_attached,
    save_adapter,
    train_attached,
)
from attention_priors.lab.train import TrainingSettings, parameter_groups
from attention_priors.priors import Prior, Structure

IDS = tokens(2, 20)
ATTACHED: dict[str, Any] = {
    "prior": {"name": "generalized_gaussian", "init": "spread", "learn": ["alpha", "beta"]},
    "logit_scale": "residual_ssmax",
}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Dataset of a few random texts."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = tokens(1, 12, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def trainer(model: Any, folder: Path, steps: int) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, save_steps=2, learning_rate=0.05, report_to="none",
        disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Rows())


def test_trainer_saves_and_resumes_priors_too(tmp_path: Path) -> None:
    whole = attach(tiny("llama"), **ATTACHED)
    trainer(whole, tmp_path / "whole", 4).train()
    before = {name: p.detach().clone() for name, p in attach(tiny("llama"), **ATTACHED).named_parameters()}
    moved = [
        n for n, p in whole.named_parameters() if "attached" in n and p.requires_grad and not torch.equal(p, before[n])
    ]
    assert len(moved) == 2 * 3

    resumed = attach(tiny("llama", seed=5), **ATTACHED)
    trainer(resumed, tmp_path / "whole", 4).train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    loaded = load_attached(tmp_path / "whole" / "checkpoint-4")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, whole.eval()(IDS).logits)


def test_make_optimizer_groups_attached_priors() -> None:
    model = attach(tiny("llama"), **ATTACHED)
    settings = TrainingSettings(
        context_length=8, steps=1, batch_size=1, learning_rate=1.0, prior_learning_rate_multiplier=15
    )
    groups = {group["name"]: group for group in parameter_groups(model, settings)}
    assert {name: len(group["params"]) for name, group in groups.items()} == {
        "matrices": 16,
        "vectors": 5,
        "prior": 4,
        "logit_scale": 2,
    }
    assert groups["prior"]["lr"] == 15
    assert groups["prior"]["weight_decay"] == 0


def test_lora_trains_beside_priors(tmp_path: Path) -> None:
    """PEFT's matrices and attached priors learn together, are saved side by side, are loaded, and can be merged."""
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    model: Any = get_peft_model(attach(tiny("llama"), **ATTACHED), lora)
    assert not any("attached" in name for name, p in model.named_parameters() if p.requires_grad)
    parameters = train_attached(model)
    assert len(parameters) == 2 * 3
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(learning) == len(parameters) + 2 * 2 * 2
    optimizer = torch.optim.SGD(learning, lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    save_adapter(model, tmp_path)
    model.save_pretrained(tmp_path)

    base = load_adapter(tiny("llama"), tmp_path)
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, expected)
        merged = loaded.merge_and_unload()  # pyright: ignore[reportCallIssue]
        assert len(attached_priors(merged)) == 2
        torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=0, atol=1e-5)
    save_adapter(merged, tmp_path / "again")


class Own(Prior):
    """Prior without ``learn``. Its slope trains, and its power does not."""

    name = "own"
    structure = Structure.STATIONARY

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.slope = nn.Parameter(torch.full((num_heads, 1, 1), 0.1))
        self.power = nn.Parameter(torch.full((num_heads, 1, 1), 0.5), requires_grad=False)


@pytest.mark.filterwarnings("ignore:the prior Own cannot be saved")
def test_custom_priors_resume_training() -> None:
    model = attach(tiny("llama"), Own(4))
    before = [name for name, p in model.named_parameters() if p.requires_grad]
    model.requires_grad_(False)
    assert len(train_attached(model)) == 2
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [x for x in before if "attached" in x]


def warnings_in_training(model: Any) -> list[str]:
    """Return the warnings of attached priors in a forward pass of training."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.train()(input_ids=IDS)
    return [str(warning.message) for warning in caught if "attached priors" in str(warning.message)]


@pytest.mark.parametrize("targets", [["q_proj"], ["up_proj"]])
@pytest.mark.parametrize("attached", [{"prior": "generalized_gaussian"}, {"logit_scale": "residual_ssmax"}])
def test_priors_frozen_by_peft_raise_a_warning(targets: list[str], attached: dict[str, Any]) -> None:
    model: Any = get_peft_model(attach(tiny("llama"), **attached), LoraConfig(target_modules=targets, r=2))
    found = warnings_in_training(model)
    assert "frozen while the model trains" in found[0]
    assert "call train_attached(model) after it, before creating the optimizer" in found[0]
    with torch.no_grad():
        assert not warnings_in_training(model)
    train_attached(model)
    assert not warnings_in_training(model)


@pytest.mark.parametrize("prior", ["laplace", "uniform"])
def test_priors_without_trained_parameters_raise_no_warning(prior: str) -> None:
    assert not warnings_in_training(
        get_peft_model(attach(tiny("llama"), prior), LoraConfig(target_modules=["q_proj"], r=2))
    )


def test_frozen_models_raise_no_warning() -> None:
    model = attach(tiny("llama"), **ATTACHED).requires_grad_(False)
    assert not warnings_in_training(model)


def test_saving_by_peft_alone_raises_a_warning(tmp_path: Path) -> None:
    match = r"PEFT does not save attached priors.* Call save_adapter\(model, folder\) before model\.save_pretrained"
    model: Any = get_peft_model(attach(tiny("llama"), **ATTACHED), LoraConfig(target_modules=["q_proj"], r=2))
    train_attached(model)
    with pytest.warns(UserWarning, match=match):
        model.save_pretrained(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"has no prior_adapter_config\.json, so it is an adapter of PEFT, without attached"
    ):
        load_adapter(tiny("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"holds an adapter \(adapter_config\.json\) without a model; load_model\("):
        load_attached(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        save_adapter(model, tmp_path)
        model.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(load_adapter(tiny("llama"), tmp_path), str(tmp_path))
        loaded.save_pretrained(str(tmp_path / "again"))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)
    warnings_in_training(model)
    with pytest.warns(UserWarning, match=match):
        model.save_pretrained(tmp_path)


def test_attached_modules_in_modules_to_save_are_refused() -> None:
    lora = LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["attached_prior"])
    model: Any = get_peft_model(attach(tiny("llama"), **ATTACHED), lora)
    with pytest.raises(
        RuntimeError, match=r"a ModulesToSaveWrapper in place of .*remove 'attached_prior' from PEFT's modules"
    ):
        model(input_ids=IDS)


def test_attach_works_on_the_base_of_a_peft_model(tmp_path: Path) -> None:
    model: Any = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    for call in (lambda: attach(model, **ATTACHED), lambda: detach(model)):
        with pytest.raises(ValueError, match=r"got PeftModel: pass model\.get_base_model\(\), which"):
            call()
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
    attach(model.get_base_model(), "laplace", logit_scale="residual_ssmax")
    assert not warnings_in_training(model)
    save_adapter(model, tmp_path)
    with torch.no_grad():
        found = model.eval()(input_ids=IDS).logits
        assert not torch.equal(found, plain)
        assert torch.equal(load_adapter(tiny("llama"), tmp_path)(input_ids=IDS).logits, found)  # LoRA starts as zero
        with pytest.raises(ValueError, match="got PeftModel: pass model"):
            detach(model)
        assert torch.equal(model(input_ids=IDS).logits, found)
        detach(model.get_base_model())
        assert torch.equal(model(input_ids=IDS).logits, plain)


class SavePriors(TrainerCallback):
    """Callback of docs/attach.md for Trainer, which saves only PEFT's files."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        save_adapter(kwargs["model"], Path(args.output_dir) / f"checkpoint-{state.global_step}")


@pytest.mark.filterwarnings("ignore:PEFT does not save attached priors")
def test_trainer_with_lora_resumes_priors_that_a_callback_saved(tmp_path: Path) -> None:
    def with_lora(model: Any) -> Any:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
        train_attached(model)
        return model

    whole = with_lora(attach(tiny("llama"), **ATTACHED))
    saving = trainer(whole, tmp_path, 4)
    saving.add_callback(SavePriors())
    saving.train()
    resumed = with_lora(load_adapter(tiny("llama"), tmp_path / "checkpoint-2"))
    trainer(resumed, tmp_path, 4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_all_linear_lora_excludes_attached_modules() -> None:
    """The MLP of a key sink also has linear layers, which LoRA must not change silently."""
    lora: dict[str, Any] = {"target_modules": "all-linear", "r": 2, "task_type": "CAUSAL_LM"}
    prior = {"name": "key_sink", "train_length": 16, "init": {"bump": 2.0}}
    changed: Any = get_peft_model(attach(tiny("llama"), prior), LoraConfig(**lora))
    with pytest.raises(TypeError, match=r"KeySink's mlp has layers of peft\.\S+, expected torch.nn.Linear: .*prior"):
        changed(input_ids=IDS)
    model = attach(tiny("llama"), prior)
    with torch.no_grad():
        expected = model(IDS).logits
        changed = get_peft_model(model, LoraConfig(**lora, exclude_modules=r".*prior.*"))
        assert torch.equal(changed(input_ids=IDS).logits, expected)
    assert sum("lora_A" in name for name, _ in changed.named_parameters()) == 2 * 7


def test_compiled_models_match() -> None:
    model = attach(tiny("llama"), **ATTACHED)
    with torch.no_grad():
        expected = model(IDS).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(IDS).logits, expected, rtol=0, atol=1e-5)
        mask = torch.ones_like(IDS).index_fill(1, torch.arange(4), 0)
        found = compiled(IDS, attention_mask=mask).logits[:, 4:]
        torch.testing.assert_close(found, model(IDS, attention_mask=mask).logits[:, 4:], rtol=0, atol=1e-5)
