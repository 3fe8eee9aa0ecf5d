"""FIRE against an independent implementation of its formula, and against the code in its paper."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attention_priors import Fire
from attention_priors.priors import prior_from_config
from thoroughness import examples

HEADS, UNITS = 3, 6


def drawn(seed: int, c: float, threshold: float) -> Fire:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, UNITS, generator=generator).tolist()
    outer = torch.randn(HEADS, UNITS + 1, generator=generator).tolist()
    return Fire(HEADS, UNITS, init={"c": c, "threshold": threshold, "hidden": hidden, "outer": outer})


def formula(prior: Fire, i: int, j: int) -> list[float]:
    """Compute ``f_h(ψ(i - j) / ψ(max(L0, i)))`` in Python floats."""
    c, threshold = math.exp(prior.log_c.item()), math.exp(prior.log_threshold.item())
    x = math.log(c * abs(i - j) + 1) / math.log(c * max(threshold, i) + 1)
    units = [max(0.0, w * x + v) for w, v in prior.hidden.T.tolist()]
    return [sum(map(math.prod, zip(row[:-1], units, strict=True))) + row[-1] for row in prior.outer.tolist()]


@settings(max_examples=examples(30))
@given(st.integers(0, 999), st.floats(0.01, 10.0), st.floats(1.0, 2000.0), st.integers(0, 2**20), st.integers(0, 2**20))
def test_log_prior_matches_the_formula(seed: int, c: float, threshold: float, i: int, j: int) -> None:
    prior = drawn(seed, c, threshold)
    found = prior.log_prior(torch.tensor([i]), torch.tensor([j]), torch.float64)[:, 0, 0]
    assert found.tolist() == pytest.approx(formula(prior, i, j), rel=1e-9, abs=1e-9)


def test_position_matters_only_beyond_the_threshold() -> None:
    prior = drawn(0, 0.3, 100.0)
    steps = torch.arange(50)
    near, at_threshold, beyond = (prior.log_prior(torch.tensor([i]), i - steps, torch.float64) for i in (60, 100, 200))
    torch.testing.assert_close(near, at_threshold, rtol=0, atol=1e-6)  # the threshold is a logarithm in float32
    assert float((near - beyond).detach().abs().amax(-1).min()) > 1e-3


def test_the_farthest_key_is_at_1_for_every_length() -> None:
    prior = drawn(1, 0.1, 512.0)
    found = [prior.log_prior(torch.tensor([i]), torch.tensor([0]), torch.float64) for i in (600, 5000, 2**20)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0], found[2], rtol=1e-12, atol=1e-12)


def test_the_papers_code_differs_by_a_negligible_millionth() -> None:
    """The listing divides by ``ψ(max(L, i)) + 1e-6``, and the formula by ``ψ(max(L, i))``."""
    prior = drawn(2, 0.1, 512.0)
    places = np.arange(1000)
    c, threshold = math.exp(prior.log_c.item()), math.exp(prior.log_threshold.item())
    numerator = np.log(np.abs(c * (places[:, None] - places)) + 1)
    x = numerator / (np.log(np.abs(c * np.maximum(places, threshold)) + 1) + 1e-6)[:, None]
    weight, constant = (each.detach().double().numpy()[:, None, None] for each in prior.hidden)
    outer = prior.outer.detach().double().numpy()
    code = np.einsum("hk,kij->hij", outer[:, :-1], np.maximum(0, weight * x + constant)) + outer[:, -1, None, None]
    ours = prior.log_prior(torch.arange(1000), torch.arange(1000), torch.float64).detach().numpy()
    assert 0 < np.abs(code - ours).max() < 1e-5


def test_sampled_init_matches_the_papers_layers() -> None:
    torch.manual_seed(0)
    prior = Fire(400, 500)
    layers = nn.Linear(1, 500), nn.Linear(500, 400)
    for ours, theirs in (
        (prior.hidden[0], layers[0].weight),
        (prior.hidden[1], layers[0].bias),
        (prior.outer[:, :-1], layers[1].weight),
        (prior.outer[:, -1], layers[1].bias),
    ):
        for end in (torch.amin, torch.amax):
            assert float(end(ours.detach())) == pytest.approx(float(end(theirs.detach())), rel=0.03)
        assert float(ours.detach().std()) == pytest.approx(float(theirs.detach().std()), rel=0.1)
    natural = prior.natural_parameters()
    torch.testing.assert_close(natural["c"], torch.full((400,), 0.1))
    torch.testing.assert_close(natural["threshold"], torch.full((400,), 512.0))


def test_given_numbers_survive_config_and_reset() -> None:
    prior = drawn(3, 0.5, 7.0)
    again = prior_from_config(prior.to_config())
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.add_(1.0)
    again.reset_parameters()
    for one, other in zip(prior.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(again.natural_parameters()["threshold"], torch.full((HEADS,), 7.0))
    assert Fire(2, init={"threshold": 9.0}).natural_parameters()["c"].tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("log_c", [-1000.0, 0.0, 1000.0])
@pytest.mark.parametrize("log_threshold", [-1000.0, 0.0, 1000.0])
def test_numbers_and_gradients_are_finite(log_c: float, log_threshold: float) -> None:
    prior = Fire(1)
    with torch.no_grad():
        prior.log_c.fill_(log_c)
        prior.log_threshold.fill_(log_threshold)
    places = torch.tensor([-(2**20), -1, 0, 1, 2**20])
    found = prior.log_prior(places, places, torch.float64)
    found.sum().backward()
    assert found.isfinite().all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in prior.parameters())


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size must be a positive integer, got 0"):
        Fire(2, hidden_size=0)
    with pytest.raises(ValueError, match=r"init\['c'\] must be above 0, got -1"):
        Fire(2, init={"c": -1.0})
    with pytest.raises(ValueError, match=r"init\['threshold'\] must be at least 1, got 0\.5"):
        Fire(2, init={"threshold": 0.5})
    with pytest.raises(ValueError, match=r"init\['outer'\] must be finite numbers that broadcast to shape \(2, 33\)"):
        Fire(2, init={"outer": [1.0, 2.0]})
