"""The attention that models of all kinds give to a requested pass key."""

import json
from pathlib import Path
from typing import Any

import model_folders
import pytest
import torch
from torch import Tensor

from attention_priors.attention.reference import reference
from attention_priors.hf.observe import LayerAttention, observed_attention
from attention_priors.lab.evaluate import evaluate
from attention_priors.lab.tasks import EvaluationPlan, Subject
from attention_priors.lab.tasks.passkey import needle_weights
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM

PROMPT = torch.randint(0, model_folders.VOCABULARY, (90,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def at_once(model: Any, needle: tuple[int, int]) -> list[Tensor]:
    """Compute the weights from one pass over the whole prompt."""
    found: list[Tensor] = []

    def see(layer: LayerAttention) -> None:
        found.append(reference(layer.problem)[2][0, :, -1, needle[0] : needle[1]].sum(-1))

    with observed_attention(model, see):
        model(PROMPT[None])
    return found


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("kind", model_folders.KINDS)
def test_weights_match_one_pass_over_the_prompt(kind: str, chunk: int) -> None:
    model = model_folders.model(kind)
    for needle in ((20, 31), (0, 90)):
        found = torch.tensor(needle_weights(model, PROMPT, needle, chunk=chunk))
        assert found.shape == (2, 4)
        torch.testing.assert_close(found, torch.stack(at_once(model, needle)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, torch.ones(2, 4), rtol=0, atol=1e-5)  # all keys together


@pytest.mark.parametrize("needle", [(20, 31), (74, 80), (60, 90)])
def test_keys_outside_the_window_have_weight_0(needle: tuple[int, int]) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = PriorDecoderForCausalLM(
        PriorDecoderConfig(
            vocab_size=model_folders.VOCABULARY,
            num_attention_heads=4,
            initializer_range=0.3,
            prior=[{"name": "laplace"}, {"name": "window", "size": 16}],
            **sizes,
        )
    ).eval()
    found = torch.tensor(needle_weights(model, PROMPT, needle, chunk=8))
    torch.testing.assert_close(found, torch.stack(at_once(model, needle)), rtol=1e-4, atol=1e-5)
    assert (found == 0).all() == (needle == (20, 31))


def test_interrupted_tasks_resume(folders: dict[str, Path], tmp_path: Path) -> None:
    subject = Subject.load(folders["ours"])

    def asked(**changes: Any) -> EvaluationPlan:
        settings = {"tasks": ["passkey_weight"], "lengths": (120, 200), "depths": 3, "corpus": str(folders["texts"])}
        return EvaluationPlan.model_validate(settings | changes)

    evaluate(subject, asked(lengths=(120,), depths=3), tmp_path)
    begun = (tmp_path / "results.jsonl").read_text()
    summary = evaluate(subject, asked(), tmp_path)
    lines = (tmp_path / "results.jsonl").read_text()
    assert lines.startswith(begun)
    assert len(lines.splitlines()) == 1 + 6
    for one in summary.rows:
        mine = [json.loads(line) for line in lines.splitlines()[1:]]
        values = [line["weights"][one["layer"]][one["head"]] for line in mine if line["length"] == one["length"]]
        assert one["texts"] == len(values) == 3
        assert one["weight"] == pytest.approx(sum(values) / 3)
        assert one["low"] <= one["weight"] <= one["high"]
    assert evaluate(subject, asked(), tmp_path) == summary
    assert (tmp_path / "results.jsonl").read_text() == lines
