"""Schemes on one pair of axes, or in panels of those that are compared, each with its legend."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from attention_priors.lab.report.comparisons import Comparison, overview, panels
from attention_priors.lab.report.figures.style import Look, blank, label, look, looks, start, tidy, titled
from attention_priors.lab.results import Results

Looks = Mapping[str, Look]
"""The schemes that are drawn, in order, and how."""

Draw = Callable[[Axes, Looks, bool], list[Artist]]
"""Draws schemes on axes, which may be those of a panel; returns keys of the legend beside those of the schemes."""

Key = Callable[[Look, str], Artist]
"""Makes a scheme's key of the legend."""

_LONG_NAME = 18
"""Characters."""
_LEGEND_LINE = 0.17
"""Inches."""
_KEY_WIDTH, _CHARACTER_WIDTH = 0.5, 0.072
"""Inches, of a legend's keys and characters."""


def line_key(look: Look, name: str) -> Line2D:
    """Return the key of a curve."""
    return Line2D([], [], **look._asdict(), label=label(name), linewidth=1.8)


def training_key() -> Line2D:
    """Return the key of the line at a training length."""
    return Line2D([], [], color="#444444", linestyle=(0, (5, 3)), linewidth=1, label="training length")


def figure_of(
    results: Results,
    schemes: Collection[str],
    draw: Draw,
    title: str = "",
    compared: Sequence[Comparison] | None = None,
    key: Key = line_key,
) -> Figure | None:
    """Draw schemes in panels where they are compared, or the schemes of the overview on one pair of axes.

    Args:
        results: Results that have the schemes.
        schemes: The schemes that there is something to draw of.
        draw: Draws schemes on axes.
        title: Title of the figure.
        compared: What is compared, a panel for each two schemes or more; by default the recipe's panels.
        key: Makes the schemes' keys of the legends.

    Returns:
        None where there is nothing to draw.
    """
    least = 1 if compared is None else 2
    shown = [(one, [name for name in one.values if name in schemes]) for one in compared or panels(results)]
    shown = [(one, names) for one, names in shown if len(names) >= least]
    if shown:
        figure = _in_panels(shown, draw, key)
    elif compared is not None:
        return None
    else:
        figure = figure_of_lines(overview_looks(results, schemes), draw, key=key)
    return titled(figure, title) if figure and title else figure


def overview_looks(results: Results, schemes: Collection[str]) -> dict[str, Look]:
    """Return the looks of those of some schemes that the overview shows."""
    look_of = looks(results)
    return {name: look_of[name] for name in overview(results) if name in schemes}


def figure_of_lines(shown: Looks, draw: Draw, columns: int = 3, key: Key = line_key) -> Figure | None:
    """Draw lines on one pair of axes; return None where there are none."""
    if not shown:
        return None
    figure, axes = start(4.5)
    keys = draw(axes, shown, False)
    legend_below(figure, [*(key(look, name) for name, look in shown.items()), *keys], columns)
    return figure


def legend_below(figure: Figure, keys: Sequence[Artist], columns: int = 3) -> None:
    """Put a legend under the axes, which keep their height; where names are long it has fewer columns."""
    widest = max(len(str(key.get_label())) for key in keys)
    columns = max(1, min(columns, int(figure.get_figwidth() / (_KEY_WIDTH + _CHARACTER_WIDTH * widest))))
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(keys) / columns))
    columns = min(columns, len(keys))
    figure.legend(handles=[*keys], loc="outside lower center", ncols=columns, frameon=False, fontsize=9.5)


def panel_grid(count: int, columns: int, height: float, base: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with some panels, a few in a line.

    Args:
        count: How many panels there are.
        columns: How many stand in a line.
        height: Height of a line in inches.
        base: Height of everything else in inches.
        options: As for ``Figure.subplots``.
    """
    lines = math.ceil(count / columns)
    figure = blank(base + height * lines)
    grid = [*figure.subplots(lines, columns, squeeze=False, **options).flat]
    for axes in grid[count:]:
        axes.set_visible(False)
    return figure, grid[:count]


def _in_panels(shown: Sequence[tuple[Comparison, list[str]]], draw: Draw, key: Key) -> Figure:
    """Draw a panel for each comparison, two in a line."""
    columns = min(2, len(shown))
    legend = max(math.ceil((len(names) + 2) / _beside(one, columns)) for one, names in shown)
    figure, grid = panel_grid(len(shown), columns, 2.6 + _LEGEND_LINE * legend, base=0.2)
    for axes, (one, names) in zip(grid, shown, strict=True):
        tidy(axes)
        axes.tick_params(labelsize=8.5)
        own = {name: look(index) for index, name in enumerate(names)}
        keys = draw(axes, own, True)
        keys = [*(key(look, one.values[name]) for name, look in own.items()), *keys]
        title = textwrap.fill(label(one.title), 40 if columns == 2 else 90)
        axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
        below_the_label = axes.transAxes + ScaledTranslation(0, -0.45, figure.dpi_scale_trans)
        axes.legend(
            handles=keys, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below_the_label,
            ncols=_beside(one, columns), frameon=False, fontsize=8, handlelength=2.4, columnspacing=1.2,
        )  # fmt: skip
    return figure


def _beside(comparison: Comparison, columns: int) -> int:
    """Return how many names fit beside each other: two short ones under a panel half as wide as the figure."""
    return (1 if max(map(len, comparison.values.values())) > _LONG_NAME else 2) * (1 if columns == 2 else 2)
