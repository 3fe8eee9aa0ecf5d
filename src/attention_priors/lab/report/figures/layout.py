"""Schemes on one pair of axes or in panels of comparisons, with legends."""

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

from attention_priors.lab.report.comparisons import Comparison, family, overview, panels
from attention_priors.lab.report.figures.style import Look, blank, label, look, looks, start, tidy, titled
from attention_priors.lab.results import Results

Looks = Mapping[str, Look]
"""Schemes to draw, in order, with their look."""

Draw = Callable[[Axes, Looks, bool], list[Artist]]
"""Function that draws schemes on axes, which may be a panel's, and returns additional legend entries."""

Key = Callable[[Look, str], Artist]
"""Function that makes the legend entry of a scheme."""

_LONG_NAME = 18
"""Number of characters above which a name counts as long."""
_LEGEND_LINE = 0.17
"""Height of a legend line in inches."""
_KEY_WIDTH, _CHARACTER_WIDTH = 0.5, 0.072
"""Width of a legend key and of a character, in inches."""


def line_key(look: Look, name: str) -> Line2D:
    """Return the legend entry of a curve."""
    return Line2D([], [], **look._asdict(), label=label(name), linewidth=1.8)


def training_key() -> Line2D:
    """Return the legend entry of the training-length line."""
    return Line2D([], [], color="#444444", linestyle=(0, (5, 3)), linewidth=1, label="training length")


def figure_of(
    results: Results,
    schemes: Collection[str],
    draw: Draw,
    title: str = "",
    compared: Sequence[Comparison] | None = None,
    key: Key = line_key,
) -> Figure | None:
    """Draw schemes in panels of comparisons, or the schemes of the overview on one pair of axes.

    Args:
        results: Results that contain the schemes.
        schemes: Schemes with data.
        draw: Draws schemes on axes.
        title: Title of the figure.
        compared: Comparisons with one panel each if at least two schemes have data. By default the recipe's panels.
        key: Makes the legend entry of a scheme.

    Returns:
        Figure, or None without data.
    """
    chosen, least = (panels(results), 1) if compared is None else (compared, 2)
    families = [*dict.fromkeys(family(name) for one in panels(results) for name in one.values)]
    found = [(one, [name for name in one.values if name in schemes]) for one in chosen]
    shown = [(one, _looks_in_panel(names, families)) for one, names in found if len(names) >= least]
    if shown:
        figure = _in_panels(shown, draw, key)
    elif compared is not None:
        return None
    else:
        figure = figure_of_lines(overview_looks(results, schemes), draw, key=key)
    return titled(figure, title) if figure and title else figure


def overview_looks(results: Results, schemes: Collection[str]) -> dict[str, Look]:
    """Return the looks of those schemes that the overview shows."""
    look_of = looks(results)
    return {name: look_of[name] for name in overview(results) if name in schemes}


def figure_of_lines(shown: Looks, draw: Draw, columns: int = 3, key: Key = line_key) -> Figure | None:
    """Draw lines on one pair of axes; return None without lines."""
    if not shown:
        return None
    figure, axes = start(4.5)
    keys = draw(axes, shown, False)
    legend_below(figure, [*(key(look, name) for name, look in shown.items()), *keys], columns)
    return figure


def legend_below(figure: Figure, keys: Sequence[Artist], columns: int = 3) -> None:
    """Put a legend below the axes, without shrinking them; long names reduce the number of columns."""
    widest = max(len(str(key.get_label())) for key in keys)
    columns = max(1, min(columns, int(figure.get_figwidth() / (_KEY_WIDTH + _CHARACTER_WIDTH * widest))))
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(keys) / columns))
    columns = min(columns, len(keys))
    figure.legend(handles=[*keys], loc="outside lower center", ncols=columns, frameon=False, fontsize=9.5)


def panel_grid(count: int, columns: int, height: float, base: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of panels.

    Args:
        count: Number of panels.
        columns: Number of panels in a line.
        height: Height of a line in inches.
        base: Height of everything else in inches.
        options: Keyword arguments of ``Figure.subplots``.
    """
    lines = math.ceil(count / columns)
    figure = blank(base + height * lines)
    grid = [*figure.subplots(lines, columns, squeeze=False, **options).flat]
    for axes in grid[count:]:
        axes.set_visible(False)
    return figure, grid[:count]


def _looks_in_panel(names: Sequence[str], families: Sequence[str]) -> Looks:
    """Return the looks of a panel's schemes: those of their families, if these are known and differ."""
    own = [family(name) for name in names]
    apart = {*own} <= {*families} and len({*own}) == len(own)
    return dict(zip(names, map(look, map(families.index, own) if apart else range(len(own))), strict=True))


def _in_panels(shown: Sequence[tuple[Comparison, Looks]], draw: Draw, key: Key) -> Figure:
    """Draw one panel per comparison, two in a line."""
    columns = min(2, len(shown))
    legend = max(math.ceil((len(own) + 2) / _beside(one, columns)) for one, own in shown)
    figure, grid = panel_grid(len(shown), columns, 2.6 + _LEGEND_LINE * legend, base=0.2)
    for axes, (one, own) in zip(grid, shown, strict=True):
        tidy(axes)
        axes.tick_params(labelsize=8.5)
        keys = draw(axes, own, True)
        keys = [*(key(look, one.values[name]) for name, look in own.items()), *keys]
        title = textwrap.fill(label(one.title), 32 if columns == 2 else 90)
        axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
        below_the_label = axes.transAxes + ScaledTranslation(0, -0.45, figure.dpi_scale_trans)
        axes.legend(
            handles=keys, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below_the_label,
            ncols=_beside(one, columns), frameon=False, fontsize=8, handlelength=2.4, columnspacing=1.2,
        )  # fmt: skip
    return figure


def _beside(comparison: Comparison, columns: int) -> int:
    """Return the number of legend columns: two for short names below a half-width panel."""
    return (1 if max(map(len, comparison.values.values())) > _LONG_NAME else 2) * (1 if columns == 2 else 2)
