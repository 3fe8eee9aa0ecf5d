"""Figures with a panel for each comparison along an axis: init, training length, model size, extension.

All take a results dictionary and, to leave the other axes out, the name of one; each raises
:class:`NothingToShowError` where there is nothing to compare.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from attention_priors.report.figures.drawing import (
    Looks,
    NothingToShowError,
    draw_passkeys,
    draw_perplexity,
    draw_thetas,
    line_key,
    logit_scale_bins,
    perplexity_label,
    training_key,
)
from attention_priors.report.figures.style import blank, label, look, tidy
from attention_priors.report.selections.axes import Comparison, comparisons
from attention_priors.report.selections.heads import gaussian_heads, logit_scales
from attention_priors.report.selections.results import Results, rows, schemes_with

Draw = Callable[[Axes, Looks, Mapping[str, str]], list[Artist]]
"""Draws schemes on a panel, and returns the keys of its legend; it is given what each scheme is called there."""


_LONG_NAME = 18
"""Characters."""


def passkey_by_axis(results: Results, axis: str | None = None) -> Figure:
    """The share of pass keys retrieved against context length, a panel per comparison."""

    def draw(axes: Axes, looks: Looks, names: Mapping[str, str]) -> list[Artist]:
        marks = draw_passkeys(axes, results, looks, panel=True)
        axes.set_xlabel("context length, tokens", fontsize=9)
        axes.set_ylabel("pass keys retrieved, %\n(bars: 95 % interval)", fontsize=9)
        return [*(line_key(looks[scheme], names[scheme]) for scheme in looks), *marks, training_key()]

    return _panels(results, axis, schemes_with(results, "passkey"), draw, "passkey")


def perplexity_by_axis(results: Results, axis: str | None = None) -> Figure:
    """Perplexity against position, a panel per comparison."""
    finite = [
        scheme
        for scheme in schemes_with(results, "perplexity")
        if any(row["nll"] is not None for row in rows(results, "perplexity", scheme))
    ]

    def draw(axes: Axes, looks: Looks, names: Mapping[str, str]) -> list[Artist]:
        beyond = draw_perplexity(axes, results, looks, panel=True)
        axes.set_xlabel("position in the text, tokens", fontsize=9)
        words = perplexity_label(results, looks, axes.get_ylim()[1] if beyond else None)
        axes.set_ylabel(words.replace(" (", "\n("), fontsize=8.5)
        return [*(line_key(looks[scheme], names[scheme]) for scheme in looks), training_key()]

    return _panels(results, axis, finite, draw, "perplexity")


def theta_by_axis(results: Results, axis: str | None = None) -> Figure:
    """Shape β against θα of the Generalized Gaussian heads, a panel per comparison."""
    shown = [scheme for scheme in schemes_with(results, "priors") if gaussian_heads(results, scheme)]

    def draw(axes: Axes, looks: Looks, names: Mapping[str, str]) -> list[Artist]:
        draw_thetas(axes, results, looks, lambda scheme, _: looks[scheme].marker, size=7)
        axes.set_xlabel("θα; no unit", fontsize=9)
        axes.set_ylabel("shape β; no unit", fontsize=9)
        return [
            Line2D([], [], color=one.color, marker=one.marker, linestyle="none", label=label(names[scheme]))
            for scheme, one in looks.items()
        ]

    return _panels(results, axis, shown, draw, "priors")


def logit_scales_by_axis(results: Results, axis: str | None = None) -> Figure:
    """Which share of heads has which logit scale s, a panel per comparison."""
    values = logit_scales(results, schemes_with(results, "logit_scales"))

    def draw(axes: Axes, looks: Looks, names: Mapping[str, str]) -> list[Artist]:
        bins = logit_scale_bins({scheme: values[scheme] for scheme in looks})
        for scheme, one in looks.items():
            shares = [100 / len(values[scheme])] * len(values[scheme])
            options: dict[str, Any] = {"bins": bins, "weights": shares, "color": one.color}
            axes.hist(values[scheme], histtype="stepfilled", alpha=0.12, **options)
            axes.hist(
                values[scheme], histtype="step", linewidth=1.6, linestyle=one.linestyle, gid=f"s:{scheme}", **options
            )
        axes.set_xlabel("logit scale s; no unit", fontsize=9)
        axes.set_ylabel("heads, %", fontsize=9)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        return [line_key(one._replace(marker=""), names[scheme]) for scheme, one in looks.items()]

    return _panels(results, axis, list(values), draw, "logit_scales")


def axes_of_figures(results: Results) -> list[str | None]:
    """What the figures are drawn for: all axes in one, or each axis alone where one has several comparisons."""
    axes = [comparison.axis for comparison in comparisons(results)]
    return list(dict.fromkeys(axes)) if len(set(axes)) < len(axes) else [None] if axes else []


def _panels(results: Results, axis: str | None, shown: list[str], draw: Draw, section: str) -> Figure:
    found = [
        (comparison, [scheme for scheme in comparison.values if scheme in shown])
        for comparison in comparisons(results)
        if axis in (None, comparison.axis)
    ]
    found = [(comparison, schemes) for comparison, schemes in found if len(schemes) > 1]
    if not found:
        what = "" if axis is None else f" along the axis {axis!r}"
        raise NothingToShowError(f"results[{section!r}] must hold rows of schemes that are compared{what}; it does not")
    columns = min(2, len(found))
    lines = math.ceil(len(found) / columns)
    keys = max(len(schemes) for _, schemes in found) + 1
    figure = blank(0.2 + (2.6 + 0.09 * keys) * lines)
    grid = figure.subplots(lines, columns, squeeze=False)
    for panel in grid.flat[len(found) :]:
        panel.set_visible(False)
    for panel, (comparison, schemes) in zip(grid.flat, found, strict=False):
        _panel(figure, panel, comparison, schemes, draw, columns)
    return figure


def _panel(figure: Figure, axes: Axes, comparison: Comparison, schemes: list[str], draw: Draw, columns: int) -> None:
    tidy(axes)
    axes.tick_params(labelsize=8.5)
    looks = {scheme: look(index) for index, scheme in enumerate(schemes)}
    keys = draw(axes, looks, comparison.values)
    title = textwrap.fill(label(comparison.title), 40 if columns == 2 else 90)
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
    # Two short names fit beside each other under a panel that is half as wide as the figure.
    names = [len(name) for name in comparison.values.values()]
    beside = (1 if max(names) > _LONG_NAME else 2) * (1 if columns == 2 else 2)
    below_the_label = axes.transAxes + ScaledTranslation(0, -0.45, figure.dpi_scale_trans)
    axes.legend(
        handles=keys, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below_the_label, ncols=beside,
        frameon=False, fontsize=8, handlelength=2.4, columnspacing=1.2,
    )  # fmt: skip
