"""Medians, quartiles, ratios repetition by repetition, and growth with length."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LONG = 8192
"""Growth is fitted from this length on, where there are three such lengths: below, other costs count too."""


class Spread(NamedTuple):
    """A median and its quartiles."""

    median: float
    low: float
    high: float


class Growth(NamedTuple):
    """A fitted power of the length."""

    exponent: float
    lengths: list[int]
    """What it was fitted over."""


def spread(values: Sequence[float]) -> Spread:
    """Median, lower and upper quartile (linear between values).

    Raises:
        ValueError: if there are no values.
    """
    if not values:
        raise ValueError("values must hold at least one number, got none")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratios(rounds: Sequence[Mapping[str, float]], way: str, baseline: str) -> list[float]:
    """``way / baseline`` in each repetition: what disturbs a repetition disturbs both."""
    return [seconds[way] / seconds[baseline] for seconds in rounds]


def growth(values: Mapping[int, float]) -> Growth | None:
    """The exponent ``p`` of ``value ∝ length^p``, by least squares on the logarithms.

    Over the lengths from 8192 on if there are at least three, else over all. Values of 0 have no logarithm and
    are left out. None where fewer than two lengths are left.

    Args:
        values: by length.
    """
    positive = sorted(length for length, value in values.items() if value > 0)
    far = [length for length in positive if length >= LONG]
    lengths = far if len(far) >= 3 else positive
    if len(lengths) < 2:
        return None
    slope, _ = statistics.linear_regression(
        [math.log(length) for length in lengths], [math.log(values[length]) for length in lengths]
    )
    return Growth(slope, lengths)
