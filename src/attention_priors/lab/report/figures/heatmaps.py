"""Shares by depth and length, and shares of axis values at the longest length."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from attention_priors.lab.report.comparisons import Comparison
from attention_priors.lab.report.estimates import shares, shares_by_length
from attention_priors.lab.report.figures.layout import legend_below
from attention_priors.lab.report.figures.style import COLOURS, GREY, blank, label, start, tidy
from attention_priors.lab.report.table import ABSENT
from attention_priors.lab.report.wording import percent
from attention_priors.lab.results import Frame

_MOST_DEPTHS = 20
_BANDS = 10
_CHARACTERS_PER_INCH = 8.5
"""Width of a bold title."""
_NOT_EVALUATED: dict[str, Any] = {"facecolor": "#e6e6e6", "edgecolor": "#b5b5b5", "hatch": "////", "linewidth": 0}
_LINE_HEIGHT = 0.2
"""Height of a line in inches."""
_SEEDS_APART = 0.2
"""Vertical offset of seeds as a share of a line's height, so that equal shares stay visible."""


def depth_rows(measured: Sequence[Collection[float]]) -> tuple[list[str], dict[float, int]]:
    """Return the row labels of a heatmap, and the row of each depth.

    Each depth has its own row if all texts share the same depths, at most 20. Otherwise, for example if a task draws
    its depths, each row covers a tenth of the text.

    Args:
        measured: Depths, from 0 to 1, of one model's texts at each length.
    """
    depths = sorted({depth for found in measured for depth in found})
    if len(depths) <= _MOST_DEPTHS and all(len({*found}) == len(depths) for found in measured):
        return [f"{100 * depth:.0f}" for depth in depths], {depth: row for row, depth in enumerate(depths)}
    step = 100 // _BANDS
    names = [f"{start}–{start + step}" for start in range(0, 100, step)]
    # Round first: a computed depth may be slightly below the exact tenth.
    return names, {depth: min(int(round(_BANDS * depth, 6)), _BANDS - 1) for depth in depths}


def depth_heatmap(rows: Frame, scheme: str, title: str, trained: int | None = None) -> Figure | None:
    """Draw the share at each depth and length in percent, pooled over seeds, with means at the edges.

    Means over lengths are shown only if every seed was evaluated at all lengths. A mean of shorter lengths would
    flatter a scheme that stopped.

    Args:
        rows: Retrieval rows of one task. Rows of all schemes give their heatmaps the same axes.
        scheme: Scheme to draw.
        title: Title of the figure.
        trained: Training length in tokens; None for no line.
    """
    rows = rows[rows.depth.notna()]
    if not len(rows[rows.scheme == scheme]):
        return None
    lengths = sorted(rows.length.unique())
    texts = rows.groupby(["scheme", "seed", "length"], observed=True).depth
    depths, row_of = depth_rows([set(found) for _, found in texts])
    own = rows[rows.scheme == scheme].assign(row=lambda found: found.depth.map(row_of))
    seeds_at = own.groupby("length").seed.nunique().reindex(lengths, fill_value=0)
    partly = {length for length, count in seeds_at.items() if 0 < count < own.seed.nunique()}
    table = np.full((len(depths) + 1, len(lengths) + 1), np.nan)
    table[:-1, :-1] = _table(shares(own, "row", "length"), len(depths), lengths)
    table[-1, :-1] = _table(shares(own, "length").assign(row=0), 1, lengths)
    if (seeds_at == own.seed.nunique()).all():
        table[:-1, -1] = _table(shares(own, "row").assign(length=0), len(depths), [0]).ravel()

    # Cells have a constant size.
    width = max(3.4, 1.2 + 0.4 * len(table.T))
    title_lines = textwrap.wrap(label(title), round(_CHARACTERS_PER_INCH * width))
    figure, axes = start(width=width, height=1.4 + 0.21 * len(table) + 0.17 * (len(title_lines) - 1))
    columns, lines = (_middles(size) for size in reversed(table.shape))
    for (i, j), share in np.ndenumerate(table):
        cell = Rectangle((columns[j] - 0.5, lines[i] - 0.5), 1, 1)
        if not math.isnan(share):
            cell.update({"facecolor": colormaps["Blues"](share), "edgecolor": "white", "linewidth": 0.6})
            axes.add_patch(cell)
            _write(axes, columns[j], lines[i], percent(share), "white" if share > 0.55 else "black")
        elif j < len(lengths):
            cell.update(_NOT_EVALUATED | {"gid": "not evaluated"})
            axes.add_patch(cell)
        elif i < len(depths):  # means, except the corner where they meet
            _write(axes, columns[j], lines[i], ABSENT, "black")
    keys: list[Artist] = []
    if trained is not None:
        within = sum(length <= trained for length in lengths)
        for colour, wide, dashes in (("white", 4.0, "-"), ("black", 1.4, (0, (5, 3)))):
            axes.plot([within, within], [0, len(depths)], color=colour, linewidth=wide, linestyle=dashes)
        keys.append(Line2D([], [], color="black", linestyle="--", label=f"training length, {trained} tokens"))
    axes.set_xlim(0, columns[-1] + 0.5)
    axes.set_ylim(lines[-1] + 0.5, 0)
    axes.set_xticks(columns, [*(f"{length}†" if length in partly else str(length) for length in lengths), "mean"])
    # Numbers of five digits are wider than a cell.
    axes.tick_params(axis="x", labelsize=8, rotation=90 if lengths[-1] > 9999 else 0)
    axes.set_yticks(lines, [*depths, "mean"], fontsize=8)
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("depth of the answer,\n% of the text")
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_title("\n".join(title_lines), loc="left", fontsize=11, fontweight="bold")
    if np.isnan(table[:-1, :-1]).any():
        keys.append(Patch(**_NOT_EVALUATED, label="not evaluated"))
    if partly:
        keys.append(Line2D([], [], linestyle="none", label="†: without seeds that had stopped"))
    if keys:
        legend_below(figure, keys)
    return figure


