"""Axes of tokens, nats and losses, with ticks in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attention_priors.lab.report.figures.style import tidy
from attention_priors.lab.report.wording import multiple

DEPTH_OF_CUT = 30.0
"""Depth in nats below the maximum at which log-priors are cut; e^-30 is a negligible weight."""

_LARGEST_LOG_TICK = 30
_MOST_LOG_TICKS = 15


def thin(ticks: Sequence[float], at_most: int) -> list[float]:
    """Select ticks of a log axis with room for ``at_most`` labels, including the first."""
    apart = math.log2(ticks[-1] / ticks[0]) / at_most if len(ticks) > 1 else 0
    kept = list(ticks[:1])
    for tick in ticks:
        if math.log2(tick / kept[-1]) > apart:
            kept.append(tick)
    return kept


def powers_of_two(low: float, high: float) -> list[float]:
    """Return the powers of two in a range, with a small margin."""
    return [2.0**k for k in range(_LARGEST_LOG_TICK) if low / 1.15 <= 2.0**k <= high * 1.15]


def set_ticks(axis: Axis, ticks: Iterable[float], written: Callable[[float], str] = "{:.0f}".format) -> None:
    """Set the ticks of an axis and their format, and remove all others."""
    axis.set_major_locator(FixedLocator([*ticks]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(value).replace("-", "−")))
    axis.set_minor_locator(NullLocator())


def log_token_axis(axes: Axes, ticks: Sequence[float], first: float, last: float, at_most: int) -> None:
    """Show tokens on a log2 axis with a margin at both ends."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(first / 1.25, last * 1.25)
    set_ticks(axes.xaxis, thin(ticks, at_most))


def token_axis(
    axes: Axes, ticks: Sequence[float], ends: Sequence[float], trained: Mapping[int, str], panel: bool
) -> None:
    """Show tokens on a log2 axis, with a line at each training length.

    Args:
        axes: Axes to configure.
        ticks: Candidate ticks, in rising order.
        ends: First and last position in the data.
        trained: Training lengths with line colours. A single one adds an axis of multiples on top.
        panel: Whether the axes belong to one of several panels, which have less room.
    """
    at_most = 6 if panel else 9
    log_token_axis(axes, ticks, min(*ends, *trained), max(*ends, *trained), at_most)
    for length, colour in trained.items():
        axes.axvline(length, color=colour, linestyle=(0, (5, 3)), linewidth=1, zorder=1, gid="training length")
    if len(trained) != 1 or panel:
        return
    (length,) = trained
    to_ratio: Callable[[Any], Any] = lambda tokens: tokens / length  # noqa: E731
    to_tokens: Callable[[Any], Any] = lambda ratio: ratio * length  # noqa: E731
    above: Any = axes.secondary_xaxis("top", functions=(to_ratio, to_tokens))
    left, right = axes.get_xlim()
    ratios = thin([2.0**k for k in range(-3, 21) if left <= 2.0**k * length <= right], at_most)
    set_ticks(above.xaxis, ratios, lambda value: f"{multiple(value)}×")
    above.set_xlabel(f"× training length (dashed: {length} tokens)")
    above.spines["top"].set_visible(False)


def plain_log_ticks(axes: Axes) -> None:
    """Set ticks of a log axis at 1, 2, 5, 10, ...; at powers of 10 for wide ranges, evenly spaced for narrow ones."""
    low, high = axes.get_ylim()
    powers = [10.0**k for k in range(-1, math.floor(math.log10(high)) + 1)]
    ticks = [tick for power in powers for digit in (1, 2, 5) if low <= (tick := digit * power) <= high]
    if len(ticks) > _MOST_LOG_TICKS:
        ticks = thin([power for power in powers if power >= low], 8)
    elif len(ticks) < 3:
        ticks = [tick for tick in MaxNLocator(nbins=6).tick_values(low, high) if low <= tick <= high]
    set_ticks(axes.yaxis, ticks, "{:g}".format)


def below_maximum(log_prior: Sequence[float | None]) -> np.ndarray:
    """Return a log-prior relative to its maximum, cut from below; nan where undefined."""
    curve = np.array(log_prior, dtype=float)
    return curve if np.isnan(curve).all() else np.maximum(curve - np.nanmax(curve), -DEPTH_OF_CUT)


def prior_axes(axes: Axes, farthest: int) -> None:
    """Show tokens horizontally and nats below the maximum vertically, both linear up to 1 and logarithmic beyond.

    Args:
        axes: Axes to configure.
        farthest: Last position in the data.
    """
    tidy(axes)
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.6)
    axes.set_xlim(0, max(farthest, 1) * 1.1)
    set_ticks(axes.xaxis, [0, *thin([4**k for k in range(_LARGEST_LOG_TICK) if 4**k <= farthest], 6)])
    axes.set_yscale("symlog", linthresh=1, linscale=0.6)
    axes.set_ylim(-DEPTH_OF_CUT * 1.15, 0.12)
    written = lambda value: f"{'≤ ' if value == -DEPTH_OF_CUT else ''}{value:g}"  # noqa: E731
    set_ticks(axes.yaxis, [0, -0.5, -1, -3, -10, -DEPTH_OF_CUT], written)
    axes.tick_params(labelsize=8.5)


def nudges(count: int, lengths: Sequence[int]) -> list[float]:
    """Return a factor close to 1 for each line; together they span under half of the smallest gap between lengths."""
    gaps = np.diff(np.log2(lengths))
    step = min(0.07, 0.4 * float(gaps.min()) / count) if gaps.size else 0.0
    return [2 ** ((index - (count - 1) / 2) * step) for index in range(count)]
