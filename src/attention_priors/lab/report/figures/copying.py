"""The copy-mixture task: how far each scheme's loss is above the best there is."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_priors.lab.report.figures.drawing import legend_below, line_key, require, token_axis, training_key
from attention_priors.lab.report.figures.style import Look, blank, label, looks, tidy
from attention_priors.lab.report.selections.axes import overview
from attention_priors.lab.report.selections.copying import KINDS, excess_losses
from attention_priors.lab.report.selections.results import Results, distinct, rows, training_length

_NARROWEST = 0.01  # nats


def copying_by_length(results: Results) -> Figure:
    """Loss above the optimum against the rows' length, of all tokens and of each kind, with intervals over seeds."""
    look = looks(results)
    shown = {scheme: look[scheme] for scheme in require(results, "copying", overview(results))}
    lengths = distinct(rows(results, "copying"), "length")
    several = any(len(distinct(rows(results, "copying", scheme), "seed")) > 1 for scheme in shown)
    spread = " (bands: 95 % interval)" if several else ""
    figure = blank(6.6)
    grid = figure.subplots(2, 2, sharex=True)
    for axes, (kind, words) in zip(grid.flat, KINDS.items(), strict=True):
        _panel(axes, results, shown, kind, lengths)
        axes.set_title(words, loc="left", fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("length of the row, tokens", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"loss above the optimum's,\nnats per token{spread}", fontsize=9)
    legend_below(figure, [*(line_key(look[scheme], scheme) for scheme in shown), training_key()], columns=4)
    return figure


def _panel(axes: Axes, results: Results, shown: Mapping[str, Look], kind: str, lengths: list[int]) -> None:
    tidy(axes)
    means: list[float] = []
    for scheme, one in shown.items():
        estimates = excess_losses(results, scheme, kind)
        if not estimates:
            continue
        mean, low, high = (np.array(values) for values in zip(*estimates.values(), strict=True))
        means += [value for value in mean if math.isfinite(value)]
        axes.plot(
            list(estimates), mean, **one._asdict(), label=label(scheme), markersize=4.5, linewidth=1.8, zorder=3,
            gid=f"copying:{kind}:{scheme}",
        )  # fmt: skip
        if np.isfinite(low).any():
            axes.fill_between(list(estimates), low, high, color=one.color, alpha=0.13, linewidth=0, zorder=1)
    # The bands of two seeds would squash everything else.
    bottom, top = min([0.0, *means]), max([0.0, *means])
    margin = 0.08 * (top - bottom) or _NARROWEST
    axes.set_ylim(bottom - margin, top + margin)
    axes.axhline(0, color="black", linewidth=0.8, zorder=2)
    trained = dict.fromkeys((training_length(results, scheme) for scheme in shown), "#444444")
    token_axis(axes, lengths, lengths[0], lengths[-1], trained, panel=True)
    axes.tick_params(labelsize=8.5)
