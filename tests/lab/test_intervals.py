import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, t

from attention_priors.lab.intervals import Interval, cut_to_share, mean_interval, over_seeds, wilson_interval


@given(trials=st.integers(1, 10_000), share=st.floats(0, 1))
def test_wilson_matches_scipy_for_whole_counts(trials: int, share: float):
    correct = round(share * trials)
    expected = binomtest(correct, trials).proportion_ci(0.95, "wilson")
    assert wilson_interval(correct, trials) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(trials=st.integers(1, 500), share=st.floats(0, 1))
def test_wilson_of_fractions_is_monotonic(trials: int, share: float):
    found = wilson_interval(share * trials, trials)
    below, above = (wilson_interval(rounded(share * trials), trials) for rounded in (math.floor, math.ceil))
    assert below.low - 1e-12 <= found.low <= above.low + 1e-12
    assert below.high - 1e-12 <= found.high <= above.high + 1e-12
    assert 0 <= found.low <= share + 1e-12
    assert share - 1e-12 <= found.high <= 1


def test_wilson_is_exact_at_its_ends():
    assert wilson_interval(0, 20).low == 0
    assert wilson_interval(20, 20).high == 1


@pytest.mark.parametrize(("correct", "trials"), [(0, 0), (-1, 5), (5.5, 5)])
def test_wilson_refuses_invalid_counts(correct: float, trials: int):
    with pytest.raises(ValueError, match=r"trials must be|correct must be"):
        wilson_interval(correct, trials)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_the_interval_of_a_mean_matches_scipy(values: list[float]):
    found = mean_interval(values)
    assert found is not None
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    if error == 0:
        assert found == pytest.approx((values[0], values[0]), abs=1e-9)
    else:
        expected = t.interval(0.95, len(values) - 1, loc=float(np.mean(values)), scale=error)
        assert found == pytest.approx(expected, abs=1e-9)


def test_one_value_has_no_interval():
    assert mean_interval([1.0]) is None
    assert mean_interval([]) is None


def test_intervals_of_shares_stay_within_0_and_1():
    assert cut_to_share(over_seeds([0.99, 1.0, 0.2])).high == 1
    assert cut_to_share(Interval(-0.3, 0.4)) == (0.0, 0.4)
    low, high = cut_to_share(over_seeds([0.5]))[1:]
    assert math.isnan(low)
    assert math.isnan(high)
