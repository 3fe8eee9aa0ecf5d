"""Figures with a panel for each comparison along an axis: init, training length, model size, extension.

All take a results dictionary and, to leave the other axes out, the name of one; each raises
:class:`NothingToShowError` where there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from attention_priors.lab.report.figures.drawing import (
    Looks,
    NothingToShowError,
    draw_losses,
    draw_passkeys,
    draw_thetas,
    line_key,
    logit_scale_bins,
    loss_label,
    training_key,
)
from attention_priors.lab.report.figures.panels import draw_panels
from attention_priors.lab.report.figures.style import label
from attention_priors.lab.report.selections.axes import Comparison, comparisons
from attention_priors.lab.report.selections.heads import gaussian_heads, logit_scales
from attention_priors.lab.report.selections.results import Results, rows, schemes_with


def passkey_by_axis(results: Results, axis: str | None = None) -> Figure:
    """The share of pass keys retrieved against context length, a panel per comparison."""
    return passkey_panels(results, along(results, axis))


def passkey_panels(results: Results, compared: Sequence[Comparison], what: str = "pass keys retrieved") -> Figure:
    """As :func:`passkey_by_axis`, of given comparisons."""

    def draw(axes: Axes, looks: Looks, names: Mapping[str, str]) -> list[Artist]:
        marks = draw_passkeys(axes, results, looks, panel=True)
        axes.set_xlabel("context length, tokens", fontsize=9)
        axes.set_ylabel(f"{what}, %\n(bars: 95 % interval)", fontsize=9)
        return [*(line_key(looks[scheme], names[scheme]) for scheme in looks), *marks, training_key()]

    return draw_panels(compared_in(compared, schemes_with(results, "passkey"), "passkey"), draw)


def perplexity_by_axis(results: Results, axis: str | None = None) -> Figure:
    """Perplexity, or bits per base, against position, a panel per comparison."""
    return perplexity_panels(results, along(results, axis))


def perplexity_panels(results: Results, compared: Sequence[Comparison]) -> Figure:
    """As :func:`perplexity_by_axis`, of given comparisons."""
    finite = [
        scheme
        for scheme in schemes_with(results, "perplexity")
        if any(row["nll"] is not None for row in rows(results, "perplexity", scheme))
    ]

    def draw(axes: Axes, looks: Looks, names: Mapping[str, str]) -> list[Artist]:
        beyond = draw_losses(axes, results, looks, panel=True)
        axes.set_xlabel("position in the text, tokens", fontsize=9)
        words = loss_label(results, looks, axes.get_ylim()[1] if beyond else None)
        axes.set_ylabel(words.replace(" (", "\n("), fontsize=8.5)
        return [*(line_key(looks[scheme], names[scheme]) for scheme in looks), training_key()]

    return draw_panels(compared_in(compared, finite, "perplexity"), draw)


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

    return draw_panels(compared_in(along(results, axis), shown, "priors"), draw)


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

    return draw_panels(compared_in(along(results, axis), list(values), "logit_scales"), draw)


def axes_of_figures(results: Results) -> list[str | None]:
    """What the figures are drawn for: all axes in one, or each axis alone where one has several comparisons."""
    axes = [comparison.axis for comparison in comparisons(results)]
    return list(dict.fromkeys(axes)) if len(set(axes)) < len(axes) else [None] if axes else []


def along(results: Results, axis: str | None) -> list[Comparison]:
    """The comparisons along an axis, or along all of them, that are any."""
    found = [comparison for comparison in comparisons(results) if axis in (None, comparison.axis)]
    if not found:
        what = "" if axis is None else f" along the axis {axis!r}"
        raise NothingToShowError(f"results must hold schemes that are compared{what}; they do not")
    return found


def compared_in(
    compared: Sequence[Comparison], schemes: Sequence[str], section: str
) -> list[tuple[Comparison, list[str]]]:
    """Of each comparison the schemes that have rows in a section; those of one scheme alone compare nothing."""
    found = [(one, [scheme for scheme in one.values if scheme in schemes]) for one in compared]
    found = [(one, shown) for one, shown in found if len(shown) > 1]
    if not found:
        titles = ", ".join(one.title for one in compared)
        raise NothingToShowError(f"results[{section!r}] must hold rows of schemes compared in {titles}; it does not")
    return found
