import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_priors import attend
from attention_priors.priors import Laplace, alibi_slopes
from thoroughness import examples

thorough = settings(max_examples=examples(40))


@st.composite
def means_and_lengths(draw: st.DrawFn) -> tuple[float, int]:
    length = draw(st.integers(2, 5000))
    return draw(st.floats(1e-3, 0.999)) * (length - 1) / 2, length


def max_entropy(prior: Laplace, length: int) -> torch.Tensor:
    assert prior.slopes is not None
    distance = torch.arange(length, dtype=torch.float64)
    return torch.softmax(-prior.slopes[0] * distance, 0)


def test_log_prior_is_linear_in_the_distance():
    prior = Laplace(2, slopes=[0.25, 3.0])
    distance = torch.tensor([0, 1, -1, 7, -1000])
    expected = [[0.0, -0.25, -0.25, -1.75, -250.0], [0.0, -3.0, -3.0, -21.0, -3000.0]]
    torch.testing.assert_close(prior.log_prior_at(distance), torch.tensor(expected))


def test_initial_slopes_are_alibis_or_given():
    torch.testing.assert_close(Laplace(12).slope, alibi_slopes(12).float())
    natural = Laplace(2, slopes=[0.1, 1e-4]).natural_parameters()
    torch.testing.assert_close(natural["slope"], torch.tensor([0.1, 1e-4]))


def test_slopes_stay_positive_for_any_parameters():
    prior = Laplace(4, learn=True)
    with torch.no_grad():
        prior.log_slope.copy_(torch.tensor([-80.0, -1.0, 0.0, 5.0]))
    assert (prior.slope > 0).all()


# ---- factored under a causal mask


@thorough
@given(
    st.lists(st.floats(1e-4, 2), min_size=3, max_size=3),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 3000),
)
def test_goat_proposition_f6_the_past_splits_into_key_and_query_terms(
    slopes: list[float], queries: int, extra: int, start: int
):
    """``-m (i - j)`` is ``m j`` minus a constant of the query. This holds for the past only: ``m j`` keeps rising."""
    prior = Laplace(3, slopes=slopes)
    query_positions = start + extra + torch.arange(queries)
    key_positions = start + torch.arange(queries + extra)
    slope = prior.slope.detach().double()[:, None, None]
    whole = slope * key_positions - slope * query_positions.unsqueeze(-1)
    past = key_positions <= query_positions.unsqueeze(-1)
    exact = prior.log_prior(query_positions, key_positions, torch.float64)
    torch.testing.assert_close(whole[:, past], exact[:, past], rtol=1e-6, atol=1e-9)
    assert (whole[:, ~past] > exact[:, ~past]).all()


def test_goat_proposition_f6_holds_in_attention():
    prior = Laplace(3, slopes=[0.5, 0.1, 0.02])
    query, key, value = (torch.randn(2, h, 300, 8, dtype=torch.float64) for h in (3, 1, 1))
    bias = (prior.slope.detach().double().unsqueeze(-1) * torch.arange(300)).expand(2, -1, -1)
    torch.testing.assert_close(attend(query, key, value, key_bias=bias), attend(query, key, value, prior))


# ---- the maximum entropy prior of a given mean distance


@thorough
@given(means_and_lengths())
def test_goat_theorem_3_the_maximum_entropy_prior_has_the_given_mean(mean_and_length: tuple[float, int]):
    mean, length = mean_and_length
    prior = Laplace.from_mean_distance(mean, length)
    distance = torch.arange(length)
    found = (max_entropy(prior, length) * distance).sum().item()
    assert found == pytest.approx(mean, rel=1e-9)
    weights = prior.log_prior_at(distance, torch.float64)[0].softmax(0)  # rounded by the float32 parameter
    assert (weights * distance).sum().item() == pytest.approx(mean, rel=5e-6)


