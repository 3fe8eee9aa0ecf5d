"""Figures of classifiers of images: accuracy against size, and what priors say around the middle patch."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attention_priors.lab.intervals import cut_to_share, over_seeds
from attention_priors.lab.report.figures.style import blank, label, look, tidy
from attention_priors.lab.report.numbers import multiple
from attention_priors.lab.report.selections.images import image_sizes, maps_of_first_seed, shares_right
from attention_priors.lab.report.selections.results import Results

SHARES = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
"""Which the axis of accuracies names."""
LOWEST = -8.0
"""Nats; what is below weighs less than a thousandth."""


def accuracy_by_size(results: Results) -> Figure:
    """Share of test images that are classified right against their size (GOAT, Figure 5a).

    On a logit scale, where 97 % and 99 % can be told apart beside 20 %; 0 and 100 % are drawn half an image from there.
    """
    sizes = image_sizes(results)
    edge = 0.5 / min(row["trials"] for row in results["accuracy"])
    figure = blank(4.3)
    axes = figure.add_subplot()
    tidy(axes)
    for index, entry in enumerate(results["schemes"]):
        found = [cut_to_share(over_seeds(shares_right(results, entry["name"], size))) for size in sizes]
        means, low, high = np.clip(np.array(found).T, edge, 1 - edge)
        bars = None if np.isnan(low).any() else np.maximum(0, [means - low, high - means])
        nudged = [size * 1.02 ** (index - (len(results["schemes"]) - 1) / 2) for size in sizes]
        axes.errorbar(
            nudged, means, yerr=bars, **look(index)._asdict(), markersize=6, linewidth=1.8, elinewidth=1.2,
            capsize=2.5, label=label(entry["name"]),
        )  # fmt: skip
    trained = results["recipe"]["model"]["image_size"]
    axes.axvline(trained, color="#999999", linewidth=1, linestyle=":", zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}\n{multiple(value / trained)}×"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yscale("logit")
    axes.yaxis.set_major_locator(FixedLocator(SHARES))
    lowest, highest = axes.dataLim.intervaly
    bottom = max((share for share in SHARES if share < lowest), default=edge / 2)
    top = min((share for share in SHARES if share > highest), default=1 - edge / 2)
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("side of the images, pixels, and times that of training")
    axes.set_ylabel("classified right, %" + (" (bars: 95 % over seeds)" if len(results["seeds"]) > 1 else ""))
    figure.legend(loc="outside lower center", ncols=min(3, len(results["schemes"])), frameon=False, fontsize=9)
    return figure


def prior_maps(results: Results, scheme: str) -> Figure:
    """What the prior of each head says around the middle patch of the training grid (GOAT, Figure 5b).

    Args:
        results: of classifiers of images.
        scheme: one that has a prior; its first seed is shown.
    """
    maps = maps_of_first_seed(results, scheme)
    layers, heads = (1 + max(row[key] for row in maps) for key in ("layer", "head"))
    figure = blank(0.75 + 1.15 * layers, width=max(3.2, 0.9 + 1.15 * heads))
    axes: Any = figure.subplots(layers, heads, squeeze=False)
    drawn = None
    for row in maps:
        place = axes[row["layer"]][row["head"]]
        shown = np.array(row["log_prior"])
        drawn = place.imshow(shown, cmap="viridis", vmin=LOWEST, vmax=0, interpolation="nearest")
        place.plot(shown.shape[1] // 2, shown.shape[0] // 2, marker="+", color="white", markersize=5)
        place.set_xticks([])
        place.set_yticks([])
        if row["head"] == 0:
            place.set_ylabel(f"layer {row['layer']}", fontsize=8)
        if row["layer"] == 0:
            place.set_title(f"head {row['head']}", fontsize=8)
    assert drawn is not None
    bar = figure.colorbar(drawn, ax=axes, shrink=0.9, extend="min")
    bar.set_label("nats below the most likely", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.suptitle(label(scheme), x=0.02, ha="left", fontsize=10, fontweight="bold")
    return figure
