"""Intervals: of a share over its trials, and of a mean over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest, t

CONFIDENCE = 0.95
"""Confidence level of every interval in the report."""


class Estimate(NamedTuple):
    """A mean over seeds, and its interval; the interval is nan where there are fewer than two seeds."""

    mean: float
    low: float
    high: float


def wilson_interval(correct: int, trials: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share.

    Raises:
        ValueError: ``trials`` is below 1, or ``correct`` is not between 0 and ``trials``.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, as a share of nothing has no interval; it is {trials}")
    if not 0 <= correct <= trials:
        raise ValueError(f"correct must be from 0 to trials, {trials}; it is {correct}")
    interval = binomtest(correct, trials).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed with Student's 95 % interval.

    The interval is for the mean of models trained with other seeds, as far as a normal distribution describes them.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("values must hold the value of one seed at least, got none")
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)
