"""95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.special import ndtri, stdtrit  # scipy.stats takes most of a second to import

CONFIDENCE = 0.95
"""Confidence level of all reported intervals."""


class Interval(NamedTuple):
    """Lower and upper end of an interval."""

    low: float
    high: float


class Estimate(NamedTuple):
    """Mean over seeds and its interval; the ends are nan for fewer than two seeds."""

    mean: float
    low: float
    high: float


_Found = TypeVar("_Found", Interval, Estimate)


def wilson_interval(correct: float, trials: int) -> Interval:
    """Return the Wilson score interval of a share.

    Scores may be fractions between 0 and 1. Their variance is at most that of zeros and ones with an equal mean, so
    the interval is then conservative.

    Args:
        correct: Sum of the scores, from 0 to ``trials``.
        trials: Number of scores.

    Raises:
        ValueError: ``trials`` is below 1, or ``correct`` is not between 0 and ``trials``.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1; it is {trials}")
    if not 0 <= correct <= trials:
        raise ValueError(f"correct must be from 0 to trials, {trials}; it is {correct}")
    z = float(ndtri((1 + CONFIDENCE) / 2))
    share, weight = correct / trials, z * z / trials
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / trials / 4)
    # For shares of 0 and 1, one end is exactly 0 or 1; rounding must not change it.
    low = 0.0 if correct == 0 else max(0.0, middle - half)
    return Interval(low, 1.0 if correct == trials else min(1.0, middle + half))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's t interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    # NumPy, because a loss may be infinite after an overflow.
    with np.errstate(invalid="ignore"):
        mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per seed, with Student's 95 % interval.

    The interval is for the mean over all possible seeds, and assumes normally distributed values.

    Raises:
        ValueError: ``values`` is empty.
    """
    if not values:
        raise ValueError("values must have at least one value, got none")
    interval = mean_interval(values) or Interval(math.nan, math.nan)
    return Estimate(float(np.mean(values)), *interval)


def cut_to_share(found: _Found) -> _Found:
    """Clip an interval to the range of a share, 0 to 1, because Student's interval has no bounds; nan stays nan."""
    return found._replace(low=float(np.clip(found.low, 0, 1)), high=float(np.clip(found.high, 0, 1)))
