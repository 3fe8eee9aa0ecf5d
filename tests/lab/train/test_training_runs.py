from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_cases import Rows, tiny_decoder, tiny_settings

from attention_priors.lab.data import collate_rows
from attention_priors.lab.train import PriorTrainer, train, weighted_loss
from attention_priors.models import PriorDecoderForCausalLM


class _StopError(Exception):
    pass


def _stop_at(last: int, seen: list[int]) -> Any:
    def on_step(step: int) -> None:
        seen.append(step)
        if step == last:
            raise _StopError

    return on_step


def _weights(model: PriorDecoderForCausalLM) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    model = tiny_decoder()
    history = train(model, Rows(12), tiny_settings(), tmp_path_factory.mktemp("whole"), seed=5).history
    return _weights(model), history


def test_a_training_changes_the_model_and_reports_every_step(uninterrupted):
    weights, history = uninterrupted
    start = _weights(tiny_decoder())
    # A token that no row holds would still be moved by its own weight decay and as a wrong answer.
    unmoved = [name for name in start if torch.equal(start[name], weights[name])]
    assert unmoved == [name for name in start if "theta_mu" in name]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]
    assert all(entry.keys() == {"step", "loss"} and 0 < entry["loss"] < 20 for entry in history)


# Before the first checkpoint, just after one, and between two.
@pytest.mark.parametrize(("last", "resumed"), [(1, [1, 2]), (3, [3, 4]), (4, [3, 4])])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(tmp_path, uninterrupted, last, resumed):
    before: list[int] = []
    with pytest.raises(_StopError):
        train(tiny_decoder(), Rows(12), tiny_settings(), tmp_path, seed=5, on_step=_stop_at(last, before))
    assert before == list(range(1, last + 1))
    after: list[int] = []
    # Where there is a checkpoint, the weights that are handed in do not matter.
    model = tiny_decoder(seed=0 if last == 1 else 99)
    history = train(model, Rows(12), tiny_settings(), tmp_path, seed=5, on_step=after.append).history
    assert after[:2] == resumed
    assert after[-1] == 6
    assert _largest_difference(_weights(model), uninterrupted[0]) < 1e-6
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]
    assert [entry["loss"] for entry in history] == pytest.approx([x["loss"] for x in uninterrupted[1]])


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path, uninterrupted):
    with pytest.raises(_StopError):
        train(tiny_decoder(), Rows(12), tiny_settings(), tmp_path, seed=5, on_step=_stop_at(4, []))
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink(missing_ok=True)
    (tmp_path / "checkpoint-9").mkdir()
    model = tiny_decoder(seed=99)
    train(model, Rows(12), tiny_settings(), tmp_path, seed=5)
    assert _largest_difference(_weights(model), uninterrupted[0]) < 1e-6


def test_a_training_that_diverges_is_an_error_that_says_so(tmp_path):
    with pytest.raises(FloatingPointError, match=r"(loss became (nan|inf)|weights are not finite .*) at step \d+; no"):
        train(tiny_decoder(), Rows(12), tiny_settings(learning_rate=1e30), tmp_path, seed=5)


def test_a_training_that_was_finished_gives_its_weights_again(tmp_path):
    first, second = tiny_decoder(), tiny_decoder(seed=99)
    history = train(first, Rows(8), tiny_settings(steps=4), tmp_path, seed=5).history
    steps: list[int] = []
    again = train(second, Rows(8), tiny_settings(steps=4), tmp_path, seed=5, on_step=steps.append).history
    assert steps == []
    assert _largest_difference(_weights(first), _weights(second)) == 0
    assert again == history


def test_the_seed_decides_the_order_of_the_rows(tmp_path, uninterrupted):
    model = tiny_decoder()
    train(model, Rows(12), tiny_settings(), tmp_path, seed=6)
    assert _largest_difference(_weights(model), uninterrupted[0]) > 1e-4


def test_the_loss_is_the_weighted_one_with_documents_apart(tmp_path):
    rows = Rows(3)
    batch = collate_rows([rows[index] for index in range(3)])
    model = tiny_decoder()
    with torch.no_grad():
        logits = model(batch["input_ids"], document_ids=batch["document_ids"]).logits
        across = model(batch["input_ids"]).logits
    expected = float(weighted_loss(logits, batch["labels"], batch["loss_weights"]))
    assert abs(expected - float(weighted_loss(across, batch["labels"], batch["loss_weights"]))) > 1e-3
    history = train(model, rows, tiny_settings(steps=1, batch_size=3), tmp_path, seed=0).history
    assert history == [{"step": 1, "loss": pytest.approx(expected, rel=1e-5)}]


def test_the_schedule_keeps_the_groups_ratios_and_ends_at_the_minimum(tmp_path: Path, monkeypatch):
    made: list[torch.optim.Optimizer] = []
    create = PriorTrainer.create_optimizer

    def remember(self: PriorTrainer, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        made.append(create(self, model))
        return made[-1]

    monkeypatch.setattr(PriorTrainer, "create_optimizer", remember)
    rates: list[dict[str, float]] = []
    settings = tiny_settings(
        steps=8,
        checkpoint_steps=100,
        learning_rate=0.01,
        warmup_steps=2,
        minimum_learning_rate_ratio=0.25,
        prior_learning_rate_multiplier=8.0,
        logit_scale_learning_rate_multiplier=0.5,
    )
    train(
        tiny_decoder(),
        Rows(16),
        settings,
        tmp_path,
        seed=0,
        on_step=lambda step: rates.append({group["name"]: group["lr"] for group in made[-1].param_groups}),
    )
    assert len(rates) == 8
    for rate in rates:
        assert rate["vectors"] == rate["matrices"]
        assert rate["prior"] == pytest.approx(8.0 * rate["matrices"])
        assert rate["logit_scale"] == pytest.approx(0.5 * rate["matrices"])
    # These are the rates after each step: half-way up, at the top, then down along the cosine.
    curve = [rate["matrices"] for rate in rates]
    assert curve[:2] == pytest.approx([0.005, 0.01])
    assert curve[4] == pytest.approx(0.01 * (1 + 0.25) / 2)
    assert all(later < earlier for earlier, later in pairwise(curve[1:]))
    assert curve[-1] == pytest.approx(0.0025)
