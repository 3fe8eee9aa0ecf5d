"""Log-priors and their gradients are finite for all parameters and distances."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prior_samples import every_prior, every_prior_with_parameters, make, randomise
from torch import Tensor, nn
from torch.func import functional_call

from attention_priors.priors import GeneralizedGaussian, Laplace, Prior
from attention_priors.priors.base import LOG_PRIOR_FLOOR
from thoroughness import examples

FAR = 2**20
DISTANCES = torch.tensor([0, *(sign * 2**power for power in range(21) for sign in (1, -1)), 3, -3, 999_983])

thorough = settings(max_examples=examples(80))
exponents = st.floats(-1000, 1000, width=32)


def assert_finite(prior: Prior, distance: Tensor) -> None:
    for parameter in prior.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    log_prior = prior.log_prior_at(distance)
    assert torch.isfinite(log_prior).all()
    assert log_prior.min().item() >= torch.tensor(LOG_PRIOR_FLOOR).item()
    (log_prior / log_prior.numel()).sum().backward()
    for key, parameter in prior.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), (key, parameter.grad)


@thorough
@given(
    theta_alpha=exponents,
    theta_beta=st.floats(-8, 8, width=32),
    theta_mu=exponents,
    distance=st.integers(-FAR, FAR),
    keep_sign=st.booleans(),
)
@example(1000.0, 8.0, 1000.0, 0, False)
@example(1000.0, -8.0, 0.0, 0, False)
@example(-1000.0, -8.0, 0.0, 0, False)
@example(0.0, 0.0, 0.0, 0, False)
@example(0.0, -8.0, -1000.0, FAR, False)
@example(0.0, 8.0, 0.0, -FAR, True)
def test_generalized_gaussian_is_finite(
    theta_alpha: float, theta_beta: float, theta_mu: float, distance: int, keep_sign: bool
):
    prior = GeneralizedGaussian(2, init="roles", keep_sign=keep_sign)
    with torch.no_grad():
        prior.theta_alpha.fill_(theta_alpha)
        prior.theta_beta.fill_(theta_beta)
        prior.theta_mu.fill_(theta_mu)
    assert_finite(prior, torch.cat([DISTANCES, torch.tensor([distance])]))


@thorough
@given(log_slope=st.floats(-700, 700, width=32), distance=st.integers(-FAR, FAR))
@example(700.0, FAR)
@example(-700.0, FAR)
def test_laplace_is_finite(log_slope: float, distance: int):
    prior = Laplace(1)
    with torch.no_grad():
        prior.log_slope.fill_(log_slope)
    assert_finite(prior, torch.cat([DISTANCES, torch.tensor([distance])]))


def test_log_priors_reach_the_floor_and_stay_above_it():
    prior = GeneralizedGaussian(1)
    with torch.no_grad():
        prior.theta_alpha.fill_(1000.0)
    steep = Laplace(1, slopes=[1e30])
    for log_prior in (prior.log_prior_at(DISTANCES), steep.log_prior_at(torch.tensor([FAR, 2, -7]))):
        torch.testing.assert_close(log_prior, torch.full_like(log_prior, -1e30))
        assert torch.isfinite(log_prior * 1e8).all()  # margin for a logit scale


@every_prior
@settings(max_examples=examples(6))
@given(
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 30.0]),
    seed=st.integers(0, 10_000),
    start=st.integers(0, FAR),
)
def test_log_priors_with_random_parameters_are_finite(
    name: str, arguments: dict[str, Any], scale: float, seed: int, start: int
):
    prior = randomise(make(name, arguments), seed, scale)
    queries, keys = torch.tensor([start, start + 1]), torch.tensor([0, 1, start, start + 1, start + 9])
    for parameter in prior.parameters():
        parameter.requires_grad_(True)
    bias, visible = prior.bias_and_visibility(queries, keys)
    assert torch.isfinite(bias).all()
    log_prior = prior.log_prior(queries, keys)
    assert torch.equal(
        log_prior == -torch.inf,
        torch.zeros_like(bias).bool() if visible is None else ~visible.expand_as(bias),
    )
    if bias.requires_grad:
        (bias / bias.numel()).sum().backward()
        for parameter in prior.parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all()


class _LogPrior(nn.Module):
    def __init__(self, prior: Prior) -> None:
        super().__init__()
        self.prior = prior

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.prior.log_prior(queries, keys, torch.float64)


@pytest.mark.slow
@every_prior_with_parameters
def test_gradients_match_finite_differences(name: str, arguments: dict[str, Any]):
    model = _LogPrior(randomise(make(name, arguments), seed=11, scale=0.4))
    names = [key for key, _ in model.named_parameters()]
    values = [value.detach().double().requires_grad_() for value in model.parameters()]
    queries, keys = torch.tensor([0, 5, 31]), torch.tensor([0, 2, 5, 90])

    def log_prior(*parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters, strict=True)), (queries, keys))

    assert log_prior(*values).requires_grad
    assert torch.autograd.gradcheck(log_prior, values)


def test_a_peak_next_to_a_token_has_a_finite_location_gradient():
    prior = GeneralizedGaussian(1, learn="mu")
    with torch.no_grad():
        prior.theta_alpha.fill_(-21.9103)
        prior.theta_beta.fill_(-8.0)
        prior.theta_mu.fill_(10.988186836242676)

    bias = prior.log_prior_at(torch.tensor([-59171]))
    bias.sum().backward()

    assert bias.isfinite().all()
    assert prior.theta_mu.grad is not None
    assert prior.theta_mu.grad.isfinite().all()


def test_a_slope_beyond_float64_gives_no_nan():
    prior = Laplace(1, learn=True)
    with torch.no_grad():
        prior.log_slope.fill_(1000.0)

    bias = prior.log_prior_at(torch.tensor([0, 1]))
    bias.sum().backward()

    assert bias.tolist() == [[0.0, pytest.approx(-1e30)]]
    assert prior.log_slope.grad is not None
    assert prior.log_slope.grad.isfinite().all()
