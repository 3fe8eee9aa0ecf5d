"""Attention as entropic transport, on random scores and priors in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_priors.lab.inspect import transport_minimum, transport_objective, transport_plan
from thoroughness import examples

drawn = settings(max_examples=examples(25))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, float]:
    """Draw scores, a log-prior that may hide keys, and a temperature."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    shape = (draw(st.integers(1, 4)), draw(st.integers(2, 9)))
    sizes = (draw(st.sampled_from([0.0, 0.1, 5.0])) for _ in "sK")
    score, log_prior = (size * torch.randn(shape, generator=generator, dtype=torch.float64) for size in sizes)
    hidden = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    hidden[:, 0] = False
    return score, log_prior.masked_fill(hidden, -torch.inf), draw(st.sampled_from([0.2, 1.0, 4.0]))


@drawn
@given(problems())
def test_goat_propositions_2_2_and_3_1_attention_is_the_minimum(problem: tuple[Tensor, Tensor, float]) -> None:
    score, log_prior, temperature = problem
    plan = transport_plan(*problem)
    torch.testing.assert_close(
        plan, (score / temperature + log_prior.log_softmax(-1)).softmax(-1), rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(transport_objective(plan, *problem), transport_minimum(*problem), rtol=1e-10, atol=1e-10)


@drawn
@given(problems(), st.integers(0, 999), st.sampled_from([1e-4, 0.3, 3.0, 30.0]))
def test_other_plans_exceed_the_minimum_by_their_divergence(
    problem: tuple[Tensor, Tensor, float], seed: int, size: float
) -> None:
    score, _, temperature = problem
    best = transport_plan(*problem)
    noise = size * torch.randn(score.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    other = (best.log() + noise).softmax(-1)
    excess = transport_objective(other, *problem) - transport_minimum(*problem)
    ratio = other.clamp(min=1e-300) / best.clamp(min=1e-300)
    divergence = torch.where(other > 0, other * ratio.log(), 0.0).sum(-1)
    torch.testing.assert_close(excess, temperature * divergence, rtol=1e-9, atol=1e-9)
    assert (excess >= -1e-10).all()


def test_goat_proposition_2_2_without_a_prior_the_prior_is_uniform() -> None:
    """The objective is then maximum entropy: ``-<p, s> - τ H(p)``, up to ``τ ln n``."""
    score = torch.randn(3, 5, dtype=torch.float64)
    plan = torch.rand(3, 5, dtype=torch.float64).softmax(-1)
    entropy = -(plan * plan.log()).sum(-1)
    uniform = torch.zeros(5, dtype=torch.float64)
    expected = -(plan * score).sum(-1) - 0.7 * entropy + 0.7 * torch.tensor(5.0, dtype=torch.float64).log()
    torch.testing.assert_close(transport_objective(plan, score, uniform, 0.7), expected)
    torch.testing.assert_close(transport_plan(score, uniform, 0.7), (score / 0.7).softmax(-1))


def test_plans_that_use_a_hidden_key_cost_infinity() -> None:
    log_prior = torch.tensor([0.0, -torch.inf], dtype=torch.float64)
    score = torch.zeros(2, dtype=torch.float64)
    assert transport_objective(torch.tensor([0.5, 0.5], dtype=torch.float64), score, log_prior) == torch.inf
    assert transport_objective(torch.tensor([1.0, 0.0], dtype=torch.float64), score, log_prior) == 0


def test_plans_with_zeros_have_gradients() -> None:
    plan = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64, requires_grad=True)
    log_prior = torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64)
    cost = transport_objective(plan, torch.zeros(3, dtype=torch.float64), log_prior)
    (gradient,) = torch.autograd.grad(cost, plan)
    assert gradient.isfinite().all()


def test_queries_without_keys_have_no_cost() -> None:
    """The cost is nan. A plan of zeros would cost 0, which is less than many plans. Other queries have their cost."""
    score = torch.zeros(2, 2, dtype=torch.float64)
    log_prior = torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]], dtype=torch.float64)
    for of_blind in (0.0, 0.5, torch.nan):
        plan = torch.tensor([[of_blind] * 2, [0.5] * 2], dtype=torch.float64)
        cost = transport_objective(plan, score, log_prior)
        assert cost.isnan().tolist() == transport_minimum(score, log_prior).isnan().tolist() == [True, False]


def test_gradients_follow_the_envelope_theorem() -> None:
    score, log_prior = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in "sK")

    def of(score: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
        plan = transport_plan(score, log_prior, 0.5)
        return transport_objective(plan, score, log_prior, 0.5), transport_minimum(score, log_prior, 0.5)

    assert torch.autograd.gradcheck(of, (score, log_prior))
    # The envelope theorem: the minimum's derivative with respect to a score is minus the plan.
    (grad,) = torch.autograd.grad(transport_minimum(score, log_prior, 0.5).sum(), score)
    torch.testing.assert_close(grad, -transport_plan(score, log_prior, 0.5))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_temperature_must_be_positive(temperature: float) -> None:
    x = torch.zeros(2)
    for call in (
        lambda: transport_objective(x.softmax(-1), x, x, temperature),
        lambda: transport_plan(x, x, temperature),
        lambda: transport_minimum(x, x, temperature),
    ):
        with pytest.raises(ValueError, match="temperature must be a positive"):
            call()
