"""The copy-mixture task: its rows, and the optimal loss."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_priors.lab.data.packing import IGNORED_LABEL, collate_rows
from attention_priors.lab.tasks import CopyMixture, CopyMixtureRows
from attention_priors.lab.tasks.copying import COPY_KINDS
from thoroughness import every_other_deep, examples


def _samples(task: CopyMixture, length: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = CopyMixtureRows(task, context_length=length, num_rows=count, seed=5)
    samples = [rows.sample(index) for index in range(count)]
    return torch.stack([sample.tokens for sample in samples]), torch.stack([sample.kinds for sample in samples])


@given(length=st.integers(1, 40), lag=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(max_examples=examples(25))
def test_copies_equal_their_source(length, lag, seed):
    task = CopyMixture(vocabulary_size=50, first=0.3, previous=0.4, lag=lag)
    tokens, kinds = task.sample(length, torch.Generator().manual_seed(seed))
    assert tokens.shape == kinds.shape == (length,)
    assert kinds[0] == COPY_KINDS.index("noise")
    for place in range(1, length):
        copied = {"first": 0, "previous": max(place - lag, 0)}.get(COPY_KINDS[kinds[place]])
        assert copied is None or tokens[place] == tokens[copied]


def test_kinds_have_their_shares_and_noise_is_uniform():
    task = CopyMixture(vocabulary_size=4, first=0.2, previous=0.5)
    tokens, kinds = _samples(task, 65, 600)
    counts = kinds[:, 1:].flatten().bincount(minlength=3) / kinds[:, 1:].numel()
    assert task.shares == {"first": 0.2, "previous": 0.5, "noise": pytest.approx(0.3)}
    assert counts.tolist() == pytest.approx([0.2, 0.5, 0.3], abs=0.01)  # 38400 draws: 4 standard deviations
    noise = tokens[kinds == COPY_KINDS.index("noise")].bincount(minlength=4)
    assert (noise / noise.sum()).tolist() == pytest.approx([0.25] * 4, abs=0.02)


def test_only_the_first_and_the_previous_token_matter():
    """The empirical distribution P(x_i | x_0, x_{i - 2}) matches optimal_token_losses()."""
    task = CopyMixture(vocabulary_size=3, first=0.25, previous=0.35)
    tokens, _ = _samples(task, 4, 20000)
    losses = task.optimal_token_losses(tokens)
    for one, before in ((0, 0), (0, 1)):
        chosen = (tokens[:, 0] == one) & (tokens[:, 1] == before)
        for token in range(3):
            hit = chosen & (tokens[:, 3] == token)
            counted = int(hit.sum()) / int(chosen.sum())
            assert math.exp(-float(losses[hit, 2][0])) == pytest.approx(counted, abs=0.04)


LENGTHS_AND_LAGS = [*itertools.product([2, 9], [1, 2, 3])]


@pytest.mark.parametrize("length_and_lag", every_other_deep(LENGTHS_AND_LAGS, [(2, 2), (9, 1)]), ids=str)
def test_the_closed_form_matches_a_simulation(length_and_lag):
    length, lag = length_and_lag
    task = CopyMixture(vocabulary_size=7, first=0.3, previous=0.45, lag=lag)
    tokens, kinds = _samples(task, length, 6000)
    losses, expected = task.optimal_token_losses(tokens), task.optimal_losses(length)
    assert losses.shape == (6000, length - 1)
    for index, kind in enumerate((*COPY_KINDS, "all")):
        mine = losses if kind == "all" else losses[kinds[:, 1:] == index]
        error = float(mine.std()) / math.sqrt(6000)  # losses within a row are correlated, so errors are by rows
        assert float(mine.mean()) == pytest.approx(expected[kind], abs=4 * error + 1e-9)


def test_no_predictor_is_better_than_the_optimum():
    task = CopyMixture(vocabulary_size=16)
    tokens, _ = _samples(task, 33, 400)
    best = float(task.optimal_token_losses(tokens).mean())
    for changes in ({"first": 0.3, "previous": 0.4}, {"first": 0.5, "previous": 0.2}, {"lag": 1}, {"lag": 3}):
        assert float(task.model_copy(update=changes).optimal_token_losses(tokens).mean()) > best


def test_long_rows_approach_the_limit():
    task = CopyMixture(vocabulary_size=64, first=0.2, previous=0.4)
    far, farther = task.optimal_losses(100_000), task.optimal_losses(200_000)
    assert far == pytest.approx(farther, abs=1e-4)
    assert far["all"] > task.optimal_losses(8)["all"]  # the first tokens of a row are easier


def test_rows_depend_only_on_seed_and_index():
    def rows(seed: int, count: int) -> CopyMixtureRows:
        return CopyMixtureRows(CopyMixture(), context_length=32, num_rows=count, seed=seed)

    forwards = [rows(3, 8)[index]["input_ids"] for index in range(8)]
    backwards = [rows(3, 100)[index]["input_ids"] for index in reversed(range(8))][::-1]
    assert all(torch.equal(one, other) for one, other in zip(forwards, backwards, strict=True))
    assert not torch.equal(forwards[0], forwards[1])
    assert not torch.equal(forwards[0], rows(4, 8)[0]["input_ids"])


def test_rows_have_the_format_of_training_rows():
    rows = CopyMixtureRows(CopyMixture(), context_length=32, num_rows=4, seed=0)
    assert len(rows) == 4
    batch = collate_rows([rows[index] for index in range(4)])
    assert {name: tuple(field.shape) for name, field in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "document_ids", "loss_weights"), (4, 32)
    )
    assert (batch["labels"][:, 0] == IGNORED_LABEL).all()
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])
    assert torch.equal(batch["input_ids"][2], rows.sample(2).tokens)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"vocabulary_size": 1}, "vocabulary_size\n  Input should be greater than or equal to 2"),
        ({"first": -0.1}, "first\n  Input should be greater than or equal to 0"),
        ({"previous": 1.0}, "previous\n  Input should be less than 1"),
        ({"first": 0.5, "previous": 0.5}, "first and previous must sum to less than 1, to leave room for noise"),
        ({"lag": 0}, "lag\n  Input should be greater than or equal to 1"),
    ],
)
def test_invalid_tasks_are_refused(arguments: dict[str, Any], complaint: str):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        CopyMixture(**arguments)


def test_invalid_rows_are_refused():
    with pytest.raises(ValueError, match="context_length must be at least 2 tokens; it is 1"):
        CopyMixtureRows(CopyMixture(), context_length=1, num_rows=1, seed=0)
    with pytest.raises(ValueError, match="num_rows must be at least 1; it is 0"):
        CopyMixtureRows(CopyMixture(), context_length=2, num_rows=0, seed=0)
    with pytest.raises(IndexError, match="index must be from 0 to 0; it is 1"):
        CopyMixtureRows(CopyMixture(), context_length=2, num_rows=1, seed=0).sample(1)
    with pytest.raises(ValueError, match="length must be at least 2 tokens; it is 1"):
        CopyMixture().optimal_losses(1)
