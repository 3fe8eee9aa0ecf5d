"""What each value along each axis comes to at the longest length: one line of a chart per value."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attention_priors.lab.report.figures.by_axis import along, compared_in
from attention_priors.lab.report.figures.drawing import legend_below
from attention_priors.lab.report.figures.style import COLOURS, GREY, blank, label, tidy
from attention_priors.lab.report.selections.passkeys import PasskeyCell, passkey_table
from attention_priors.lab.report.selections.results import Results, count_passkeys, distinct, rows, schemes_with

_LINE_HEIGHT = 0.2
"""Inches."""
_SEEDS_APART = 0.2
"""Of a line's height, around its middle: seeds of the same share stay apart."""


def longest_by_axis(results: Results, axis: str | None = None) -> Figure:
    """The share of pass keys retrieved at the longest length: a line of the chart for each value of each comparison.

    Of many values along one axis this shows what curves hide behind each other.

    Args:
        results: a results dictionary.
        axis: the axis whose comparisons to show; all of them by default.

    Raises:
        NothingToShowError: there is nothing to compare.
    """
    compared = compared_in(along(results, axis), schemes_with(results, "passkey"), "passkey")
    schemes = {scheme for _, shown in compared for scheme in shown}
    cells = [cell for cell in passkey_table(results) if cell.scheme in schemes]
    longest = max(cell.length for cell in cells)
    reached = {cell.scheme: cell for cell in cells if cell.length == longest}
    names: list[str] = []
    figure = blank(0.8 + _LINE_HEIGHT * sum(1 + len(shown) for _, shown in compared))
    axes = figure.subplots()
    keys: dict[str, Artist] = {}
    titles = []
    for comparison, shown in compared:
        titles.append(len(names))
        names.append(label(comparison.title))
        base = None if comparison.base is None else reached.get(comparison.base)
        if base is not None:
            ends = (titles[-1] + 0.6, titles[-1] + len(shown) + 0.4)
            options: dict[str, Any] = {"color": COLOURS[1], "linestyle": ":", "linewidth": 1.3, "label": "base"}
            axes.plot([100 * base.share] * 2, ends, **options, zorder=1, gid=f"base:{comparison.title}")
            keys["base"] = Line2D([], [], **options)
        for scheme in shown:
            color = COLOURS[1] if scheme == comparison.base else COLOURS[0]
            if scheme in reached:
                keys |= _draw_share(axes, reached[scheme], len(names), color)
            keys |= _draw_seeds(axes, results, scheme, longest, len(names))
            names.append(label(comparison.values[scheme]))
    _lines(axes, names, titles)
    axes.set_xlabel(f"pass keys retrieved, %, at {longest} tokens")
    legend_below(figure, list(keys.values()))
    return figure


def _draw_share(axes: Axes, cell: PasskeyCell, line: int, color: str) -> dict[str, Artist]:
    mean, low, high = 100 * cell.share, 100 * cell.low, 100 * cell.high
    face = color if cell.complete else "white"
    axes.errorbar(
        [mean], [line], xerr=[[mean - low], [high - mean]], color=color, marker="o", markersize=6.5, linestyle="none",
        markerfacecolor=face, elinewidth=1.3, capsize=2.5, zorder=3, label=cell.scheme,
    )  # fmt: skip
    words = "all seeds, 95 % interval over texts" if cell.complete else "without stopped seeds"
    face = GREY if cell.complete else "white"
    key = Line2D([], [], color=GREY, marker="o", linestyle="none", markerfacecolor=face, label=words)
    return {words: key}


def _draw_seeds(axes: Axes, results: Results, scheme: str, longest: int, line: int) -> dict[str, Artist]:
    """A tick for each seed that was evaluated at the longest length, and a cross for each that was not."""
    selected = rows(results, "passkey", scheme)
    seeds = distinct(selected, "seed")
    keys: dict[str, Artist] = {}
    for seed, nudge in zip(seeds, np.linspace(-_SEEDS_APART, _SEEDS_APART, len(seeds)), strict=True):
        counts = count_passkeys((row for row in selected if row["seed"] == seed), "length")
        (length,), count = max(counts.items())
        marker, words = ("|", "one seed") if length == longest else ("x", "one seed, where it was asked last")
        options: dict[str, Any] = {
            "color": "black",
            "marker": marker,
            "linestyle": "none",
            "markersize": 4,
            "markeredgewidth": 1.1,
        }
        axes.plot([100 * count.share], [line + nudge], **options, zorder=4, gid=f"seed:{scheme}:{seed}")
        keys[words] = Line2D([], [], **options, label=words)
    return keys if len(seeds) > 1 or "one seed" not in keys else {}


def _lines(axes: Axes, names: list[str], titles: list[int]) -> None:
    tidy(axes)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    for line in titles:
        axes.get_yticklabels()[line].set_fontweight("bold")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(-3, 103)
