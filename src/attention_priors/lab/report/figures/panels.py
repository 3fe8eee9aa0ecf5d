"""Figures of several panels, each with a legend of its own below it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from attention_priors.lab.report.figures.drawing import Looks
from attention_priors.lab.report.figures.style import blank, label, look, tidy
from attention_priors.lab.report.selections.axes import Comparison

Draw = Callable[[Axes, Looks, Mapping[str, str]], list[Artist]]
"""Draws schemes on a panel, and returns the keys of its legend; it is given what each scheme is called there."""

_LONG_NAME = 18
"""Characters."""
_KEY_HEIGHT = 0.17
"""Inches of a line of a legend."""


def draw_panels(panels: Sequence[tuple[Comparison, list[str]]], draw: Draw) -> Figure:
    """A figure with a panel for each comparison, two in a line.

    Args:
        panels: what is compared, and the schemes of it that are shown; at least one.
        draw: fills a panel.
    """
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    legends = [math.ceil((len(schemes) + 2) / _beside(comparison, columns)) for comparison, schemes in panels]
    figure = blank(0.2 + (2.6 + _KEY_HEIGHT * max(legends)) * lines)
    grid = figure.subplots(lines, columns, squeeze=False)
    for panel in grid.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (comparison, schemes) in zip(grid.flat, panels, strict=False):
        _panel(figure, panel, comparison, schemes, draw, columns)
    return figure


def _beside(comparison: Comparison, columns: int) -> int:
    """How many names fit beside each other: two short ones under a panel that is half as wide as the figure."""
    names = [len(name) for name in comparison.values.values()]
    return (1 if max(names) > _LONG_NAME else 2) * (1 if columns == 2 else 2)


def _panel(figure: Figure, axes: Axes, comparison: Comparison, schemes: list[str], draw: Draw, columns: int) -> None:
    tidy(axes)
    axes.tick_params(labelsize=8.5)
    looks = {scheme: look(index) for index, scheme in enumerate(schemes)}
    keys = draw(axes, looks, comparison.values)
    title = textwrap.fill(label(comparison.title), 40 if columns == 2 else 90)
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
    below_the_label = axes.transAxes + ScaledTranslation(0, -0.45, figure.dpi_scale_trans)
    axes.legend(
        handles=keys, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below_the_label,
        ncols=_beside(comparison, columns), frameon=False, fontsize=8, handlelength=2.4, columnspacing=1.2,
    )  # fmt: skip
