"""Curves of schemes with intervals: scores, losses, attention and accuracies."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attention_priors.lab.report import estimates
from attention_priors.lab.report.comparisons import Comparison, panels
from attention_priors.lab.report.estimates import KINDS, LossMeasure, by_scheme, over, schemes_in
from attention_priors.lab.report.figures import layout, scales
from attention_priors.lab.report.figures.layout import Draw, Looks, figure_of_lines, line_key, training_key
from attention_priors.lab.report.figures.style import GREY, Look, label, tidy
from attention_priors.lab.report.wording import listing, multiple, quantity, rough
from attention_priors.lab.results import Frame, Results

PERPLEXITY_RANGE = 10.0
"""Upper end of the loss axis as a multiple of the lowest perplexity, so that failures do not squash other curves."""

MOST_BANDS = 6
"""Largest number of schemes with bands, or with bars and thin lines for seeds; more would hide each other."""

_PERCENT = (-4, 104)
_BREAK = {False: " ", True: "\n"}
"""Separator before a note on an axis, by whether the axis belongs to a panel."""
_LARGEST_SIGNAL = 256.0
"""End of the signal axis in nats; beyond it the prior has no influence."""
_NARROWEST = 0.01
"""Smallest range of an axis of excess losses, in nats."""
_ACCURACIES = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)


def _curve(axes: Axes, points: Frame, look: Look, name: str, band: bool = True, gid: str | None = None) -> None:
    """Draw a mean with a band for its interval."""
    options: dict[str, Any] = look._asdict() | {"markersize": 4.5, "linewidth": 1.8, "zorder": 3}
    axes.plot(points.x, points["mean"], label=label(name), gid=gid, **options)
    if band and points.low.notna().any():
        axes.fill_between(
            points.x, points.low, points.high, color=look.color, alpha=0.13, linewidth=0, zorder=1,
            gid=f"interval:{name}",
        )  # fmt: skip


def _bars(axes: Axes, points: Frame, look: Look, name: str, hollow: bool = False) -> None:
    """Draw a mean with bars for its interval."""
    # Rounding may put a mean slightly outside its interval.
    bars = np.maximum(0, np.nan_to_num([points["mean"] - points.low, points.high - points["mean"]]))
    axes.errorbar(
        points.x, points["mean"], yerr=bars, color=look.color, marker=look.marker, markersize=6,
        linestyle="none" if hollow else look.linestyle, markerfacecolor="white" if hollow else look.color,
        linewidth=1.8, elinewidth=1.2, capsize=2.5, zorder=3, label=label(name),
    )  # fmt: skip


def _seed(axes: Axes, x: Iterable[float], y: Iterable[float], look: Look, gid: str) -> None:
    """Draw a seed as a thin line."""
    axes.plot([*x], [*y], color=look.color, linestyle=look.linestyle, linewidth=0.7, alpha=0.5, gid=gid)


def _several_seeds(rows: Frame, names: Collection[str]) -> bool:
    return any(own.seed.nunique() > 1 for name, own in by_scheme(rows) if name in names)


def _trained(results: Results | None, shown: Looks) -> dict[int, str]:
    """Return training lengths with colours; if every scheme has its own length, the schemes' colours."""
    if results is None:
        return {}
    found = {results.context_length(name): one.color for name, one in shown.items()}
    return found if 1 < len(found) == len(shown) else dict.fromkeys(found, "#444444")


# ---- scores


def scores_by_length(
    results: Results,
    rows: Frame,
    title: str = "",
    measure: str = "pass keys retrieved",
    compared: Sequence[Comparison] | None = None,
) -> Figure | None:
    """Draw shares against length, with 95 % Wilson intervals.

    Up to :data:`MOST_BANDS` schemes have a thin line for each seed too.

    Args:
        results: Results that contain the rows.
        rows: Retrieval rows of one task.
        title: Title of the figure.
        measure: Name of the shares.
        compared: see :func:`~attention_priors.lab.report.figures.layout.figure_of`.
    """
    draw = draw_scores(rows, estimates.stopped(results, rows), measure, results)
    return layout.figure_of(results, schemes_in(rows), draw, title, compared)


