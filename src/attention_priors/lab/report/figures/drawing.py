"""What figures are made of: axes in tokens, legends, and the curves and points of chosen schemes on given axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attention_priors._io import number
from attention_priors.lab.report.figures.style import GREY, WIDTH, Look, blank, label, thin, tidy
from attention_priors.lab.report.numbers import multiple, quantity
from attention_priors.lab.report.selections.heads import STRONG_RETRIEVAL, gaussian_heads
from attention_priors.lab.report.selections.losses import LossMeasure, loss_measure
from attention_priors.lab.report.selections.passkeys import PasskeyCell, passkey_table
from attention_priors.lab.report.selections.results import (
    Results,
    Row,
    count_passkeys,
    distinct,
    rows,
    schemes_with,
    stopped,
    training_length,
)

PERPLEXITY_RANGE = 10.0
"""The axis of losses ends at this many times the lowest perplexity, so that failures do not squash the rest."""

DEPTH_OF_CUT = 30.0
"""Log-priors are drawn down to this many nats below their maximum: e^-30 is no weight at all."""


MOST_BANDS = 6
"""Of intervals over seeds on one pair of axes."""

Looks = Mapping[str, Look]
"""The schemes that are drawn, in order, and how."""

_LARGEST_LOG_TICK = 30
_MOST_LOG_TICKS = 15
_KEY_WIDTH, _CHARACTER_WIDTH = 0.5, 0.072
"""Inches, of a legend's keys and characters."""
_NARROWEST_THETAS = 0.5


class NothingToShowError(ValueError):
    """The results hold no data for a figure."""


# ---- schemes on axes


def draw_passkeys(axes: Axes, results: Results, looks: Looks, *, panel: bool = False) -> list[Artist]:
    """Shares of pass keys retrieved against length: pooled, with Wilson intervals, and thin lines of single seeds.

    Args:
        axes: where.
        results: a results dictionary.
        looks: the schemes.
        panel: whether this is one of several panels, which have less room.

    Returns:
        Keys for the legend that explain marks, but for the schemes' own.
    """
    cells = [cell for cell in passkey_table(results) if cell.scheme in looks]
    lengths = sorted({cell.length for cell in cells})
    crosses = False
    for scheme, nudge in zip(looks, nudges(len(looks), lengths), strict=True):
        mine = [cell for cell in cells if cell.scheme == scheme]
        # What only some seeds were evaluated at does not continue the line of them all.
        for complete in (True, False):
            points = [cell for cell in mine if cell.complete == complete]
            if points:
                _shares_with_intervals(axes, points, nudge, looks[scheme], hollow=not complete)
        selected = rows(results, "passkey", scheme)
        seeds = distinct(selected, "seed")
        for seed in seeds:
            counts = sorted(count_passkeys((row for row in selected if row["seed"] == seed), "length").items())
            x = [length * nudge for (length,), _ in counts]
            y = [100 * count.share for _, count in counts]
            if len(seeds) > 1:
                _plot_seed(axes, x, y, looks[scheme], f"seed:{scheme}:{seed}")
            if stopped(results, scheme, seed) and counts[-1][0][0] < lengths[-1]:
                crosses = True
                axes.plot(
                    x[-1], y[-1], marker="x", markersize=10, markeredgewidth=1.3, color="black", zorder=5,
                    gid=f"stopped:{scheme}:{seed}",
                )  # fmt: skip
    axes.set_ylim(-4, 104)
    token_axis(axes, lengths, lengths[0], lengths[-1], _trained(results, looks), panel=panel)
    keys: list[Artist] = []
    if crosses:
        keys.append(Line2D([], [], color="black", marker="x", linestyle="none", markersize=9, label="stopped here"))
    if not all(cell.complete for cell in cells):
        hollow_key = Line2D([], [], color=GREY, marker="o", linestyle="none", markerfacecolor="white")
        hollow_key.set_label("without stopped seeds")
        keys.append(hollow_key)
    return keys


