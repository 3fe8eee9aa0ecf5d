"""How much of the attention what is asked for gets, against length: whether a head still finds it, or drowns."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from attention_priors.report.figures.drawing import legend_below, line_key, require, start, token_axis, training_key
from attention_priors.report.figures.style import label, looks
from attention_priors.report.selections.axes import overview
from attention_priors.report.selections.needle_weights import looking_heads
from attention_priors.report.selections.results import Results, distinct, rows, training_length


def needle_weight_by_length(results: Results, plan: str) -> Figure:
    """The weight of :func:`looking_heads` against length, a line for each scheme, with intervals over seeds."""
    own = {**results, "needle_weights": [row for row in rows(results, "needle_weights") if row["plan"] == plan]}
    look = looks(results)
    shown = require(own, "needle_weights", overview(results))
    lengths = distinct(rows(own, "needle_weights"), "length")
    figure, axes = start(4.6)
    for scheme in shown:
        estimates = looking_heads(own, plan, scheme)
        mean, low, high = (100 * np.array(values) for values in zip(*estimates.values(), strict=True))
        axes.plot(
            list(estimates), mean, **look[scheme]._asdict(), label=label(scheme), markersize=5, linewidth=1.8, zorder=3,
            gid=f"needle_weight:{scheme}",
        )  # fmt: skip
        if np.isfinite(low).any():
            axes.fill_between(
                list(estimates), low.clip(0, 100), high.clip(0, 100), color=look[scheme].color, alpha=0.13, linewidth=0
            )
    axes.set_ylim(-4, 104)
    axes.set_ylabel("attention on the pass key, %\n(bands: 95 % interval over seeds)")
    axes.set_xlabel("length of the text, tokens")
    trained = dict.fromkeys((training_length(results, scheme) for scheme in shown), "#444444")
    token_axis(axes, lengths, lengths[0], lengths[-1], trained, panel=False)
    legend_below(figure, [*(line_key(look[scheme], scheme) for scheme in shown), training_key()])
    return figure