def draw_scores(rows: Frame, stops: Collection[tuple[str, int]], measure: str, results: Results | None = None) -> Draw:
    """Return a function that draws shares against length.

    Points are shifted sideways slightly, so that intervals do not hide each other.

    Args:
        rows: Retrieval rows. The column ``scheme`` names the lines.
        stops: Lines and seeds that end with a cross. Their evaluation stopped before the longest texts.
        measure: Name of the shares.
        results: Results with training lengths. None draws no training lengths.
    """

    def draw(axes: Axes, shown: Looks, panel: bool) -> list[Artist]:
        cells = estimates.shares_by_length(rows[rows.scheme.isin([*shown])])
        lengths = sorted(cells.length.unique())
        crosses = False
        nudges = scales.nudges(len(shown), lengths)
        for (name, look), nudge in zip(shown.items(), nudges, strict=True):
            points = cells[cells.scheme == name]
            points = points.assign(x=nudge * points.length, mean=points.share)
            points[["mean", "low", "high"]] *= 100
            # A length evaluated with only some seeds does not continue the line of all seeds.
            for complete, own in points.groupby("complete", sort=False):
                _bars(axes, own, look, name if complete else f"{name}, without stopped seeds", hollow=not complete)
            of_seeds = estimates.shares(rows[rows.scheme == name], "seed", "length")
            for seed, own in of_seeds.groupby("seed"):
                x, y = nudge * own.length, 100 * own.share
                if of_seeds.seed.nunique() > 1 and len(shown) <= MOST_BANDS:
                    _seed(axes, x, y, look, f"seed:{name}:{seed}")
                if (name, seed) in stops:
                    crosses = True
                    axes.plot(x.iloc[-1], y.iloc[-1], **_CROSS, markersize=10, zorder=5, gid=f"stopped:{name}:{seed}")
        axes.set_ylim(*_PERCENT)
        axes.set_ylabel(f"{measure}, %{_BREAK[panel]}(bars: 95 % interval)", fontsize=9 if panel else None)
        axes.set_xlabel("context length, tokens", fontsize=9 if panel else None)
        ends = nudges[0] * lengths[0], nudges[-1] * lengths[-1]
        scales.token_axis(axes, lengths, ends, _trained(results, shown), panel)
        keys: list[Artist] = [Line2D([], [], **_CROSS, markersize=9, label="stopped here")] if crosses else []
        if not cells.complete.all():
            keys.append(Line2D([], [], **_HOLLOW, label="without stopped seeds"))
        return [*keys, training_key()] if panel else keys

    return draw


_CROSS: dict[str, Any] = {"color": "black", "marker": "x", "linestyle": "none", "markeredgewidth": 1.3}
_HOLLOW: dict[str, Any] = {"color": GREY, "marker": "o", "linestyle": "none", "markerfacecolor": "white"}


# ---- losses


def losses_by_position(
    results: Results, rows: Frame, title: str = "", compared: Sequence[Comparison] | None = None
) -> Figure | None:
    """Draw perplexity, or bits per base, against position.

    Bands are Student's 95 % intervals over seeds. With more than :data:`MOST_BANDS` schemes, each seed is a thin line
    instead.

    Args:
        results: Results that contain the rows.
        rows: Perplexity rows of one task and length.
        title: Title of the figure.
        compared: see :func:`~attention_priors.lab.report.figures.layout.figure_of`.
    """
    measure = estimates.loss_measure(results)
    found = {name: measure.by_position(own) for name, own in by_scheme(rows)}
    draw = draw_losses(rows, measure, results)
    return layout.figure_of(results, [name for name, points in found.items() if len(points)], draw, title, compared)


def draw_losses(rows: Frame, measure: LossMeasure, results: Results | None = None) -> Draw:
    """Return a function that draws losses against position.

    Args:
        rows: Perplexity rows. The column ``scheme`` names the lines, each with a finite loss.
        measure: Measure of the losses.
        results: Results with training lengths. None draws no training lengths.
    """

    def draw(axes: Axes, shown: Looks, panel: bool) -> list[Artist]:
        curves = {name: measure.by_position(rows[rows.scheme == name]) for name in shown}
        for name, points in curves.items():
            _curve(axes, points, shown[name], name, band=len(curves) <= MOST_BANDS)
            own = rows[rows.scheme == name]
            if len(curves) > MOST_BANDS and own.seed.nunique() > 1:
                for seed, of_seed in own.groupby("seed"):
                    one = measure.by_position(of_seed)
                    _seed(axes, one.x, one["mean"], shown[name], f"seed:{name}:{seed}")
        cut = _loss_axis(axes, measure, pd.concat([*curves.values()])["mean"])
        beyond = {name: points["mean"].max() for name, points in curves.items() if points["mean"].max() > cut}
        spread = "thin: single seeds" if len(shown) > MOST_BANDS else "bands: 95 % interval"
        notes = [spread] if _several_seeds(rows, shown) else []
        notes += [f"axis ends at {quantity(axes.get_ylim()[1])}"] if beyond else []
        words = f"{_BREAK[panel]}({'; '.join(notes)})" if notes else ""
        axes.set_ylabel(measure.words["axis"] + words, fontsize=8.5 if panel else None)
        axes.set_xlabel("position in the text, tokens", fontsize=9 if panel else None)
        if beyond and not panel:
            names = listing([f"{label(name)} (up to {rough(highest)})" for name, highest in beyond.items()])
            axes.set_title(textwrap.fill(f"Beyond the axis: {names}", 92), loc="left", fontsize=9)
        ends = min(points.x.min() for points in curves.values()), max(points.x.max() for points in curves.values())
        scales.token_axis(axes, scales.powers_of_two(*ends), ends, _trained(results, shown), panel)
        return [training_key()] if panel else []

    return draw


