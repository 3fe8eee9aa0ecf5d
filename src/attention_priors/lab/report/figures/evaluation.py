"""Figures of an evaluation: accuracy by length, length by depth, losses by position, how a genome goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from attention_priors.lab.evaluate import Accuracy, Continuation, Loss, Summary
from attention_priors.lab.report.figures.depths import depth_rows
from attention_priors.lab.report.figures.drawing import legend_below, log_token_axis, nudges, plain_log_ticks
from attention_priors.lab.report.figures.files import write_pngs
from attention_priors.lab.report.figures.style import COLOURS, blank, label, look, png, tidy
from attention_priors.lab.report.numbers import decimals, percent
from attention_priors.lab.report.selections.losses import PERPLEXITY, LossMeasure, measure_of_tokens
from attention_priors.lab.tasks import gc_correlation, gc_trajectory
from attention_priors.lab.tasks.completion import GC_WINDOW

_NAMES = "accuracy_by_length|heatmap_.+|perplexity_by_position|genome_completion"
"""Of files, without the ending."""
_BLUES = colormaps["Blues"]
_RIGHT_OR_WRONG = ListedColormap([COLOURS[1], COLOURS[2]])
_CROSS: dict[str, Any] = {"color": "black", "marker": "x", "linestyle": "none", "markeredgewidth": 1.3}
_NOT_MEASURED: dict[str, Any] = {"facecolor": "#e6e6e6", "edgecolor": "#b5b5b5", "hatch": "////", "linewidth": 0}


def write_evaluation_figures(summary: Summary, folder: Path) -> list[Path]:
    """Write every figure that there are results for as a PNG file; remove those that an earlier call has left.

    Args:
        summary: what :func:`~attention_priors.lab.evaluate.evaluate` gives.
        folder: where to; made if it is not there.

    Returns:
        The files.
    """
    figures: dict[str, Figure] = {}
    if summary.accuracies:
        figures["accuracy_by_length"] = accuracy_by_length(summary.accuracies)
    for task in dict.fromkeys(one.task for one in summary.accuracies if one.by_depth):
        figures[f"heatmap_{task}"] = depth_heatmap([one for one in summary.accuracies if one.task == task])
    curves = [
        one
        for one in summary.losses
        if one.task == "perplexity" and any(math.isfinite(place.nll) for place in one.by_position)
    ]
    if curves:
        figures["perplexity_by_position"] = perplexity_by_position(
            curves, measure_of_tokens(are_bases=summary.of_bases)
        )
    if summary.completions:
        figures["genome_completion"] = genome_completion(summary.completions[-1].pieces[0])
    return write_pngs(((name, png(figure)) for name, figure in figures.items()), folder, _NAMES)


def accuracy_by_length(accuracies: Sequence[Accuracy]) -> Figure:
    """Mean score of each task against length, with 95 % Wilson intervals.

    Points are moved sideways a little, so that intervals do not hide each other. A cross says that longer texts were
    left out.

    Args:
        accuracies: of any tasks, at least one.
    """
    tasks = list(dict.fromkeys(one.task for one in accuracies))
    lengths = sorted({one.length for one in accuracies})
    figure = blank(4.5)
    axes = figure.add_subplot()
    tidy(axes)
    keys: list[Artist] = []
    for index, (task, nudge) in enumerate(zip(tasks, nudges(len(tasks), lengths), strict=True)):
        mine = [one for one in accuracies if one.task == task]
        x = [one.length * nudge for one in mine]
        y = np.array([100 * one.mean for one in mine])
        low = y - [100 * one.interval.low for one in mine]
        high = [100 * one.interval.high for one in mine] - y
        # A mean at an end of its interval may stand beyond it by a rounding error.
        bars = np.maximum(0, [low, high])
        look_of = look(index)
        axes.errorbar(
            x, y, yerr=bars, **look_of._asdict(), markersize=6, linewidth=1.8, elinewidth=1.2, capsize=2.5, zorder=3
        )  # fmt: skip
        keys.append(Line2D([], [], **look_of._asdict(), linewidth=1.8, label=label(task)))
        if mine[-1].stopped:
            axes.plot(x[-1], y[-1], **_CROSS, markersize=10, zorder=5, gid=f"stopped:{task}")
    if any(one.stopped for one in accuracies):
        keys.append(Line2D([], [], **_CROSS, markersize=9, label="stopped: nothing right"))
    axes.set_ylim(-4, 104)
    axes.set_ylabel("mean score, % (bars: 95 % interval)")
    axes.set_xlabel("length of the text, tokens")
    log_token_axis(axes, lengths, lengths[0], lengths[-1], at_most=9)
    legend_below(figure, keys, columns=4)
    return figure


def depth_heatmap(accuracies: Sequence[Accuracy]) -> Figure:
    """Mean score at each depth and length of one task, in percent; means at the edges.

    Where lengths have other depths, or many, rows are tenths of the text.

    Args:
        accuracies: of one task at its lengths; some text must have a depth.
    """
    lengths = [one.length for one in accuracies]
    names, row_of = depth_rows([one.by_depth for one in accuracies])
    sums, counts = np.zeros((2, len(names), len(lengths)))
    for column, one in enumerate(accuracies):
        for place, found in one.by_depth.items():
            sums[row_of[place], column] += found.mean * found.trials
            counts[row_of[place], column] += found.trials

    shares = np.full((len(names) + 1, len(lengths) + 1), np.nan)
    shares[:-1, :-1] = _ratio(sums, counts)
    shares[-1, :-1] = _ratio(sums.sum(0), counts.sum(0))
    shares[:-1, -1] = _ratio(sums.sum(1), counts.sum(1))

    # Cells keep their size whatever their number, and the title its room.
    figure = blank(1.3 + 0.21 * len(shares), max(3.4, 1.2 + 0.4 * shares.shape[1]))
    axes = figure.add_subplot()
    columns, lines = (_places(size - 1) for size in reversed(shares.shape))
    for (i, j), share in np.ndenumerate(shares):
        corner = columns[j] - 0.5, lines[i] - 0.5
        if not math.isnan(share):
            colour = _BLUES(share)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=0.6))
            axes.text(
                columns[j], lines[i], percent(share), ha="center", va="center", fontsize=8,
                color="white" if share > 0.55 else "black",
            )  # fmt: skip
        elif (i, j) != (len(names), len(lengths)):  # every cell but the corner where the means meet
            axes.add_patch(Rectangle(corner, 1, 1, **_NOT_MEASURED, gid="not measured"))
    axes.set_xlim(0, columns[-1] + 0.5)
    axes.set_ylim(lines[-1] + 0.5, 0)
    axes.set_xticks(columns, [*map(str, lengths), "mean"], fontsize=8)
    if lengths[-1] > 9999:  # five digits are wider than a cell
        axes.tick_params(axis="x", rotation=90)
    axes.set_yticks(lines, [*names, "mean"], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("length of the text, tokens")
    axes.set_ylabel("depth of the answer, % of the text")
    # At the figure's edge, which the labels of the rows do not push it from.
    figure.suptitle(f"{label(accuracies[0].task)}: mean score, %", x=0.02, ha="left", fontsize=11, fontweight="bold")
    if np.isnan(shares[:-1, :-1]).any():
        legend_below(figure, [Patch(**_NOT_MEASURED, label="not measured")])
    return figure


def perplexity_by_position(losses: Sequence[Loss], measure: LossMeasure = PERPLEXITY) -> Figure:
    """Perplexity, or bits per base, in ranges of positions, each twice as long as the last; a line for each length.

    Args:
        losses: of texts of different lengths, at least one.
        measure: what is made of them.
    """
    figure = blank(4.5)
    axes = figure.add_subplot()
    tidy(axes)
    keys: list[Artist] = []
    for index, one in enumerate(losses):
        x, y = zip(*((place.position, measure.of(place.nll)) for place in one.by_position), strict=True)
        words = f"{one.documents} text{'s' * (one.documents > 1)} of {one.length} tokens"
        keys += axes.plot(x, y, **look(index)._asdict(), markersize=4.5, linewidth=1.8, label=words)
    positions = [place for one in losses for place, *_ in one.by_position]
    powers = [2.0**k for k in range(math.ceil(math.log2(max(positions))) + 1)]
    powers = [power for power in powers if power <= max(positions) * 1.15]
    log_token_axis(axes, powers, powers[0], max(positions), at_most=9)
    if measure.logarithmic:
        axes.set_yscale("log")
        plain_log_ticks(axes)
    axes.set_xlabel("position in the text, tokens")
    axes.set_ylabel(measure.axis)
    legend_below(figure, keys, columns=3)
    return figure


def genome_completion(piece: Continuation) -> Figure:
    """How a piece of a genome goes on: GC trajectories, and which bases are the true ones (GOAT, Figure 4c).

    Args:
        piece: the truth, and continuations.
    """
    figure = blank(3.2 + 0.2 * len(piece.found))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 0.2 * len(piece.found)))
    tidy(upper)
    middles = np.arange(len(piece.expected) - GC_WINDOW + 1) + (GC_WINDOW - 1) / 2
    upper.plot(middles, 100 * gc_trajectory(piece.expected), color="black", linewidth=2, label="truth", zorder=3)
    for index, found in enumerate(piece.found):
        r = gc_correlation(found, piece.expected)
        words = f"continuation {index + 1}" + ("" if r is None else f" (r = {decimals(r, 2)})")
        style = look(index)
        upper.plot(middles, 100 * gc_trajectory(found), color=style.color, linestyle=style.linestyle, label=words)
    upper.set_ylabel(f"GC, % of {GC_WINDOW} bases")
    same = np.array([[a == b for a, b in zip(found, piece.expected, strict=True)] for found in piece.found])
    lower.imshow(same, cmap=_RIGHT_OR_WRONG, vmin=0, vmax=1, aspect="auto", interpolation="nearest", gid="identity")
    lower.set_yticks(range(len(piece.found)), [f"{100 * row.mean():.0f} %" for row in same], fontsize=8)
    lower.tick_params(length=0)
    lower.spines[:].set_visible(False)
    lower.set_ylabel("identity", fontsize=9)
    lower.set_xlabel("base after the prompt")
    keys = [*upper.get_lines(), Patch(facecolor=_RIGHT_OR_WRONG(1.0), label="the true base"),
            Patch(facecolor=_RIGHT_OR_WRONG(0.0), label="another base")]  # fmt: skip
    legend_below(figure, keys, columns=3)
    return figure


# ---- what the figures share


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Means; nan where there is nothing."""
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)


def _places(count: int) -> list[float]:
    """Middles of cells side by side, and of one more, that a third of a cell sets apart."""
    return [*(index + 0.5 for index in range(count)), count + 5 / 6]
