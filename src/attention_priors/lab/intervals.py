"""95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.special import ndtri, stdtrit  # scipy.stats takes most of a second to import

CONFIDENCE = 0.95
"""Confidence level of every interval that is reported."""


class Interval(NamedTuple):
    """From where to where."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A mean over seeds, and its interval; the interval is nan where there are fewer than two seeds."""

    mean: float
    low: float
    high: float


_Found = TypeVar("_Found", Interval, Estimate)


def wilson_interval(correct: float, trials: int) -> Interval:
    """The Wilson score interval of a share.

    Scores between 0 and 1 may be summed up to ``correct``: they vary no more than zeros and ones of the same mean do,
    so the interval is at least as wide as it need be.

    Args:
        correct: sum of the scores, from 0 to ``trials``.
        trials: how many there are.

    Raises:
        ValueError: ``trials`` is below 1, or ``correct`` is not between 0 and ``trials``.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, as a share of nothing has no interval; it is {trials}")
    if not 0 <= correct <= trials:
        raise ValueError(f"correct must be from 0 to trials, {trials}; it is {correct}")
    z = float(ndtri((1 + CONFIDENCE) / 2))
    share, weight = correct / trials, z * z / trials
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / trials / 4)
    # At the ends the two are equal but for rounding.
    low = 0.0 if correct == 0 else max(0.0, middle - half)
    return Interval(low, 1.0 if correct == trials else min(1.0, middle + half))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Student's t interval of the mean; None for fewer than two values, which say nothing of their spread."""
    if len(values) < 2:
        return None
    # NumPy's, as a loss that has overflowed is a value too.
    with np.errstate(invalid="ignore"):
        mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed with Student's 95 % interval.

    The interval is for the mean of models trained with other seeds, as far as a normal distribution describes them.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("values must hold the value of one seed at least, got none")
    interval = mean_interval(values) or Interval(math.nan, math.nan)
    return Estimate(float(np.mean(values)), *interval)


def cut_to_share(found: _Found) -> _Found:
    """Cut an interval's ends to what a share can be, 0 to 1; nan stays nan.

    Student's interval knows nothing of such bounds.
    """
    return found._replace(low=float(np.clip(found.low, 0, 1)), high=float(np.clip(found.high, 0, 1)))
