"""Medians, ratios and exponents of numbers with known answers."""

import math
import random

import pytest
from bench_cases import WAYS

from attention_priors.lab.bench.measure import repetitions
from attention_priors.lab.bench.results import growth, ratios, spread
from attention_priors.lab.bench.run import sittings
from attention_priors.lab.bench.way import Need


def test_median_and_quartiles_are_exact():
    assert spread([5, 1, 4, 2, 3]) == [3, 2, 4]
    assert spread([1, 2]) == [1.5, 1.25, 1.75]
    assert spread([7]) == [7, 7, 7]


def test_ratios_are_taken_within_a_repetition():
    """A machine that is half as fast in one repetition changes the medians, but no ratio."""
    rounds = [{"way": 3 * noise, "plain": 2 * noise} for noise in (1, 2, 8)]
    assert ratios(rounds, "way", "plain") == [1.5, 1.5, 1.5]


@pytest.mark.parametrize("exponent", [0.5, 1, 2])
def test_growth_finds_the_power(exponent):
    fit = growth({length: 3e-7 * length**exponent for length in (512, 1024, 2048)})
    assert fit is not None
    assert math.isclose(fit[0], exponent, rel_tol=1e-9)
    assert fit[1] == [512, 1024, 2048]


def test_growth_is_fitted_to_three_or_more_long_lengths():
    constant_then_square = {length: 0.1 + 1e-6 * length**2 for length in (1024, 2048, 8192, 16384, 32768)}
    fit = growth(constant_then_square)
    assert fit is not None
    assert fit[1] == [8192, 16384, 32768]
    assert abs(fit[0] - 2) < 0.01
    del constant_then_square[32768]
    fit = growth(constant_then_square)
    assert fit is not None
    assert fit[1] == [1024, 2048, 8192, 16384]


def test_growth_needs_two_values_above_zero():
    assert growth({1024: 1.0}) is None
    assert growth({1024: 0.0, 2048: 1.0}) is None
    assert growth({}) is None


def test_growth_is_robust_to_noise():
    noise = random.Random(0)
    fit = growth({2**power: 2.0 ** (1.5 * power) * noise.uniform(0.95, 1.05) for power in range(10, 16)})
    assert fit is not None
    assert abs(fit[0] - 1.5) < 0.05


def test_every_repetition_runs_every_way_once_in_a_new_order():
    ran: list[str] = []

    def measure(name: str) -> float:
        ran.append(name)
        return len(ran)

    names = ["a", "b", "c", "d"]
    rounds = list(repetitions(measure, names, 0, 12, seed=3))
    assert all(sorted(entry) == names for entry in rounds)
    assert [name for entry in rounds for name in entry] == ran
    assert len({tuple(entry) for entry in rounds}) > 3
    # A resumed benchmark uses the orders of an uninterrupted one.
    again = list(repetitions(measure, names, 7, 12, seed=3))
    assert [list(entry) for entry in again] == [list(entry) for entry in rounds[7:]]
    assert [list(e) for e in repetitions(measure, names, 0, 12, seed=4)] != [list(entry) for entry in rounds]


def test_ways_share_a_sitting_while_their_memory_fits():
    available = ["plain", "attend-alibi", "formula-alibi", "sdpa-bias-alibi", "x-transformers"]
    needs = {name: Need(0, 0) for name in WAYS} | {
        name: Need(10, 5) for name in ("formula-alibi", "sdpa-bias-alibi", "x-transformers")
    }
    assert sittings(available, available, needs, 35) == [available]
    assert sittings(available, available, needs, 25) == [
        ["plain", "attend-alibi", "formula-alibi", "sdpa-bias-alibi"],
        ["plain", "attend-alibi", "x-transformers"],
    ]
    # A way that is added later brings its baseline and its counterpart.
    assert sittings(["x-transformers"], available, needs, 100) == [["plain", "attend-alibi", "x-transformers"]]
    assert sittings(["x-transformers"], ["plain", "x-transformers"], needs, 100) == [["plain", "x-transformers"]]