def draw_losses(axes: Axes, results: Results, looks: Looks, *, panel: bool = False) -> dict[str, float]:
    """Losses, in their measure, against position; a band is Student's 95 % interval over seeds if there are several.

    Of more than :data:`MOST_BANDS` schemes the bands would hide each other: each seed is a thin line then.

    Returns:
        The highest value of each scheme whose curve leaves the axes.

    Raises:
        NothingToShowError: no scheme has a finite loss.
    """
    measure = loss_measure(results)
    estimates = {scheme: measure.by_position(rows(results, "perplexity", scheme)) for scheme in looks}
    estimates = {scheme: curve for scheme, curve in estimates.items() if curve}
    if not estimates:
        raise NothingToShowError("results must hold perplexity rows with a finite nll; there is none")
    if measure.logarithmic:
        axes.set_yscale("log")
    for scheme, curve in estimates.items():
        x = list(curve)
        mean, low, high = (np.array(values) for values in zip(*curve.values(), strict=True))
        axes.plot(x, mean, **looks[scheme]._asdict(), label=label(scheme), markersize=4.5, linewidth=1.8, zorder=3)
        if len(estimates) > MOST_BANDS:
            _seeds_of_losses(axes, rows(results, "perplexity", scheme), looks[scheme], scheme, measure)
        elif np.isfinite(low).any():
            axes.fill_between(
                x, low, high, color=looks[scheme].color, alpha=0.13, linewidth=0, zorder=1, gid=f"interval:{scheme}"
            )
    tops = {scheme: max(point.mean for point in curve.values()) for scheme, curve in estimates.items()}
    lowest = min(point.mean for curve in estimates.values() for point in curve.values())
    highest = max(tops.values())
    if measure.logarithmic:
        cut = PERPLEXITY_RANGE * lowest
        axes.set_ylim(lowest / 1.1, min(highest * 1.1, cut))
        plain_log_ticks(axes)
    else:
        cut = lowest + measure.of(math.log(PERPLEXITY_RANGE))
        margin = (min(highest, cut) - lowest) / 10
        axes.set_ylim(lowest - margin, min(highest + margin, cut))
    positions = [position for curve in estimates.values() for position in curve]
    trained = _trained(results, {scheme: looks[scheme] for scheme in estimates})
    token_axis(axes, _powers_of_two(positions), min(positions), max(positions), trained, panel=panel)
    return {scheme: top for scheme, top in tops.items() if top > cut}


def _seeds_of_losses(axes: Axes, selected: Sequence[Row], look: Look, scheme: str, measure: LossMeasure) -> None:
    seeds = distinct(selected, "seed")
    for seed in seeds if len(seeds) > 1 else ():
        curve = measure.by_position(row for row in selected if row["seed"] == seed)
        _plot_seed(axes, list(curve), [point.mean for point in curve.values()], look, f"seed:{scheme}:{seed}")


def _plot_seed(axes: Axes, x: Sequence[float], y: Sequence[float], look: Look, gid: str) -> None:
    axes.plot(x, y, color=look.color, linestyle=look.linestyle, linewidth=0.7, alpha=0.5, gid=gid)


def loss_label(results: Results, looks: Looks, end: float | None) -> str:
    """What the axis of :func:`draw_losses` shows, in one line.

    Args:
        results: a results dictionary.
        looks: the schemes.
        end: where the axis ends, if curves go beyond it.
    """
    several = any(len(distinct(rows(results, "perplexity", scheme), "seed")) > 1 for scheme in looks)
    spread = "thin: single seeds" if len(looks) > MOST_BANDS else "bands: 95 % interval"
    notes = [spread] if several else []
    notes += [] if end is None else [f"axis ends at {quantity(end)}"]
    axis = loss_measure(results).axis
    return f"{axis} ({'; '.join(notes)})" if notes else axis


def training_key() -> Line2D:
    """Of the line at a training length, or of several, each in its scheme's colour where it is of one alone."""
    return Line2D([], [], color="#444444", linestyle=(0, (5, 3)), linewidth=1, label="training length")


def draw_thetas(axes: Axes, results: Results, looks: Looks, marker: Callable[[str, Row], str], *, size: float) -> None:
    """Shape β against θα of every Generalized Gaussian head, over the bands of BAM's clusters.

    Args:
        axes: where.
        results: a results dictionary.
        looks: the schemes.
        marker: the marker of a head, from its scheme and its row.
        size: of the clusters' names, which stand beside the bands, in points.
    """
    heads = [
        (scheme, row, number(row["parameters"]["beta"])) for scheme in looks for row in gaussian_heads(results, scheme)
    ]
    shapes = [shape for *_, shape in heads]
    bottom, top = min(-1.2, *shapes), max(0.6, *shapes)
    bottom, top = bottom - 0.06 * (top - bottom), top + 0.06 * (top - bottom)
    bands = (
        (0, top, "#fdf3dc", "local\nβ > 0"),
        (STRONG_RETRIEVAL, 0, "#e3f1ea", "retrieval\n−0.6 ≤ β ≤ 0"),
        (bottom, STRONG_RETRIEVAL, "#e2ecf7", "strong retrieval\nβ < −0.6"),
    )
    for lower, upper, colour, words in bands:
        axes.axhspan(lower, upper, color=colour, linewidth=0, zorder=0)
        axes.annotate(
            words, (1.02, (lower + upper) / 2), xycoords=("axes fraction", "data"), va="center", fontsize=size,
            color="#333333", annotation_clip=False,
        )  # fmt: skip
    axes.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    for scheme, row, shape in heads:
        axes.plot(
            number(row["parameters"]["theta_alpha"]), shape, color=looks[scheme].color, marker=marker(scheme, row),
            linestyle="none", markersize=6.5, alpha=0.75, markeredgecolor="white", markeredgewidth=0.5, zorder=3,
            gid=f"theta:{scheme}",
        )  # fmt: skip
    axes.set_ylim(bottom, top)
    # Heads that never moved would otherwise be spread over billionths.
    left, right = axes.get_xlim()
    missing = max(0.0, _NARROWEST_THETAS - (right - left)) / 2
    axes.set_xlim(left - missing, right + missing)


