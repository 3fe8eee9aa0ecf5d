"""How much of the attention what is asked for gets, against length: whether a head still finds it, or drowns."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_priors.lab.report.figures.drawing import (
    Looks,
    legend_below,
    line_key,
    require,
    start,
    token_axis,
    training_key,
)
from attention_priors.lab.report.figures.panels import draw_panels
from attention_priors.lab.report.figures.style import label, looks
from attention_priors.lab.report.selections.axes import overview, panels
from attention_priors.lab.report.selections.needle_weights import looking_heads, mean_weights
from attention_priors.lab.report.selections.results import Results, distinct, rows, schemes_with, training_length


def needle_weight_by_length(results: Results, plan: str) -> Figure:
    """The weight that the looking head of each scheme gives, against length: the mean over seeds, and each seed thin.

    Where the recipe has panels, so has the figure.
    """
    own = {**results, "needle_weights": [row for row in rows(results, "needle_weights") if row["plan"] == plan]}
    measured = schemes_with(own, "needle_weights")

    def draw(axes: Axes, shown: Looks, names: Mapping[str, str]) -> list[Artist]:
        _draw(axes, own, plan, shown, panel=True)
        axes.set_ylabel(_label(own, shown), fontsize=9)
        axes.set_xlabel("length of the text, tokens", fontsize=9)
        return [*(line_key(shown[scheme], names[scheme]) for scheme in shown), training_key()]

    compared = [(one, [scheme for scheme in one.values if scheme in measured]) for one in panels(results)]
    compared = [(one, schemes) for one, schemes in compared if schemes]
    if compared:
        return draw_panels(compared, draw)
    look = looks(results)
    shown = {scheme: look[scheme] for scheme in require(own, "needle_weights", overview(results))}
    figure, axes = start(4.6)
    _draw(axes, own, plan, shown, panel=False)
    axes.set_ylabel(_label(own, shown))
    axes.set_xlabel("length of the text, tokens")
    legend_below(figure, [*(line_key(look[scheme], scheme) for scheme in shown), training_key()])
    return figure


def _label(results: Results, shown: Looks) -> str:
    several = any(len(distinct(rows(results, "needle_weights", scheme), "seed")) > 1 for scheme in shown)
    return "attention on the pass key, %" + ("\n(thin: single seeds)" if several else "")


def _draw(axes: Axes, results: Results, plan: str, shown: Looks, *, panel: bool) -> None:
    for scheme, look in shown.items():
        weights = mean_weights(results, plan, scheme)
        axes.plot(
            list(weights), [100 * one.mean for one in weights.values()], **look._asdict(), label=label(scheme),
            markersize=5, linewidth=1.8, zorder=3, gid=f"needle_weight:{scheme}",
        )  # fmt: skip
        of_seeds = looking_heads(results, plan, scheme)
        for seed, one in of_seeds.items() if len(of_seeds) > 1 else ():
            y = [100 * weight for weight in one.values()]
            axes.plot(list(one), y, color=look.color, linewidth=0.7, alpha=0.5, gid=f"seed:{scheme}:{seed}")
    axes.set_ylim(-4, 104)
    lengths = distinct(rows(results, "needle_weights"), "length")
    trained = dict.fromkeys((training_length(results, scheme) for scheme in shown), "#444444")
    token_axis(axes, lengths, lengths[0], lengths[-1], trained, panel=panel)