def _loss_axis(axes: Axes, measure: LossMeasure, means: Any) -> float:
    """Set the limits of a loss axis, and return the cut above which losses lie beyond the axis."""
    lowest, highest = means.min(), means.max()
    if measure.logarithmic:
        cut = PERPLEXITY_RANGE * lowest
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.1, min(highest * 1.1, cut))
        scales.plain_log_ticks(axes)
    else:
        cut = lowest + measure.of(math.log(PERPLEXITY_RANGE))
        margin = (min(highest, cut) - lowest) / 10
        axes.set_ylim(lowest - margin, min(highest + margin, cut))
    return cut


def copying_by_length(results: Results) -> Figure | None:
    """Draw the loss above the optimum against row length: for each kind of token, or in the recipe's panels for all."""
    rows = results["copying"]
    if panels(results):
        every = rows[rows.kind == "all"].assign(excess=lambda own: own.nll - own.optimal_nll)
        return _means_by_length(results, every, "excess", "loss above the optimum's,\nnats per token", None)
    shown = layout.overview_looks(results, schemes_in(rows))
    if not shown:
        return None
    lengths = sorted(rows.length.unique())
    spread = " (bands: 95 % interval)" if _several_seeds(rows, shown) else ""
    figure, grid = layout.panel_grid(len(KINDS), 2, 3.3, base=0, sharex=True)
    for axes, (kind, words) in zip(grid, KINDS.items(), strict=True):
        tidy(axes)
        curves = {name: estimates.points(estimates.excess_losses(rows[rows.scheme == name], kind)) for name in shown}
        for name, points in curves.items():
            _curve(axes, points, shown[name], name, gid=f"copying:{kind}:{name}")
        # Ignore bands: those of two seeds would squash all curves.
        means = [0.0, *pd.concat([*curves.values()])["mean"].dropna()]
        margin = 0.08 * (max(means) - min(means)) or _NARROWEST
        axes.set_ylim(min(means) - margin, max(means) + margin)
        axes.axhline(0, color="black", linewidth=0.8, zorder=2)
        scales.token_axis(axes, lengths, (lengths[0], lengths[-1]), _trained(results, shown), True)
        axes.tick_params(labelsize=8.5)
        axes.set_title(words, loc="left", fontsize=10)
        axes.set_xlabel("length of the row, tokens" if axes in grid[2:] else "", fontsize=9)
        axes.set_ylabel(f"loss above the optimum's,\nnats per token{spread}" if axes in grid[::2] else "", fontsize=9)
    layout.legend_below(figure, [*(line_key(one, name) for name, one in shown.items()), training_key()], columns=4)
    return figure


# ---- margins and attention


def margins_by_length(results: Results, rows: Frame, title: str = "") -> Figure | None:
    """Draw the answers' smallest margins: mean over seeds, and thin lines for single seeds.

    Args:
        results: Results that contain the rows.
        rows: Retrieval rows of one task. Rows without a margin are left out.
        title: Title of the figure.
    """
    rows = rows[rows.margin.notna()]
    rows = rows.assign(total=rows.margin * rows.trials)
    sums = rows.groupby(["scheme", "seed", "length"], observed=True)[["total", "trials"]].sum().reset_index()
    sums["margin"] = sums.total / sums.trials
    return _means_by_length(results, sums, "margin", "smallest margin of an answer, logits", None, title)


def needle_weight_by_length(results: Results, plan: str) -> Figure | None:
    """Draw the leading head's weight on the pass key: mean over seeds, and thin lines for single seeds."""
    rows = results["needle_weight"]
    rows = estimates.leading_heads(rows[rows.plan == plan])
    rows = rows.assign(weight=100 * rows.weight)
    return _means_by_length(results, rows, "weight", "attention on the pass key, %", _PERCENT)


