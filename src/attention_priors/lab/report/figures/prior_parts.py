"""What sums of priors are made of, where they put their mass, and how content takes it from a sink."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.colors import Normalize, PowerNorm, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attention_priors._io import number
from attention_priors.lab.intervals import cut_to_share, over_seeds
from attention_priors.lab.report.figures.drawing import (
    DEPTH_OF_CUT,
    below_maximum,
    head_look,
    legend_below,
    line_key,
    prior_axes,
    require,
    require_rows,
    start,
)
from attention_priors.lab.report.figures.style import blank, label, looks, thin
from attention_priors.lab.report.numbers import percent
from attention_priors.lab.report.selections.axes import overview
from attention_priors.lab.report.selections.results import Results, Row, distinct, rows

_AXIS = {"distance": "distance d between query and key, tokens", "key": "position j of the key, tokens"}
_LARGEST_SIGNAL = 256.0
"""Nats; where more of them stand against a prior, it has long lost."""
_LARGEST_MAP = 64
"""Queries and keys of a map of weights; more would be smaller than a dot."""


def prior_terms(results: Results, scheme: str) -> Figure:
    """The summands of each head's log-prior, as in GOAT's Figure 1 (a, b): a line per layer (and seed).

    Of sums alone: :func:`~attention_priors.lab.report.figures.comparison.prior_curves` shows other priors whole.
    """
    selected = rows(results, "prior_terms", scheme)
    terms = list(dict.fromkeys((row["prior"], row["over"]) for row in selected))
    require_rows(selected if len(terms) > 1 else [], "prior_terms", scheme)
    places = sorted({(row["seed"], row["layer"]) for row in selected})
    heads, seeds = distinct(selected, "head"), distinct(selected, "seed")
    figure = blank(1.0 + 2.2 * len(places))
    grid = figure.subplots(len(places), len(terms), sharex="col", sharey=True, squeeze=False)
    for line, (seed, layer) in zip(grid, places, strict=True):
        for axes, (prior, over) in zip(line, terms, strict=True):
            mine = [
                row
                for row in selected
                if (row["seed"], row["layer"], row["prior"], row["over"]) == (seed, layer, prior, over)
            ]
            for row in mine:
                axes.plot(
                    row["places"], below_maximum(row["log_prior"]), gid=f"term:{prior}:{row['head']}",
                    **head_look(heads.index(row["head"]), len(heads)),
                )  # fmt: skip
            prior_axes(axes, max(place for row in mine for place in row["places"]), _AXIS[over])
            where = f"layer {layer}" + (f", seed {seed}" if len(seeds) > 1 else "")
            axes.set_title(f"{label(prior)}, {where}", loc="left", fontsize=10)
        line[0].set_ylabel(f"log-prior below its\nmaximum, nats (cut at −{DEPTH_OF_CUT:.0f})", fontsize=9)
    figure.suptitle(label(scheme), x=0.01, ha="left", fontweight="bold", fontsize=12)
    keys = [Line2D([], [], label=f"head {head}", **head_look(index, len(heads))) for index, head in enumerate(heads)]
    legend_below(figure, keys, columns=6)
    return figure


def prior_weights(results: Results, scheme: str) -> Figure:
    """The weights that each head's prior alone gives, as in GOAT's Figures 1 (d) and 3 (b, right): a map per head.

    Of the first seed. Maps are made of the summands, so there are none of schemes whose prior is not made of what
    depends on the distance and what depends on the key, nor of those that have no summands as a few numbers say it all.
    """
    selected = require_rows(rows(results, "prior_terms", scheme), "prior_terms", scheme)
    maps = {head: _weights(summands) for head, summands in _of_heads(selected).items()}
    figure, image, grid = _maps(results, scheme, maps, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    bar = figure.colorbar(image, ax=grid, shrink=0.8, ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
    bar.set_label("weight that the prior alone gives", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure


def prior_logits(results: Results, scheme: str) -> Figure:
    """Each head's log-prior before the causal mask, as in GOAT's Figures 1 (c) and 3 (b, left): a map per head.

    Of each row its mean is taken away, which changes no weight. The dashed line is the causal mask's: what is above it
    is never seen. Otherwise as :func:`prior_weights`.
    """
    selected = rows(results, "prior_terms", scheme)
    # Results of before these were kept have none.
    told = [row for row in selected if row["over"] == "key" or row.get("ahead") is not None]
    require_rows(told if len(told) == len(selected) else [], "prior_terms", scheme)
    maps = {head: _row_centred(summands) for head, summands in _of_heads(told).items()}
    largest = max(1e-6, *(float(np.abs(found[np.isfinite(found)]).max()) for found in maps.values()))
    norm = SymLogNorm(max(largest / 100, 1e-6), vmin=-largest, vmax=largest)
    figure, image, grid = _maps(results, scheme, maps, cmap="RdBu_r", norm=norm, masked=True)
    bar = figure.colorbar(image, ax=grid, shrink=0.8)
    bar.set_label("log-prior less its row's mean, nats", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure


def _maps(
    results: Results,
    scheme: str,
    maps: Mapping[tuple[int, int], np.ndarray],
    *,
    cmap: str,
    norm: Normalize,
    masked: bool = False,
) -> tuple[Figure, Any, Any]:
    """A map of keys against queries for each layer and head of the first seed; the figure, one image, and the axes."""
    seeds = distinct(rows(results, "prior_terms", scheme), "seed")
    layers, heads = (sorted(set(places)) for places in zip(*maps, strict=True))
    columns = min(len(heads), 4)
    lines = math.ceil(len(heads) / columns)
    # Maps are square, each with a title of three lines.
    figure = blank(0.9 + (0.8 + 4.2 / max(columns, 2)) * lines * len(layers))
    grid: Any = figure.subplots(lines * len(layers), columns, sharex=True, sharey=True, squeeze=False)
    image = None
    for place, (layer, head) in enumerate((layer, head) for layer in layers for head in range(lines * columns)):
        axes = grid.flat[place]
        found = maps.get((layer, head))
        if found is None:
            axes.set_visible(False)
            continue
        image = axes.imshow(found, cmap=cmap, norm=norm, interpolation="nearest")
        if masked:
            end = len(found) - 0.5
            axes.plot([-0.5, end], [-0.5, end], color="black", linewidth=0.8, linestyle="--")
        axes.set_title(f"layer {layer}, head {head}{_masses(results, scheme, seeds[0], layer, head)}", fontsize=8)
        axes.tick_params(labelsize=7.5)
    assert image is not None
    figure.supxlabel("position of the key, tokens", fontsize=9.5)
    figure.supylabel("position of the query, tokens", fontsize=9.5)
    which = f", seed {seeds[0]}" if len(seeds) > 1 else ""
    figure.suptitle(label(f"{scheme}{which}"), x=0.01, ha="left", fontweight="bold", fontsize=12)
    return figure, image, grid


def sink_mass(results: Results) -> Figure:
    """The first token's attention weight against the signal, as in GOAT's Figure 2c.

    Of each seed, the head that gives the first token most where the signal is weakest: layers take parts as they like,
    and means over all heads would say little of any. A point is one factor on the content logits, its signal and weight
    are means over seeds; the band is Student's 95 % interval of the weight.
    """
    look = looks(results)
    shown = require(results, "sink_mass", overview(results))
    figure, axes = start(height=4.2)
    largest = 0.0
    for scheme in shown:
        heads = [_strongest_sink(rows(results, "sink_mass", scheme), seed) for seed in _seeds(results, scheme)]
        factors = [row["factor"] for row in heads[0]]
        points = list(zip(*heads, strict=True))
        signal = [over_seeds([number(row["signal"]) for row in point]).mean for point in points]
        mass = [cut_to_share(over_seeds([number(row["mass"]) for row in point])) for point in points]
        mean, low, high = (100 * np.array(values) for values in zip(*mass, strict=True))
        one = look[scheme]
        axes.plot(signal, mean, **one._asdict(), markersize=5, linewidth=1.8, gid=f"sink:{scheme}")
        if np.isfinite(low).any():
            axes.fill_between(signal, low, high, color=one.color, alpha=0.13, linewidth=0)
        for x, y in ((x, y) for factor, x, y in zip(factors, signal, mean, strict=True) if factor == 1):
            axes.plot(x, y, marker="o", markersize=11, markerfacecolor="none", color="black", linestyle="none")
        largest = max(largest, *signal)
    axes.set_ylim(-4, 104)
    _signal_axis(axes, min(largest, _LARGEST_SIGNAL))
    several = any(len(_seeds(results, scheme)) > 1 for scheme in shown)
    axes.set_ylabel("weight of the first token, %" + (" (bands: 95 % interval)" if several else ""))
    trained = Line2D([], [], color="black", marker="o", markersize=9, markerfacecolor="none", linestyle="none")
    trained.set_label("the model as it is")
    legend_below(figure, [*(line_key(look[scheme], scheme) for scheme in shown), trained], columns=4)
    return figure


def _seeds(results: Results, scheme: str) -> list[int]:
    return distinct(rows(results, "sink_mass", scheme), "seed")


def _strongest_sink(selected: list[Row], seed: int) -> list[Row]:
    """The rows, by factor, of the head whose weight of the first token is largest at the smallest factor."""
    heads: dict[tuple[int, int], list[Row]] = {}
    for row in sorted((row for row in selected if row["seed"] == seed), key=lambda row: row["factor"]):
        heads.setdefault((row["layer"], row["head"]), []).append(row)
    return max(heads.values(), key=lambda found: number(found[0]["mass"]))


def _signal_axis(axes: Any, largest: float) -> None:
    """Nats, linear up to 1 and then logarithmic."""
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.7)
    axes.set_xlim(-0.1, max(largest, 1) * 1.15)
    axes.xaxis.set_major_locator(FixedLocator([0, *thin([2.0**k for k in range(30) if 2.0**k <= largest], 6)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("signal ω: range of the content logits that a query sees, nats")


def _of_heads(selected: list[Row]) -> dict[tuple[int, int], list[Row]]:
    """The summands of each layer and head of the first seed."""
    seed = distinct(selected, "seed")[0]
    found: dict[tuple[int, int], list[Row]] = {}
    for row in selected:
        if row["seed"] == seed:
            found.setdefault((row["layer"], row["head"]), []).append(row)
    return found


def _log_prior(summands: list[Row]) -> np.ndarray:
    """``(query, key)``: the sum of some curves as it is applied, in nats; ``-inf`` where it hides the key.

    Of keys ahead of the query it is meant only where the summands say what it is there.
    """
    size = min(_LARGEST_MAP, *(_contiguous(row["places"]) for row in summands))
    query, key = np.indices((size, size))
    total = np.zeros((size, size))
    for row in summands:
        curve = _curve(row["log_prior"], size)
        if row["over"] == "key":
            total = total + curve[key]
            continue
        ahead = curve if row.get("ahead") is None else _curve(row["ahead"], size)
        total = total + np.where(key <= query, curve[np.abs(query - key)], ahead[np.abs(query - key)])
    if summands[0].get("scale") is not None:
        # Not what is hidden: 0 · ∞ is no number.
        np.multiply(total, np.array(summands[0]["scale"][:size])[:, None], out=total, where=~np.isneginf(total))
    return total


def _curve(values: list[float | None], size: int) -> np.ndarray:
    curve = np.array([number(value) for value in values[:size]])
    curve[np.isnan(curve)] = -np.inf
    return curve


def _weights(summands: list[Row]) -> np.ndarray:
    """Causal probabilities of a prior that is the sum of some curves, as it is applied; those of the future are nan."""
    total = _log_prior(summands)
    past = np.tri(len(total), dtype=bool)
    total = np.where(past, total, -np.inf)
    weights = np.exp(total - total.max(axis=1, keepdims=True))
    weights = weights / weights.sum(axis=1, keepdims=True)
    return np.where(past, weights, np.nan)


def _row_centred(summands: list[Row]) -> np.ndarray:
    """The log-prior less the mean of its row, before any causal mask; nan where it hides the key."""
    total = _log_prior(summands)
    total = np.where(np.isneginf(total), np.nan, total)
    return total - np.nanmean(total, axis=1, keepdims=True)


def _contiguous(places: list[int]) -> int:
    """How many places from 0 there are without a gap."""
    return next((index for index, place in enumerate(places) if place != index), len(places))


def _masses(results: Results, scheme: str, seed: int, layer: int, head: int) -> str:
    for row in rows(results, "prior_mass", scheme):
        if (row["seed"], row["layer"], row["head"]) == (seed, layer, head):
            return f"\nfirst {percent(row['first'])} %,\nprevious {percent(row['previous'])} %"
    return ""
