"""Statements of BAM, "Bayesian Attention Mechanism", about its priors and their effect on the weights."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_priors import attend
from attention_priors.priors import GeneralizedGaussian, Laplace, Uniform, generalized_gaussian
from thoroughness import examples

thorough = settings(max_examples=examples(40))


def ggd(theta_alpha: float, theta_beta: float) -> GeneralizedGaussian:
    prior = GeneralizedGaussian(1)
    with torch.no_grad():
        prior.theta_alpha.fill_(theta_alpha)
        prior.theta_beta.fill_(theta_beta)
    return prior


def k(prior: GeneralizedGaussian, distances: list[int]) -> torch.Tensor:
    return prior.log_prior_at(torch.tensor(distances), torch.float64)[0].detach()


def causal_weights(log_prior: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(log_prior.shape[-2:], dtype=torch.bool).triu(1)
    return log_prior.masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize("prior", [Uniform(2), GeneralizedGaussian(2, init="uniform")])
def test_bam_lemma_1_no_position_is_a_uniform_prior_over_the_past(prior: Uniform | GeneralizedGaussian):
    positions = torch.arange(12)
    weights = causal_weights(prior.log_prior(positions, positions))
    for i in range(12):
        torch.testing.assert_close(weights[:, i, : i + 1], torch.full((2, i + 1), 1 / (i + 1)))


@thorough
@given(st.floats(-3, 0.9375, width=32), st.floats(1 / 64, 2, width=32), st.integers(2, 2**20))
def test_bam_theorem_2_below_shape_one_the_penalty_is_smaller_than_alibis(beta: float, slope: float, distance: int):
    # The corrected theorem: with α = m^(-1/β), so e^θα = m, and only for |d| > 1.
    prior, alibi = ggd(math.log(slope), beta), Laplace(1, slopes=[slope])
    for signed in (distance, -distance):
        ratio = (k(prior, [signed]) / alibi.log_prior_at(torch.tensor([signed]), torch.float64)[0]).item()
        assert ratio < 1
        assert ratio == pytest.approx(distance ** (beta - 1), rel=1e-4)


@thorough
@given(
    st.lists(st.floats(-4, 4), min_size=2, max_size=20),
    st.floats(-3, -0.0625, width=32),
    st.floats(-3, 3, width=32),
)
def test_bam_theorem_3_negative_shape_takes_all_weight_from_the_own_position(
    content: list[float], beta: float, theta_alpha: float
):
    # p_ij → 0 as |j - i| → 0, for any content. At the own position, the distance is ε.
    prior, key = ggd(theta_alpha, beta), torch.tensor(content, dtype=torch.float64).view(1, 1, -1, 1)
    query, unit = key.new_ones(1, 1, 1, 1), torch.eye(len(content), dtype=torch.float64)[None, None]
    amplitude, spread = math.exp(theta_alpha), max(content) - min(content)
    own = []
    for share in (0.1, 1e-3, 1e-9, 1e-30):
        # p_ii ≤ exp(f_i - f_j + K(0) - K(i - j)) with K(i - j) ≥ -e^θα. This ε makes the bound equal to `share`.
        epsilon = ((amplitude + spread - math.log(share)) / amplitude) ** (1 / beta)
        with mock.patch.object(generalized_gaussian, "EPSILON", epsilon):
            weights = attend(query, key, unit, prior, softmax_scale=1.0)[0, 0, 0].tolist()
            alone = attend(query, key[:, :, -1:], unit[:, :, :1, :1], prior, softmax_scale=1.0)
        assert sum(weights) == pytest.approx(1)
        assert weights[-1] <= share * (1 + 1e-9)
        own.append(weights[-1])
        # Erratum: a token that sees only itself keeps all of its weight.
        assert alone.item() == 1
    assert own == sorted(own, reverse=True)
    assert own[0] > 0


def test_bam_theorem_3_needs_epsilon_to_vanish():
    # Erratum: the theorem holds in the limit only. With the ε of real models, a shape near 0 keeps its own position.
    own, near = k(ggd(0.0, -0.02), [0, 1]).tolist()
    assert own == pytest.approx(-(generalized_gaussian.EPSILON**-0.02)) == pytest.approx(-1.2589, abs=1e-4)
    assert math.exp(own - near) > 0.77


@thorough
@given(st.floats(-3, -0.5, width=32), st.floats(-3, 3, width=32))
def test_bam_theorem_4_negative_shape_leaves_far_keys_untouched(beta: float, theta_alpha: float):
    values = k(ggd(theta_alpha, beta), [0, 1, 2, 10, 100, 10_000, 2**20, 2**40])
    assert (values.diff() > 0).all()
    assert (values < 0).all()
    assert values[-1].item() > -math.exp(theta_alpha) * 2.0 ** (40 * beta) * 1.001
    assert values[-1].item() > -1e-4


@thorough
@given(st.floats(0.25, 2, width=32), st.floats(-3, 3, width=32))
def test_bam_lemma_4_positive_shape_has_a_penalty_without_bound(beta: float, theta_alpha: float):
    values = k(ggd(theta_alpha, beta), [0, 1, 2, 10, 100, 10_000, 2**20, 2**40])
    assert (values.diff() < 0).all()
    assert values[-1].item() < -50
    assert values[-1].item() == pytest.approx(-math.exp(theta_alpha) * 2.0 ** (40 * beta), rel=1e-5)


bounded_content = st.tuples(st.integers(0, 1000), st.floats(0, 4)).map(
    lambda drawn: drawn[1] * (2 * torch.rand(4000, generator=torch.Generator().manual_seed(drawn[0])).double() - 1)
)
"""Draw the content logits of 4000 keys, by distance."""


@thorough
@given(bounded_content, st.sampled_from(["lemma 3", "lemma 4"]), st.floats(0.5, 2, width=32), st.floats(0.25, 2))
def test_bam_lemmas_3_and_4_a_key_gets_less_than_any_share_from_some_distance_on(
    content: torch.Tensor, lemma: str, beta: float, slope: float
):
    # The lemmas need bounded content logits, as here.
    distances = list(range(len(content)))
    if lemma == "lemma 3":
        penalty = Laplace(1, slopes=[slope]).log_prior_at(torch.tensor(distances), torch.float64)[0]
    else:
        penalty = k(ggd(math.log(slope), beta), distances)
    weights = (content + penalty).softmax(-1)
    spread = 2 * content.abs().max()
    assert (weights <= (spread + penalty - penalty[0]).exp() * (1 + 1e-9)).all()
    assert weights[-1] < 1e-2 * math.exp(spread) * weights[0] + 1e-300


@thorough
@given(bounded_content, st.floats(-3, -0.125, width=32), st.floats(-2, 2))
def test_bam_theorem_4_the_bias_of_far_keys_tends_to_0(content: torch.Tensor, beta: float, theta_alpha: float):
    # Erratum: the bias tends to 0. The weight tends to 0 only as every key's weight does with more keys.
    penalty = k(ggd(theta_alpha, beta), list(range(len(content))))
    spread = 2 * content.abs().max()
    for number in (40, 400, 4000):
        weight = (content + penalty)[:number].softmax(-1)[-1]
        without = content[:number].softmax(-1)[-1]
        assert weight >= without * penalty[number - 1].exp() * (1 - 1e-9)
        # Except for the query's own key, the nearest key has the largest penalty.
        assert weight <= (spread - penalty[1]).exp() / (number - 1) * (1 + 1e-9)


@thorough
@given(st.floats(-3, -0.25), st.floats(-1, 1))
def test_bam_section_2_5_a_negative_shape_is_flat_at_the_far_end(beta: float, theta_alpha: float):
    """Erratum: the prior is not "sharply concentrated at the far end". The farthest tenth of a long text holds a
    tenth.
    """
    log_prior = ggd(theta_alpha, beta).log_prior_at(torch.arange(2**18), torch.float64)[0].detach()
    assert float(log_prior.softmax(-1)[-(2**18) // 10 :].sum()) == pytest.approx(0.1, rel=0.15)


@thorough
@given(st.floats(-3, -0.0625, width=32), st.floats(-3, 3, width=32))
def test_bam_theorem_3_keeps_the_neighbour(beta: float, theta_alpha: float):
    """Erratum: "ignores local context" holds for the own token only. The next token loses ``e^θα`` nats for any β."""
    near, far = ggd(theta_alpha, beta).log_prior_at(torch.tensor([1, 2**40]), torch.float64)[0].tolist()
    assert near == pytest.approx(-math.exp(theta_alpha), rel=1e-4)
    assert far - near <= math.exp(theta_alpha)


def test_bam_section_3_2_a_shape_of_0_suppresses_nothing():
    """Erratum: Theorems 3 and 4 need β < 0. For β = 0, their claim would hold for a uniform prior."""
    assert len(set(ggd(0.7, 0.0).log_prior_at(torch.arange(100), torch.float64)[0].tolist())) == 1
