"""Attached models train as others do: Trainer, PEFT, torch.compile, our optimiser's groups."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import tiny, tokens
from torch import Tensor
from transformers import Trainer, TrainingArguments

from attention_priors.hf import attach, attached_priors, load_adapter, load_attached, save_adapter, train_attached
from attention_priors.lab.train import TrainingSettings, parameter_groups

IDS = tokens(2, 20)
ATTACHED: dict[str, Any] = {
    "prior": {"name": "generalized_gaussian", "init": "spread", "learn": ["alpha", "beta"]},
    "logit_scale": "residual_ssmax",
}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A few random texts."""

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


def test_our_optimisers_groups_know_attached_priors() -> None:
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


def test_lora_beside_priors(tmp_path: Path) -> None:
    """PEFT's matrices and ours learn together, are saved side by side, come back, and can be merged."""
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
    model.save_pretrained(tmp_path)
    save_adapter(model.get_base_model(), tmp_path)

    base = load_adapter(tiny("llama"), tmp_path)
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, expected)
        merged = loaded.merge_and_unload()  # pyright: ignore[reportCallIssue]
        assert len(attached_priors(merged)) == 2
        torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=0, atol=1e-5)
    save_adapter(merged, tmp_path / "again")


def test_lora_of_all_linear_layers() -> None:
    """The MLP of a key sink has such layers too, and is not one to be changed unseen."""
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


def test_compiled() -> None:
    model = attach(tiny("llama"), **ATTACHED)
    with torch.no_grad():
        expected = model(IDS).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(IDS).logits, expected, rtol=0, atol=1e-5)
        mask = torch.ones_like(IDS).index_fill(1, torch.arange(4), 0)
        found = compiled(IDS, attention_mask=mask).logits[:, 4:]
        torch.testing.assert_close(found, model(IDS, attention_mask=mask).logits[:, 4:], rtol=0, atol=1e-5)