def _table(cells: Frame, lines: int, lengths: Sequence[int]) -> np.ndarray:
    """Return shares by row and length; nan where missing."""
    table = cells.pivot(index="row", columns="length", values="share")
    return table.reindex(index=range(lines), columns=lengths).to_numpy()


def _middles(count: int) -> list[float]:
    """Return the centres of adjacent cells, with a gap of a third of a cell before the last."""
    return [*(index + 0.5 for index in range(count - 1)), count - 1 + 5 / 6]


def _write(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)


def longest_by_axis(compared: Sequence[Comparison], rows: Frame) -> Figure | None:
    """Draw the share of right answers at the longest length, with one line per value of each comparison.

    This figure separates values whose curves overlap.

    Args:
        compared: Comparisons to draw.
        rows: Retrieval rows of one task.
    """
    shown = [(one, [name for name in one.values if name in {*rows.scheme}]) for one in compared]
    shown = [(one, names) for one, names in shown if len(names) > 1]
    if not shown:
        return None
    rows = rows[rows.scheme.isin([name for _, names in shown for name in names])]
    longest = rows.length.max()
    reached = {cell.scheme: cell for cell in shares_by_length(rows).itertuples() if cell.length == longest}
    figure = blank(0.8 + _LINE_HEIGHT * sum(1 + len(names) for _, names in shown))
    axes = figure.subplots()
    lines, titles = list[str](), list[int]()
    keys: dict[str, Artist] = {}
    for one, names in shown:
        if one.base in reached:
            ends = (len(lines) + 0.6, len(lines) + len(names) + 0.4)
            options: dict[str, Any] = {"color": COLOURS[1], "linestyle": ":", "linewidth": 1.3, "label": "base"}
            axes.plot([100 * reached[one.base].share] * 2, ends, **options, zorder=1, gid=f"base:{one.title}")
            keys["base"] = Line2D([], [], **options)
        titles.append(len(lines))
        lines.append(label(one.title))
        for name in names:
            if name in reached:
                keys |= _draw_share(axes, reached[name], len(lines), COLOURS[name == one.base])
            keys |= _draw_seeds(axes, rows[rows.scheme == name], name, longest, len(lines))
            lines.append(label(one.values[name]))
    tidy(axes)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_yticks(range(len(lines)), lines, fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    for line in titles:
        axes.get_yticklabels()[line].set_fontweight("bold")
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(-3, 103)
    axes.set_xlabel(f"pass keys retrieved, %, at {longest} tokens")
    legend_below(figure, [*keys.values()])
    return figure


def _draw_share(axes: Axes, cell: Any, line: int, color: str) -> dict[str, Artist]:
    mean, face = 100 * cell.share, color if cell.complete else "white"
    dot: dict[str, Any] = {"marker": "o", "linestyle": "none"}
    ends = [[mean - 100 * cell.low], [100 * cell.high - mean]]
    look = dot | {"color": color, "mfc": face, "markersize": 6.5, "elinewidth": 1.3, "capsize": 2.5, "zorder": 3}
    axes.errorbar([mean], [line], xerr=ends, label=cell.scheme, **look)
    words = "all seeds, 95 % interval over texts" if cell.complete else "without stopped seeds"
    return {words: Line2D([], [], color=GREY, mfc=GREY if cell.complete else "white", label=words, **dot)}


def _draw_seeds(axes: Axes, rows: Frame, scheme: str, longest: int, line: int) -> dict[str, Artist]:
    """Draw a tick for each seed evaluated at the longest length, and a cross for each seed that stopped before."""
    of_seeds = shares(rows, "seed", "length").groupby("seed").last()
    keys: dict[str, Artist] = {}
    for cell, nudge in zip(of_seeds.itertuples(), np.linspace(-_SEEDS_APART, _SEEDS_APART, len(of_seeds)), strict=True):
        marker, words = ("|", "one seed") if cell.length == longest else ("x", "one seed, where it was asked last")
        options: dict[str, Any] = {"color": "black", "marker": marker, "linestyle": "none", "markersize": 4}
        axes.plot([100 * cell.share], [line + nudge], **options, zorder=4, gid=f"seed:{scheme}:{cell.Index}")
        keys[words] = Line2D([], [], **options, label=words)
    return keys if len(of_seeds) > 1 or "one seed" not in keys else {}
