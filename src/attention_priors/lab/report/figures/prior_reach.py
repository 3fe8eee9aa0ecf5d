"""How far each head's prior looks as texts grow."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attention_priors.lab.report.figures.drawing import legend_below, log_token_axis, require
from attention_priors.lab.report.figures.style import COLOURS, GREY, blank, label, thin, tidy
from attention_priors.lab.report.selections.axes import overview
from attention_priors.lab.report.selections.reach import NEAR, Sight, lengths_of, reaches
from attention_priors.lab.report.selections.results import Results

_LOOKS: dict[Sight, dict[str, Any]] = {
    "near-sighted": {"color": COLOURS[0]},
    "between": {"color": "#999999", "linestyle": "--"},
    "far-sighted": {"color": COLOURS[1]},
}
"""Of a head's line, by what it is called at the training length."""
_LINE = 78
"""Characters of titles that fit beside each other."""


def prior_reach(results: Results) -> Figure:
    """The distance that holds half of each head's prior, against the length of the text: a panel per scheme."""
    shown = require(results, "prior_reach", overview(results))
    lengths = lengths_of(results)
    columns = 2 if len(shown) == 4 else min(3, len(shown))  # none left alone in a line
    lines = math.ceil(len(shown) / columns)
    figure = blank(0.8 + 2.0 * lines)
    grid: Any = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(shown):
            axes.set_visible(False)
        elif place + columns >= len(shown):  # nothing below it
            axes.set_xlabel("length of the text, tokens", fontsize=8)
            axes.tick_params(labelbottom=True)
    for axes, scheme in zip(grid.flat, shown, strict=False):
        tidy(axes)
        for head in reaches(results, scheme):
            axes.plot(
                list(head.halves), list(head.halves.values()), **_LOOKS[head.trained], linewidth=1.2, alpha=0.5,
                gid=f"reach:{scheme}:{head.trained}",
            )  # fmt: skip
        axes.plot(lengths, [length / 2 for length in lengths], color="black", linestyle=":", linewidth=1, zorder=1)
        axes.set_title(textwrap.fill(label(scheme), _LINE // columns), loc="left", fontsize=8.5)
        _tokens_away(axes, lengths)
    figure.supylabel("distance that holds half of the prior, tokens", fontsize=9.5)
    keys = [
        Line2D([], [], **one, label=f"{sight} at the training length" if sight != "between" else sight)
        for sight, one in _LOOKS.items()
    ]
    keys.append(Line2D([], [], color="black", linestyle=":", label="half of the text: a uniform prior"))
    legend_below(figure, keys, columns=2)
    return figure


def _tokens_away(axes: Any, lengths: list[int]) -> None:
    """Lengths across; distances up from 0, linear up to the near-sighted and then logarithmic."""
    log_token_axis(axes, lengths, lengths[0], lengths[-1], at_most=4)
    axes.set_yscale("symlog", base=2, linthresh=NEAR, linscale=1.5)
    axes.set_ylim(-0.4, 1.2 * lengths[-1])
    powers = [2.0**k for k in range(40) if NEAR < 2**k <= lengths[-1] / 2]
    axes.yaxis.set_major_locator(FixedLocator([0, NEAR, *thin(powers, 4)]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.axhline(NEAR, color=GREY, linewidth=0.6, zorder=1)
    axes.tick_params(labelsize=7.5)