def _means_by_length(
    results: Results, rows: Frame, column: str, words: str, limits: tuple[float, float] | None, title: str = ""
) -> Figure | None:
    """Draw a column's mean over seeds against length, and thin lines for single seeds."""

    def draw(axes: Axes, shown: Looks, panel: bool) -> list[Artist]:
        for name, look in shown.items():
            own = rows[rows.scheme == name]
            points = estimates.points(over(own, "length", column))
            _curve(axes, points, look, name, band=False, gid=f"{column}:{name}")
            for seed, of_seed in own.groupby("seed") if own.seed.nunique() > 1 else ():
                _seed(axes, of_seed.length, of_seed[column], look, f"seed:{name}:{seed}")
        if limits is None:
            axes.axhline(0, color="black", linewidth=0.8, zorder=2)
        else:
            axes.set_ylim(*limits)
        notes = "\n(thin: single seeds)" if _several_seeds(rows, shown) else ""
        axes.set_ylabel(words + notes, fontsize=9 if panel else None)
        axes.set_xlabel("length of the text, tokens", fontsize=9 if panel else None)
        lengths = sorted(rows.length.unique())
        scales.token_axis(axes, lengths, (lengths[0], lengths[-1]), _trained(results, shown), panel)
        return [training_key()]

    return layout.figure_of(results, schemes_in(rows), draw, title)


def sink_mass(results: Results) -> Figure | None:
    """Draw the first token's attention weight against the signal, as in GOAT's Figure 2c.

    For each seed, the figure shows the head with the largest weight at the weakest signal. Roles differ between layers,
    so a mean over heads would be uninformative. Each point is one factor on the content logits, with signal and weight
    as means over seeds. The band is Student's 95 % interval of the weight.
    """
    rows = estimates.leading_heads(results["sink_mass"], "factor", "mass")

    def draw(axes: Axes, shown: Looks, panel: bool) -> list[Artist]:
        largest = 1.0
        for name, look in shown.items():
            own = rows[rows.scheme == name].assign(mass=lambda found: 100 * found.mass)
            points = estimates.points(over(own, "factor", "mass"))
            points[["low", "high"]] = points[["low", "high"]].clip(0, 100)
            as_it_is, points["x"] = points.x == 1, [*own.groupby("factor").signal.mean()]
            _curve(axes, points, look, name, gid=f"sink:{name}")
            axes.plot(points.x[as_it_is], points["mean"][as_it_is], **_RING)
            largest = max(largest, points.x.max())
        largest = min(largest, _LARGEST_SIGNAL)
        axes.set_ylim(*_PERCENT)
        axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.7)
        axes.set_xlim(-0.1, largest * 1.15)
        powers = scales.thin([2.0**k for k in range(30) if 2.0**k <= largest], 6)
        scales.set_ticks(axes.xaxis, [0, *powers], "{:g}".format)
        axes.set_xlabel("signal ω: range of the content logits that a query sees, nats")
        spread = " (bands: 95 % interval)" if _several_seeds(rows, shown) else ""
        axes.set_ylabel(f"weight of the first token, %{spread}")
        return [Line2D([], [], **_RING, label="the model as it is")]

    return figure_of_lines(layout.overview_looks(results, schemes_in(rows)), draw, columns=4)


_RING: dict[str, Any] = {"marker": "o", "markersize": 10, "mfc": "none", "color": "black", "linestyle": "none"}


# ---- images


def accuracy_by_size(results: Results) -> Figure | None:
    """Draw test accuracy against image size (GOAT, Figure 5a).

    The logit scale separates 97 % from 99 % as well as it shows 20 %. Accuracies of 0 and 100 % are drawn half an image
    from these ends.
    """
    rows = results["accuracy"]
    rows = rows.assign(share=rows.correct / rows.trials)

    def draw(axes: Axes, shown: Looks, panel: bool) -> list[Artist]:
        edge, sizes = 0.5 / rows.trials.min(), sorted(rows["size"].unique())
        for place, (name, look) in enumerate(shown.items()):
            points = estimates.points(over(rows[rows.scheme == name], "size", "share"))
            points[["mean", "low", "high"]] = points[["mean", "low", "high"]].clip(edge, 1 - edge)
            _bars(axes, points.assign(x=points.x * 1.02 ** (place - (len(shown) - 1) / 2)), look, name)
        trained = results.study["recipe"]["model"]["image_size"]
        axes.axvline(trained, color="#999999", linewidth=1, linestyle=":", zorder=0)
        axes.set_xscale("log", base=2)
        scales.set_ticks(axes.xaxis, sizes, lambda value: f"{value:.0f}\n{multiple(value / trained)}×")
        axes.set_yscale("logit")
        lowest, highest = axes.dataLim.intervaly
        bottom = max((share for share in _ACCURACIES if share < lowest), default=edge / 2)
        axes.set_ylim(bottom, min((share for share in _ACCURACIES if share > highest), default=1 - edge / 2))
        scales.set_ticks(axes.yaxis, _ACCURACIES, lambda value: f"{100 * value:g}")
        axes.set_xlabel("side of the images, pixels, and times that of training")
        axes.set_ylabel("classified right, %" + (" (bars: 95 % over seeds)" if _several_seeds(rows, shown) else ""))
        return []

    return figure_of_lines(layout.overview_looks(results, schemes_in(rows)), draw)
