"""The trainer: its loss, its schedule, and packed rows whose documents do not see each other."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_cases import LLAMA, Rows, furthest, tiny_decoder, tiny_settings, weights_of
from transformers import AutoModelForCausalLM, LlamaConfig

from attention_priors.lab.data.packing import IGNORED_LABEL, collate_rows
from attention_priors.lab.train import Observer
from attention_priors.lab.train.engine import train
from attention_priors.lab.train.trainer import PriorTrainer, check_documents_apart, packed_inputs, weighted_loss


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    model = tiny_decoder()
    history = train(model, Rows(12), tiny_settings(), tmp_path_factory.mktemp("whole"), seed=5).history
    return weights_of(model), history


def test_training_changes_the_model_and_reports_every_step(uninterrupted):
    weights, history = uninterrupted
    start = weights_of(tiny_decoder())
    # Weight decay, and its role as a wrong answer, move the embedding of a token outside of all rows.
    unmoved = [name for name in start if torch.equal(start[name], weights[name])]
    assert unmoved == [name for name in start if "theta_mu" in name]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]
    assert all(entry.keys() == {"step", "loss"} and 0 < entry["loss"] < 20 for entry in history)


def test_diverging_training_is_named(tmp_path):
    with pytest.raises(FloatingPointError, match=r"(loss became (nan|inf)|weights are not finite .*) at step \d+; no"):
        train(tiny_decoder(), Rows(12), tiny_settings(learning_rate=1e30), tmp_path, seed=5)


def test_the_seed_determines_the_order_of_rows(tmp_path, uninterrupted):
    model = tiny_decoder()
    train(model, Rows(12), tiny_settings(), tmp_path, seed=6)
    assert furthest(weights_of(model), uninterrupted[0]) > 1e-4


def test_the_loss_is_weighted_and_separates_documents(tmp_path):
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

    def on_step(step: int) -> None:
        rates.append({group["name"]: group["lr"] for group in made[-1].param_groups})

    train(tiny_decoder(), Rows(16), settings, tmp_path, seed=0, observer=Observer(on_step=on_step))
    assert len(rates) == 8
    for rate in rates:
        assert rate["vectors"] == rate["matrices"]
        assert rate["prior"] == pytest.approx(8.0 * rate["matrices"])
        assert rate["logit_scale"] == pytest.approx(0.5 * rate["matrices"])
    # The rates after each step: half-way up, at the top, then down along the cosine.
    curve = [rate["matrices"] for rate in rates]
    assert curve[:2] == pytest.approx([0.005, 0.01])
    assert curve[4] == pytest.approx(0.01 * (1 + 0.25) / 2)
    assert all(later < earlier for earlier, later in pairwise(curve[1:]))
    assert curve[-1] == pytest.approx(0.0025)


# ---- packed documents


def test_packed_documents_of_hugging_face_models_are_separate():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=20, initializer_range=0.5, **LLAMA)).eval()
    check_documents_apart(model)
    ids = torch.randint(20, (1, 9))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]])
    with torch.no_grad():
        packed = model(**packed_inputs(model, ids, documents)).logits
        apart = torch.cat([model(part).logits for part in ids.split([4, 3, 2], dim=1)], dim=1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-4)


class _Leaky(torch.nn.Module):
    """Model that accepts positions and ignores them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 4)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        hidden = self.embedding(input_ids).cumsum(1)
        return type("Output", (), {"logits": hidden})


def test_models_that_mix_packed_documents_are_refused():
    with pytest.raises(ValueError, match=r"_Leaky .* lets a packed document see the one before it"):
        check_documents_apart(_Leaky())


def test_models_without_position_arguments_are_refused():
    with pytest.raises(ValueError, match="Embedding takes neither document_ids nor position_ids"):
        check_documents_apart(torch.nn.Embedding(20, 4))


# ---- the loss of one batch


def test_the_loss_is_the_weighted_mean_over_the_next_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[1, 4, IGNORED_LABEL, 2], [IGNORED_LABEL, 0, 3, 3]])
    weights = torch.tensor([[7.0, 1.0, 9.0, 10.0], [7.0, 2.0, 0.5, 0.0]])
    total = weight = 0.0
    for row in range(2):
        for place in range(1, 4):
            label = int(labels[row, place])
            if label != IGNORED_LABEL:
                scores = [float(x) for x in logits[row, place - 1]]
                nll = math.log(sum(map(math.exp, scores))) - scores[label]
                total += float(weights[row, place]) * nll
                weight += float(weights[row, place])
    assert float(weighted_loss(logits, labels, weights)) == pytest.approx(total / weight, rel=1e-5)


def test_weights_of_1_give_the_models_own_loss():
    logits = torch.randn(3, 6, 11, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(2))
    labels[:, 2] = IGNORED_LABEL
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(weighted_loss(logits, labels, torch.ones(3, 6)), expected)


def test_ignored_tokens_get_no_gradient():
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(3), requires_grad=True)
    labels = torch.tensor([[1, 2, IGNORED_LABEL, 3]])
    weighted_loss(logits, labels, torch.tensor([[1.0, 1.0, 5.0, 2.0]])).backward()
    assert logits.grad is not None
    moved = logits.grad.abs().sum(-1)[0]
    # Place p predicts the label at p + 1. The last place predicts nothing.
    assert (moved > 0).tolist() == [True, False, True, False]


def test_batches_without_labels_have_no_loss():
    labels = torch.full((1, 4), IGNORED_LABEL)
    assert float(weighted_loss(torch.randn(1, 4, 5), labels, torch.ones(1, 4))) == 0.0


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(1, 50, 40, generator=torch.Generator().manual_seed(4)).bfloat16()
    labels = torch.randint(40, (1, 50), generator=torch.Generator().manual_seed(5))
    weights = torch.rand(1, 50, generator=torch.Generator().manual_seed(6))
    loss = weighted_loss(logits, labels, weights)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, weighted_loss(logits.float(), labels, weights))