def logit_scale_bins(values: Mapping[str, Sequence[float]]) -> list[float]:
    """Bins for histograms of several schemes' logit scales."""
    everything = [s for scales in values.values() for s in scales]
    edges = np.histogram_bin_edges(everything, bins=min(30, round(2 * math.sqrt(len(everything)))))
    return [float(edge) for edge in edges]


def _trained(results: Results, looks: Looks) -> dict[int, str]:
    """The training lengths of schemes, each in its scheme's colour if each is of one alone, and there are several."""
    lengths = {training_length(results, scheme): one.color for scheme, one in looks.items()}
    return lengths if 1 < len(lengths) == len(looks) else dict.fromkeys(lengths, "#444444")


# ---- log-priors


def below_maximum(log_prior: Sequence[float | None]) -> np.ndarray:
    """A log-prior less its maximum, not below the cut; nan where there is none."""
    curve = np.array([number(value) for value in log_prior])
    if np.isnan(curve).all():
        return curve
    return np.maximum(curve - np.nanmax(curve), -DEPTH_OF_CUT)


def _nats_or_less(value: float, _: int) -> str:
    return f"{'≤ ' if value == -DEPTH_OF_CUT else ''}{value:g}".replace("-", "−")


def prior_axes(axes: Axes, farthest: int, words: str) -> None:
    """Tokens from 0, linear up to 1 and then logarithmic; nats below the maximum, likewise, to the cut.

    Args:
        axes: where.
        farthest: the last place that is drawn.
        words: what tokens are counted from.
    """
    tidy(axes)
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.6)
    axes.set_xlim(0, max(farthest, 1) * 1.1)
    powers = [4**k for k in range(_LARGEST_LOG_TICK) if 4**k <= farthest]
    axes.xaxis.set_major_locator(FixedLocator([0, *thin(powers, 6)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(words, fontsize=9)
    axes.set_yscale("symlog", linthresh=1, linscale=0.6)
    axes.set_ylim(-DEPTH_OF_CUT * 1.15, 0.12)
    axes.yaxis.set_major_locator(FixedLocator([0, -0.5, -1, -3, -10, -DEPTH_OF_CUT]))
    axes.yaxis.set_major_formatter(FuncFormatter(_nats_or_less))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8.5, labelbottom=True, labelleft=True)


def head_look(index: int, count: int) -> dict[str, Any]:
    """Heads are coloured along a scale of their own, as the schemes' colours mean schemes."""
    return {
        "color": colormaps["viridis"](0.85 * index / max(count - 1, 1)),  # its last part is lost on white
        "linestyle": ("-", "--", "-.")[index % 3],
        "linewidth": 1.6,
    }


# ---- figures and their parts


def require(results: Results, section: str, schemes: Iterable[str]) -> list[str]:
    """Those of some schemes that have rows in a section, of which there must be some."""
    present = schemes_with(results, section)
    return require_rows([scheme for scheme in schemes if scheme in present], section)


def require_rows(selected: list[Any], section: str, scheme: str | None = None) -> list[Any]:
    """Rows of a section, of which there must be some."""
    if not selected:
        whose = "" if scheme is None else f" of the scheme {scheme!r}"
        raise NothingToShowError(f"results[{section!r}] must hold rows{whose}; there is none")
    return selected


def start(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """A figure of one pair of axes, in inches."""
    figure = blank(height, width)
    axes = figure.add_subplot()
    tidy(axes)
    return figure, axes


def legend_below(figure: Figure, keys: Sequence[Artist], columns: int = 3) -> None:
    """A legend under the axes, which keep their height; where names are long it has fewer columns."""
    widest = max(len(str(key.get_label())) for key in keys)
    columns = max(1, min(columns, int(figure.get_figwidth() / (_KEY_WIDTH + _CHARACTER_WIDTH * widest))))
    lines = math.ceil(len(keys) / columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * lines)
    figure.legend(
        handles=list(keys),
        loc="outside lower center",
        ncols=min(columns, len(keys)),
        frameon=False,
        fontsize=9.5,
    )


def line_key(look: Look, name: str) -> Line2D:
    """The key of a curve."""
    return Line2D([], [], **look._asdict(), label=label(name), linewidth=1.8)


def _shares_with_intervals(axes: Axes, cells: Sequence[PasskeyCell], nudge: float, look: Look, *, hollow: bool) -> None:
    x, y, low, high = (
        np.array(values)
        for values in zip(
            *((cell.length * nudge, 100 * cell.share, 100 * cell.low, 100 * cell.high) for cell in cells),
            strict=True,
        )
    )
    axes.errorbar(
        x, y, yerr=(y - low, high - y), color=look.color, marker=look.marker, markersize=6,
        linestyle="none" if hollow else look.linestyle, markerfacecolor="white" if hollow else look.color,
        linewidth=1.8, elinewidth=1.2, capsize=2.5, zorder=3,
        label=f"{cells[0].scheme}, without stopped seeds" if hollow else cells[0].scheme,
    )  # fmt: skip


def log_token_axis(axes: Axes, ticks: Sequence[float], first: float, last: float, at_most: int) -> tuple[float, float]:
    """A log2 axis in tokens, written as plain numbers; where it begins and ends, a little beyond what it shows."""
    left, right = first / 1.25, last * 1.25
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    axes.xaxis.set_major_locator(FixedLocator(thin(ticks, at_most)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    return left, right


def token_axis(
    axes: Axes, ticks: Sequence[float], first: float, last: float, trained: Mapping[int, str], *, panel: bool
) -> None:
    """A log2 axis in tokens, and a line at each training length; multiples of a single one stand above, if they fit."""
    at_most = 6 if panel else 9
    left, right = log_token_axis(axes, ticks, min(first, *trained), max(last, *trained), at_most)
    for length, colour in trained.items():
        axes.axvline(length, color=colour, linestyle=(0, (5, 3)), linewidth=1, zorder=1, gid="training length")
    if len(trained) > 1 or panel:
        return
    (length,) = trained
    to_ratio: Callable[[Any], Any] = lambda tokens: tokens / length  # noqa: E731
    to_tokens: Callable[[Any], Any] = lambda ratio: ratio * length  # noqa: E731
    above = axes.secondary_xaxis("top", functions=(to_ratio, to_tokens))
    ratios = [2.0**k for k in range(-20, 21) if left <= 2.0**k * length <= right]
    above.xaxis.set_major_locator(FixedLocator(thin(ratios, at_most)))
    above.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{multiple(value)}×"))
    above.xaxis.set_minor_locator(NullLocator())
    above.set_xlabel(f"× training length (dashed: {length} tokens)")
    above.spines["top"].set_visible(False)


def _powers_of_two(values: Iterable[float]) -> list[float]:
    spread = sorted(values)
    return [2.0**k for k in range(_LARGEST_LOG_TICK) if spread[0] / 1.15 <= 2.0**k <= spread[-1] * 1.15]


def plain_log_ticks(axes: Axes) -> None:
    """Ticks at 1, 2, 5, 10, ... in plain numbers; evenly spaced ones where a log axis spans less, powers where more."""
    low, high = axes.get_ylim()
    powers = [10.0**k for k in range(-1, math.floor(math.log10(high)) + 1)]
    ticks = [tick for power in powers for digit in (1, 2, 5) if low <= (tick := digit * power) <= high]
    if len(ticks) > _MOST_LOG_TICKS:
        ticks = thin([power for power in powers if power >= low], 8)
    elif len(ticks) < 3:
        ticks = [tick for tick in MaxNLocator(nbins=6).tick_values(low, high) if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def nudges(count: int, lengths: Sequence[int]) -> list[float]:
    """A factor for each line, close to 1: together they fill under half of the closest two lengths' distance."""
    gaps = np.diff(np.log2(lengths))
    step = min(0.07, 0.4 * float(gaps.min()) / count) if gaps.size else 0.0
    return [2 ** ((index - (count - 1) / 2) * step) for index in range(count)]


def rough(value: float) -> str:
    """A large number in at most two significant digits."""
    return f"{float(f'{value:.1e}'):,.0f}".replace(",", " ") if value < 1e6 else f"{value:.0e}"