@thorough
@given(means_and_lengths())
def test_goat_theorem_3_the_rate_solves_its_equation(mean_and_length: tuple[float, int]):
    mean, length = mean_and_length
    slopes = Laplace.from_mean_distance(mean, length).slopes
    assert slopes is not None
    rate = slopes[0]
    if 1e-3 < rate * length < 600:
        assert 1 / math.expm1(rate) - length / math.expm1(rate * length) == pytest.approx(mean, rel=1e-6)
    assert rate > 0


@thorough
@given(st.integers(3, 64), st.floats(0.1, 0.95), st.data())
def test_goat_theorem_3_no_other_prior_of_this_mean_has_more_entropy(length: int, share: float, data: st.DataObject):
    mean = share * (length - 1) / 2
    probabilities = max_entropy(Laplace.from_mean_distance(mean, length), length)
    reach = min(length - 1, max(2, math.ceil(4 * mean)))
    a, b, c = sorted(data.draw(st.sets(st.integers(0, reach), min_size=3, max_size=3)))
    three = probabilities[[a, b, c]]
    # Along this direction, neither mass nor mean changes, and all other distances keep their probabilities.
    direction = torch.tensor([c - b, a - c, b - a], dtype=torch.float64)
    step = 0.3 * three.min() / direction.abs().max()

    def entropy(p: torch.Tensor) -> float:
        return -(p * p.log()).sum().item()

    for sign in (1, -1):
        assert entropy(three + sign * step * direction) < entropy(three)


def test_a_smaller_mean_needs_a_steeper_slope():
    means = [0.01, 0.5, 1.0, 10.0, 100.0, 400.0, 499.0, 499.499]
    slopes = Laplace.from_mean_distance(means, 1000).slopes
    assert slopes is not None
    assert list(slopes) == sorted(slopes, reverse=True)
    assert len(set(slopes)) == len(means)


def test_near_the_middle_the_slope_follows_the_series():
    length = 1000
    middle = (length - 1) / 2
    for share in (1e-4, 1e-5, 1e-7, 1e-9):  # of the way from the middle to 0
        slopes = Laplace.from_mean_distance(middle * (1 - share), length).slopes
        assert slopes is not None
        assert slopes[0] == pytest.approx(12 * middle * share / (length**2 - 1), rel=1e-4)


def test_each_head_may_have_its_mean():
    prior = Laplace.from_mean_distance([2.0, 30.0], 256, learn=True)
    assert prior.num_heads == 2
    assert prior.log_slope.requires_grad
    alone = Laplace.from_mean_distance(30.0, 256)
    assert alone.num_heads == 1
    assert not alone.log_slope.requires_grad
    assert prior.slopes is not None
    assert alone.slopes == prior.slopes[1:]
    again = Laplace(**{key: value for key, value in prior.to_config().items() if key != "name"})
    assert again.slopes == prior.slopes


def test_long_texts_approach_the_geometric_distribution():
    prior = Laplace.from_mean_distance(10, 10**6)
    assert prior.slopes is not None
    assert prior.slopes[0] == pytest.approx(math.log1p(1 / 10), rel=1e-12)


@pytest.mark.parametrize("mean", [4.5, 4.6, 9.0, 0.0, -1.0, math.nan, math.inf])
def test_means_beyond_the_middle_are_refused(mean: float):
    with pytest.raises(ValueError, match=re.escape(f"mean={mean!r} must be between 0 and")):
        Laplace.from_mean_distance(mean, 10)
    with pytest.raises(ValueError, match="mean="):
        Laplace.from_mean_distance([1.0, mean], 10)


@pytest.mark.parametrize("mean", ["12", ["1", "2"], None])
def test_means_that_are_not_numbers_are_refused(mean: Any):
    with pytest.raises(ValueError, match="mean must be numbers"):
        Laplace.from_mean_distance(mean, 10)


def test_missing_means_and_invalid_lengths_are_refused():
    with pytest.raises(ValueError, match="mean must hold at least one number"):
        Laplace.from_mean_distance([], 10)
    for length in (1, 0, 10.0):
        with pytest.raises(ValueError, match=f"length must be an integer of at least 2, got {length}"):
            Laplace.from_mean_distance(0.25, length)  # pyright: ignore[reportArgumentType]
