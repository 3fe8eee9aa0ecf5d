"""The figures, one function each, drawn with matplotlib's objects so that no global state is touched.

All take a results dictionary; each raises :class:`NothingToShowError` where there is nothing to draw.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from attention_priors.lab.report.figures.by_axis import passkey_panels, perplexity_panels
from attention_priors.lab.report.figures.depths import depth_rows
from attention_priors.lab.report.figures.drawing import (
    DEPTH_OF_CUT,
    NothingToShowError,
    below_maximum,
    draw_losses,
    draw_passkeys,
    draw_thetas,
    head_look,
    legend_below,
    line_key,
    logit_scale_bins,
    loss_label,
    prior_axes,
    require,
    require_rows,
    rough,
    start,
)
from attention_priors.lab.report.figures.style import GREY, MARKERS, blank, label, looks, tidy
from attention_priors.lab.report.figures.style import look as look_at
from attention_priors.lab.report.numbers import listing, percent
from attention_priors.lab.report.selections.axes import overview, panels
from attention_priors.lab.report.selections.heads import gaussian_heads, keys_ahead, logit_scales
from attention_priors.lab.report.selections.results import Results, Row, count_passkeys, distinct, rows, training_length

_CHARACTERS_PER_INCH = 8.5  # of a bold title


def passkey_by_length(results: Results, title: str = "", measure: str = "pass keys retrieved") -> Figure:
    """The share of pass keys retrieved against context length, with intervals; or what stands in their place.

    Shares are pooled over depths and seeds; where there are several seeds, each is a thin line as well.
    Points are moved sideways a little, so that intervals do not hide each other. Where the recipe has panels, so has
    the figure.
    """
    if compared := panels(results):
        figure = passkey_panels(results, compared, measure)
        return _titled(figure, title)
    look = looks(results)
    shown = {scheme: look[scheme] for scheme in require(results, "passkey", overview(results))}
    figure, axes = start(height=4.5)
    marks = draw_passkeys(axes, results, shown)
    axes.set_ylabel(f"{measure}, % (bars: 95 % interval)")
    axes.set_xlabel("context length, tokens")
    legend_below(figure, [*(line_key(look[scheme], scheme) for scheme in shown), *marks])
    return _titled(figure, title)


def passkey_heatmap(results: Results, scheme: str, what: str = "pass keys retrieved") -> Figure:
    """The share retrieved at each depth and length, in percent, pooled over seeds; means at the edges.

    Where a task draws its depths, or there are many, rows are tenths of the text.

    A mean over lengths is there if every seed was asked at all of them: that of the shorter ones alone would flatter
    who stopped.
    """
    selected, everyone = (
        [row for row in rows(results, "passkey", whose) if row["depth"] is not None] for whose in (scheme, None)
    )
    require_rows(selected, "passkey", scheme)
    # The lengths and depths of all schemes, so that heatmaps can be laid side by side.
    lengths = distinct(everyone, "length")
    depths, row_of = depth_rows(_depths_of_texts(everyone))
    selected = [{**row, "row": row_of[row["depth"]]} for row in selected]
    seeds = distinct(selected, "seed")
    seeds_at = {length: {row["seed"] for row in selected if row["length"] == length} for length in lengths}
    partly = [length for length, found in seeds_at.items() if 0 < len(found) < len(seeds)]
    everywhere = all(len(found) == len(seeds) for found in seeds_at.values())
    counts = count_passkeys(selected, "row", "length")
    shares = np.full((len(depths) + 1, len(lengths) + 1), np.nan)
    for (place, length), count in counts.items():
        shares[place, lengths.index(length)] = 100 * count.share
    for edge, key, values in (((-1, slice(-1)), "length", lengths), ((slice(-1), -1), "row", range(len(depths)))):
        means = count_passkeys(selected, key)
        shares[edge] = [
            100 * means[value,].share if (value,) in means and (key == "length" or everywhere) else np.nan
            for value in values
        ]

    # Cells keep their size whatever their number.
    width = 1.2 + 0.4 * (len(lengths) + 1)
    title = f"{label(scheme)}: {what}, %"
    lines_of_title = textwrap.wrap(title, round(_CHARACTERS_PER_INCH * width))
    figure, axes = start(width=width, height=1.4 + 0.21 * (len(depths) + 1) + 0.17 * (len(lines_of_title) - 1))
    # A gap of a third of a cell sets the means apart.
    column_edges = [*range(len(lengths) + 1), len(lengths) + 1 / 3, len(lengths) + 4 / 3]
    row_edges = [*range(len(depths) + 1), len(depths) + 1 / 3, len(depths) + 4 / 3]
    spread = np.insert(np.insert(shares, -1, np.nan, axis=0), -1, np.nan, axis=1)
    axes.pcolormesh(
        column_edges,
        row_edges,
        spread,
        cmap="Blues",
        norm=Normalize(0, 100),
        edgecolor="white",
        linewidth=0.6,
    )
    columns = [*(index + 0.5 for index in range(len(lengths))), len(lengths) + 5 / 6]
    lines = [*(index + 0.5 for index in range(len(depths))), len(depths) + 5 / 6]
    for i, j in np.ndindex(shares.shape):
        share = float(shares[i, j])
        if not math.isnan(share):
            axes.text(
                columns[j], lines[i], percent(share / 100), ha="center", va="center", fontsize=8,
                color="white" if share > 55 else "black",
            )  # fmt: skip
        elif j == len(lengths):
            if i < len(depths):  # but for the corner where the means meet
                axes.text(columns[j], lines[i], "–", ha="center", va="center", fontsize=8, color="black")
        else:
            axes.add_patch(
                Rectangle(
                    (columns[j] - 0.5, lines[i] - 0.5), 1, 1, facecolor="#e6e6e6", edgecolor="#b5b5b5",
                    hatch="////", linewidth=0, gid="not evaluated",
                )
            )  # fmt: skip
    trained = training_length(results, scheme)
    within = sum(length <= trained for length in lengths)
    for colour, width, dashes in (("white", 4.0, "-"), ("black", 1.4, (0, (5, 3)))):
        axes.plot([within, within], [0, len(depths)], color=colour, linewidth=width, linestyle=dashes)
    axes.set_ylim(row_edges[-1], 0)
    axes.set_xticks(columns, [*(f"{length}†" if length in partly else str(length) for length in lengths), "mean"])
    axes.tick_params(axis="x", labelsize=8)
    if lengths[-1] > 9999:  # five digits are wider than a cell
        axes.tick_params(axis="x", rotation=90)
    axes.set_yticks(lines, [*depths, "mean"], fontsize=8)
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("depth of the key, % of the context")
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_title("\n".join(lines_of_title), loc="left", fontsize=11, fontweight="bold")
    keys: list[Artist] = [Line2D([], [], color="black", linestyle="--", label=f"training length, {trained} tokens")]
    if np.isnan(shares[:-1, :-1]).any():
        keys.append(Patch(facecolor="#e6e6e6", edgecolor="#b5b5b5", hatch="////", label="not evaluated"))
    if partly:
        keys.append(Line2D([], [], linestyle="none", label="†: without seeds that had stopped"))
    legend_below(figure, keys)
    return figure


def perplexity_by_position(results: Results, title: str = "") -> Figure:
    """Perplexity, or bits per base, against position: of the mean loss over seeds, with its interval if there are more.

    Where the recipe has panels, so has the figure.
    """
    if compared := panels(results):
        figure = perplexity_panels(results, compared)
        return _titled(figure, title)
    look = looks(results)
    shown = {scheme: look[scheme] for scheme in require(results, "perplexity", overview(results))}
    figure, axes = start(height=4.5)
    beyond = draw_losses(axes, results, shown)
    axes.set_ylabel(loss_label(results, shown, axes.get_ylim()[1] if beyond else None))
    if beyond:
        names = listing([f"{label(scheme)} (up to {rough(highest)})" for scheme, highest in beyond.items()])
        axes.set_title(textwrap.fill(f"Beyond the axis: {names}", 92), loc="left", fontsize=9)
    axes.set_xlabel("position in the text, tokens")
    legend_below(figure, [line_key(look[scheme], scheme) for scheme in shown])
    return _titled(figure, title)


def prior_curves(results: Results, scheme: str) -> Figure:
    """Each head's log-prior against distance, below its maximum: one panel per layer (and seed).

    Where keys that follow the query have another one, it is drawn as a thin line.

    A constant added to a head's log-prior changes no attention weight, so each head is measured from its own
    maximum. Panels that would all be the same, as for a prior that is not learned, are drawn once.
    """
    selected = require_rows(rows(results, "priors", scheme), "priors", scheme)
    layers, seeds, heads = (distinct(selected, key) for key in ("layer", "seed", "head"))
    lines: dict[tuple[int, int], list[Row]] = {
        (seed, layer): [row for row in selected if (row["seed"], row["layer"]) == (seed, layer)]
        for seed in seeds
        for layer in layers
    }
    if len(lines) > 1 and len({_shape(panel) for panel in lines.values()}) == 1:
        titles = {(seeds[0], layers[0]): "every layer" + (", every seed" if len(seeds) > 1 else "")}
        columns = lines_per_seed = grid_lines = 1
    else:
        titles = {
            (seed, layer): f"layer {layer}" + (f", seed {seed}" if len(seeds) > 1 else "") for seed, layer in lines
        }
        # Three in a line, or two where that leaves fewer places empty.
        columns = min(len(layers), min((3, 2), key=lambda count: -len(layers) % count))
        lines_per_seed = math.ceil(len(layers) / columns)
        grid_lines = lines_per_seed * len(seeds)
    figure = blank(1.2 + 2.4 * grid_lines)
    grid: Any = figure.subplots(grid_lines, columns, sharex=True, sharey=True, squeeze=False)
    farthest = max(max(row["distance"]) for row in selected)
    used = set()
    for (seed, layer), title in titles.items():
        place = layers.index(layer)
        axes = grid[seeds.index(seed) * lines_per_seed + place // columns, place % columns]
        used.add(axes)
        for row in lines[seed, layer]:
            shade = head_look(heads.index(row["head"]), len(heads))
            behind, ahead = row["log_prior"], keys_ahead(row)
            curves = below_maximum([*behind, *ahead])
            axes.plot(row["distance"], curves[: len(behind)], gid=f"head:{row['head']}", **shade)
            if ahead != behind:
                thin = {**shade, "linewidth": 0.8, "alpha": 0.7}
                axes.plot(row["distance"], curves[len(behind) :], gid=f"ahead:{row['head']}", **thin)
        prior_axes(axes, farthest, "distance, tokens")
        axes.set_title(title, loc="left", fontsize=10)
        if place % columns == 0:
            axes.set_ylabel(f"log-prior below its\nmaximum, nats (cut at −{DEPTH_OF_CUT:.0f})", fontsize=9)
    for axes in set(grid.flat) - used:
        axes.set_visible(False)
    figure.suptitle(label(scheme), x=0.01, ha="left", fontweight="bold", fontsize=12)
    keys = [Line2D([], [], label=f"head {head}", **head_look(index, len(heads))) for index, head in enumerate(heads)]
    legend_below(figure, keys, columns=6)
    return figure


def theta_scatter(results: Results) -> Figure:
    """Where the heads of the Generalized Gaussian priors ended: shape β against θα."""
    heads = {scheme: gaussian_heads(results, scheme) for scheme in overview(results)}
    look = {scheme: looks(results)[scheme] for scheme, found in heads.items() if found}
    if not look:
        raise NothingToShowError(
            "results must hold priors rows of a generalized_gaussian with a finite β; there is none"
        )
    if len({one.color for one in look.values()}) < len(look):
        # Dots have no line style that would tell schemes of one colour apart.
        look = {scheme: look_at(index) for index, scheme in enumerate(look)}
    layers = distinct((row for found in heads.values() for row in found), "layer")
    figure, axes = start(height=4.8)
    markers = {layer: MARKERS[index % len(MARKERS)] for index, layer in enumerate(layers)}
    draw_thetas(axes, results, look, lambda _, row: markers[row["layer"]], size=9)
    axes.set_xlabel("θα = ln(amplitude), the penalty at a distance of one token; no unit")
    axes.set_ylabel("shape β (the paper's θβ); no unit")
    keys: list[Artist] = [Patch(color=look[scheme].color, label=label(scheme)) for scheme in look]
    for layer, marker in markers.items():
        key = Line2D([], [], color=GREY, marker=marker, linestyle="none")
        key.set_label(f"layer {layer}")
        keys.append(key)
    legend_below(figure, keys, columns=4)
    return figure


def logit_scale_histogram(results: Results) -> Figure:
    """How many heads have which logit scale s: one row per scheme, the same bins in all."""
    values = logit_scales(results, require(results, "logit_scales", overview(results)))
    if not values:
        raise NothingToShowError("results must hold logit_scales rows with a finite s; there is none")
    look = looks(results)
    bins = logit_scale_bins(values)
    figure = blank(1.0 + 1.4 * len(values))
    grid: Any = figure.subplots(len(values), 1, sharex=True, sharey=True, squeeze=False)
    for axes, scheme in zip(grid.flat, values, strict=True):
        tidy(axes)
        axes.hist(values[scheme], bins=bins, color=look[scheme].color, edgecolor="white", linewidth=0.6)
        axes.set_title(f"{label(scheme)}: {len(values[scheme])} heads", loc="left", fontsize=10)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    figure.supxlabel("logit scale s; no unit", fontsize=10)
    figure.supylabel("heads", fontsize=10)
    return figure


# ---- parts of single figures


def _depths_of_texts(selected: Iterable[Row]) -> list[set[float]]:
    """The depths at which each model was asked at each length."""
    found: dict[tuple[Any, ...], set[float]] = defaultdict(set)
    for row in selected:
        found[row["scheme"], row["seed"], row["length"]].add(row["depth"])
    return [*found.values()]


def _shape(panel: Iterable[Row]) -> str:
    """What makes two panels look the same."""
    return json.dumps(sorted([row["head"], row["distance"], row["log_prior"], keys_ahead(row)] for row in panel))


def _titled(figure: Figure, title: str) -> Figure:
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    return figure
