"""Learned priors of the heads: curves, maps, shapes, scales and reach."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from attention_priors.lab.report.comparisons import Comparison, overview
from attention_priors.lab.report.estimates import NEAR, STRONG, by_scheme, gaussian_heads, halves, sight
from attention_priors.lab.report.figures import scales, style
from attention_priors.lab.report.figures.layout import Looks, figure_of, legend_below, line_key, panel_grid
from attention_priors.lab.report.figures.style import COLOURS, GREY, MARKERS, blank, label
from attention_priors.lab.report.wording import percent
from attention_priors.lab.results import Frame, Results

_OVER = {"distance": "distance d between query and key, tokens", "key": "position j of the key, tokens"}
_LARGEST_MAP = 64
"""Number of queries and keys in a map of weights; cells of larger maps would be smaller than a dot."""
_LOWEST = -8.0
"""Lower end, in nats, of a map of an image's prior; lower values weigh less than a thousandth."""
_NARROWEST = 0.5
"""Smallest range of a θα axis, so that rounding errors of heads that never moved are not magnified."""
_SIGHTS: dict[str, dict[str, Any]] = {
    "near-sighted": {"color": COLOURS[0]}, "between": {"color": "#999999", "linestyle": "--"},
    "far-sighted": {"color": COLOURS[1]},
}  # fmt: skip
_TITLE = 78
"""Number of title characters that fit across the figure."""


# ---- curves


def prior_curves(rows: Frame, scheme: str) -> Figure | None:
    """Draw each head's log-prior against distance, below its maximum, with one panel per layer (and seed).

    Each head is drawn relative to its maximum, because a constant changes no attention weight. Thin lines show keys
    after the query where their prior differs. Identical panels, as of a prior without training, are drawn once.

    Args:
        rows: Prior rows of one scheme.
        scheme: Name of the scheme.
    """
    if not len(rows):
        return None
    rows = rows.rename(columns={"distance": "places", "log_prior_ahead": "ahead"})
    panels = {_place(rows, *place): own for place, own in rows.groupby(["seed", "layer"])}
    if len(panels) > 1 and len({*map(_shape, panels.values())}) == 1:
        panels = {"every layer" + (", every seed" if rows.seed.nunique() > 1 else ""): next(iter(panels.values()))}
    columns = 3 if rows.layer.nunique() % 3 == 0 else 2
    return _curves(panels, scheme, min(columns, len(panels)), ["distance, tokens"] * columns, 2.0)


def prior_terms(rows: Frame, scheme: str) -> Figure | None:
    """Draw the terms of each head's log-prior, as in GOAT's Figure 1 (a, b): one line of panels per layer (and seed).

    Only sums have this figure; :func:`prior_curves` shows other priors.

    Args:
        rows: Term rows of one scheme.
        scheme: Name of the scheme.
    """
    terms = [*rows.groupby(["prior", "over"], sort=False).groups]
    if len(terms) < 2:
        return None
    panels = {
        f"{label(prior)}, {_place(rows, *place)}": own[(own.prior == prior) & (own.over == over)].assign(ahead=None)
        for place, own in rows.groupby(["seed", "layer"])
        for prior, over in terms
    }
    return _curves(panels, scheme, len(terms), [_OVER[over] for _, over in terms], 1.5)


def _curves(panels: Mapping[str, Frame], scheme: str, columns: int, words: Sequence[str], height: float) -> Figure:
    """Draw a panel of heads for each title, with x labels below the last panel of each column."""
    heads = sorted({head for own in panels.values() for head in own["head"]})
    figure, grid = panel_grid(len(panels), columns, height, base=1.2, sharex="col", sharey=True)
    for place, (axes, (title, own)) in enumerate(zip(grid, panels.items(), strict=True)):
        for row in own.itertuples():
            shade = _shade(heads.index(row.head), len(heads))
            behind, ahead = row.log_prior, _ahead(row)
            curve = scales.below_maximum([*behind, *ahead])
            axes.plot(row.places, curve[: len(behind)], gid=f"head:{row.head}", **shade)
            if ahead != behind:
                shade |= {"linewidth": 0.8, "alpha": 0.7}
                axes.plot(row.places, curve[len(behind) :], gid=f"ahead:{row.head}", **shade)
        scales.prior_axes(axes, max(map(max, own.places)))
        axes.set_title(title, loc="left", fontsize=10)
        last = place + columns >= len(panels)
        axes.set_xlabel(words[place % columns] if last else "", fontsize=9)
        axes.tick_params(labelbottom=last, labelleft=place % columns == 0)
    keys = [Line2D([], [], label=f"head {head}", **_shade(index, len(heads))) for index, head in enumerate(heads)]
    legend_below(figure, keys, columns=6)
    # A single row of panels is too low for the label on one line.
    space = "\n" if len(panels) <= columns else " "
    figure.supylabel(f"log-prior below its maximum,{space}nats (cut at −{scales.DEPTH_OF_CUT:.0f})", fontsize=9)
    return style.titled(figure, scheme)


def keys_ahead_differ(rows: Frame) -> bool:
    """Whether a head has a different prior for keys after the query."""
    return any(_ahead(row) != row.log_prior for row in rows.rename(columns={"log_prior_ahead": "ahead"}).itertuples())


def _ahead(row: Any) -> list[float]:
    return row.ahead if isinstance(row.ahead, list) else row.log_prior


def _shape(rows: Frame) -> str:
    """Return a key that is equal for panels that look the same."""
    return json.dumps(sorted([row.head, row.places, row.log_prior, _ahead(row)] for row in rows.itertuples()))


def _place(rows: Frame, seed: int, layer: int) -> str:
    return f"layer {layer}" + (f", seed {seed}" if rows.seed.nunique() > 1 else "")


def _shade(index: int, count: int) -> dict[str, Any]:
    """Return the look of a head; heads use a colour scale of their own, because the palette denotes schemes."""
    colour = colormaps["viridis"](0.85 * index / max(count - 1, 1))  # the end of the scale is invisible on white
    return {"color": colour, "linestyle": ("-", "--", "-.")[index % 3], "linewidth": 1.6}


# ---- maps


def prior_weights(terms: Frame, masses: Frame, scheme: str) -> Figure | None:
    """Draw a map per head of the weights of its prior alone, as in GOAT's Figures 1 (d) and 3 (b, right).

    The figure shows the first seed. Maps are built from terms over the distance or the key, so schemes with other terms
    or without term rows have none.

    Args:
        terms: Term rows of the scheme.
        masses: Mass rows of the scheme.
        scheme: Name of the scheme.
    """
    look = {"cmap": "Blues", "norm": PowerNorm(0.5, 0, 1)}
    maps = {place: causal_weights(summands) for place, summands in _first_seed(terms).groupby(["layer", "head"])}
    ticks = [0, 0.01, 0.1, 0.25, 0.5, 1]
    figure = _maps(maps, _masses(masses), scheme, look, "weight that the prior alone gives", ticks)
    return _between_tokens(figure)


def prior_logits(terms: Frame, masses: Frame, scheme: str) -> Figure | None:
    """Draw a map per head of its log-prior before the causal mask, as in GOAT's Figures 1 (c) and 3 (b, left).

    The mean of each row is subtracted, which changes no weight. The dashed line is the causal mask; keys above it are
    never seen. Arguments are those of :func:`prior_weights`.
    """
    # Older results lack log-priors of keys after the query.
    if not all(row.over == "key" or isinstance(row.ahead, list) for row in terms.itertuples()):
        return None
    maps = {place: _row_centred(summands) for place, summands in _first_seed(terms).groupby(["layer", "head"])}
    largest = max([1e-6, *(float(np.nanmax(np.abs(found))) for found in maps.values())])
    look = {"cmap": "RdBu_r", "norm": SymLogNorm(max(largest / 100, 1e-6), vmin=-largest, vmax=largest)}
    figure = _maps(maps, _masses(masses), scheme, look, "log-prior less its row's mean, nats")
    for axes in figure.axes if figure else ():
        if axes.images:
            end = axes.get_xlim()[1]
            axes.plot([-0.5, end], [-0.5, end], color="black", linewidth=0.8, linestyle="--")
    return _between_tokens(figure)


def prior_maps(rows: Frame, scheme: str) -> Figure | None:
    """Draw each head's prior around the central patch of the training grid (GOAT, Figure 5b).

    Args:
        rows: Prior maps of one scheme; the first seed is shown.
        scheme: Name of the scheme.
    """
    maps = {(row.layer, row.head): np.array(row.log_prior) for row in _first_seed(rows).itertuples()}
    figure = _maps(maps, {}, scheme, {"cmap": "viridis", "vmin": _LOWEST, "vmax": 0}, "nats below the most likely")
    height, width = np.shape(next(iter(maps.values()), np.zeros((1, 1))))
    for axes in figure.axes if figure else ():
        if axes.images:
            axes.plot(width // 2, height // 2, marker="+", color="white", markersize=5)
            axes.set(xticks=[], yticks=[])
    return figure


def _maps(
    maps: Mapping[tuple[int, int], np.ndarray],
    notes: Mapping[tuple[int, int], str],
    scheme: str,
    look: Mapping[str, Any],
    words: str,
    ticks: Sequence[float] | None = None,
) -> Figure | None:
    """Draw a map for each layer and head with a colour bar; return None without maps."""
    if not maps:
        return None
    layers, heads = (sorted({*places}) for places in zip(*maps, strict=True))
    columns = min(len(heads), 4)
    lines = math.ceil(len(heads) / columns)
    # Each map is square and has a title of up to three lines.
    figure = blank(0.9 + (0.4 + 0.4 * bool(notes) + 4.2 / max(columns, 2)) * lines * len(layers))
    grid: Any = figure.subplots(lines * len(layers), columns, sharex=True, sharey=True, squeeze=False)
    image: Any = None
    for axes, place in zip(grid.flat, [(n, head) for n in layers for head in range(lines * columns)], strict=True):
        if place not in maps:
            axes.set_visible(False)
            continue
        image = axes.imshow(maps[place], interpolation="nearest", **look)
        axes.set_title(f"layer {place[0]}, head {place[1]}{notes.get(place, '')}", fontsize=8)
        axes.tick_params(labelsize=7.5)
    bar = figure.colorbar(image, ax=grid, shrink=0.8, ticks=ticks)
    bar.set_label(words, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return style.titled(figure, scheme)


def _between_tokens(figure: Figure | None) -> Figure | None:
    if figure:
        figure.supxlabel("position of the key, tokens", fontsize=9.5)
        figure.supylabel("position of the query, tokens", fontsize=9.5)
    return figure


def _first_seed(rows: Frame) -> Frame:
    return rows[rows.seed == rows.seed.min()]


def _masses(masses: Frame) -> dict[tuple[int, int], str]:
    """Return a note for each head with its prior's mass on the first and the previous key."""
    return {
        (row.layer, row.head): f"\nfirst {percent(row.first)} %,\nprevious {percent(row.previous)} %"
        for row in _first_seed(masses).itertuples()
    }


def _log_prior(summands: Frame) -> np.ndarray:
    """Return the sum of the terms as attention applies it, ``(query, key)`` in nats; ``-inf`` for hidden keys.

    Entries for keys after the query are meaningful only if the terms define them.
    """
    size = min(_LARGEST_MAP, *(_contiguous(places) for places in summands.places))
    query, key = np.indices((size, size))
    total = np.zeros((size, size))
    for row in summands.itertuples():
        curve, ahead = (np.array(values[:size], dtype=float) for values in (row.log_prior, _ahead(row)))
        near = np.where(key <= query, curve[np.abs(query - key)], ahead[np.abs(query - key)])
        total = total + (curve[key] if row.over == "key" else near)
    total = np.where(np.isnan(total), -np.inf, total)
    scale = summands.scale.iloc[0]
    if isinstance(scale, list):
        # Skip hidden keys: 0 · ∞ is nan.
        np.multiply(total, np.array(scale[:size])[:, None], out=total, where=~np.isneginf(total))
    return total


def causal_weights(summands: Frame) -> np.ndarray:
    """Return the causal attention weights of a prior that is a sum of terms; nan for future keys."""
    total = _log_prior(summands)
    past = np.tri(len(total), dtype=bool)
    total = np.where(past, total, -np.inf)
    weights = np.exp(total - total.max(axis=1, keepdims=True))
    return np.where(past, weights / weights.sum(axis=1, keepdims=True), np.nan)


def _row_centred(summands: Frame) -> np.ndarray:
    """Return the log-prior minus the mean of its row, before any causal mask; nan for hidden keys."""
    total = _log_prior(summands)
    total = np.where(np.isneginf(total), np.nan, total)
    return total - np.nanmean(total, axis=1, keepdims=True)


def _contiguous(places: Sequence[int]) -> int:
    """Return the number of consecutive places from 0."""
    return next((index for index, place in enumerate(places) if place != index), len(places))


# ---- shapes and scales


def thetas(results: Results, compared: Sequence[Comparison] | None = None) -> Figure | None:
    """Draw shape β against θα of the trained Generalized Gaussian heads, over BAM's clusters.

    Args:
        results: Results of a study.
        compared: see :func:`~attention_priors.lab.report.figures.layout.figure_of`.
    """
    heads = gaussian_heads(results["prior"])
    layers = sorted(heads.layer.unique())

    def draw(axes: Axes, shown: Looks, panel: bool) -> list[Artist]:
        own = heads[heads.scheme.isin([*shown])]
        bottom, top = min(-1.2, own.beta.min()), max(0.6, own.beta.max())
        bottom, top = bottom - 0.06 * (top - bottom), top + 0.06 * (top - bottom)
        bands = {"local\nβ > 0": (0, top, "#fdf3dc"), "retrieval\n−0.6 ≤ β ≤ 0": (STRONG, 0, "#e3f1ea"),
                 "strong retrieval\nβ < −0.6": (bottom, STRONG, "#e2ecf7")}  # fmt: skip
        for words, (lower, upper, colour) in bands.items():
            axes.axhspan(lower, upper, color=colour, linewidth=0, zorder=0)
            place = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
            axes.annotate(words, (1.02, (lower + upper) / 2), fontsize=7 if panel else 9, color="#333333", **place)
        axes.axhline(0, color=GREY, linewidth=0.8, zorder=1)
        dot: dict[str, Any] = {"linestyle": "none", "markersize": 6.5, "alpha": 0.75, "markeredgecolor": "white",
                               "markeredgewidth": 0.5, "zorder": 3}  # fmt: skip
        # Markers denote layers if there is one scheme, else schemes.
        markers = {n: MARKERS[index % len(MARKERS)] for index, n in enumerate(layers if len(shown) == 1 else [])}
        for head in own.itertuples():
            one = shown[head.scheme]
            marker = markers.get(head.layer, one.marker)
            axes.plot(head.theta_alpha, head.beta, color=one.color, marker=marker, gid=f"theta:{head.scheme}", **dot)
        axes.set_ylim(bottom, top)
        left, right = axes.get_xlim()
        missing = max(0.0, _NARROWEST - (right - left)) / 2
        axes.set_xlim(left - missing, right + missing)
        axes.set_xlabel("θα = −β ln α, no unit", fontsize=9)
        axes.set_ylabel("shape β, no unit", fontsize=9)
        entry: dict[str, Any] = {"color": GREY, "linestyle": "none"}
        entries = [Line2D([], [], marker=marker, label=f"layer {n}", **entry) for n, marker in markers.items()]
        return [*entries]

    key = lambda one, name: line_key(one._replace(linestyle="none"), name)  # noqa: E731
    return figure_of(results, {*heads.scheme}, draw, compared=compared, key=key)


def logit_scales(results: Results, compared: Sequence[Comparison] | None = None) -> Figure | None:
    """Draw the distribution of logit scales s over heads.

    Args:
        results: Results of a study.
        compared: see :func:`~attention_priors.lab.report.figures.layout.figure_of`.
    """
    values = {name: own.s.to_numpy() for name, own in by_scheme(results["logit_scale"].dropna(subset="s"))}

    def draw(axes: Axes, shown: Looks, panel: bool) -> list[Artist]:
        everything = np.concatenate([values[name] for name in shown])
        bins = np.histogram_bin_edges(everything, bins=min(30, round(2 * math.sqrt(len(everything)))))
        for name, one in shown.items():
            weights = np.full(len(values[name]), 100 / len(values[name]))
            options: dict[str, Any] = {"bins": bins, "weights": weights, "color": one.color}
            axes.hist(values[name], histtype="stepfilled", alpha=0.12, **options)
            options |= {"histtype": "step", "linewidth": 1.6, "linestyle": one.linestyle, "gid": f"s:{name}"}
            axes.hist(values[name], **options)
        axes.set_xlabel("logit scale s; no unit", fontsize=9)
        axes.set_ylabel("heads, %", fontsize=9)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
        return []

    key = lambda one, name: line_key(one._replace(marker=""), name)  # noqa: E731
    return figure_of(results, values, draw, compared=compared, key=key)


# ---- reach


def prior_reach(results: Results) -> Figure | None:
    """Draw the distance that holds half of each head's prior against text length, with one panel per scheme."""
    found = halves(results)
    shown = [name for name in overview(results) if name in found]
    if not shown:
        return None
    lengths = sorted({length for own in found.values() for half in own for length in half})
    columns = 2 if len(shown) == 4 else min(3, len(shown))  # no panel alone in a line
    figure, grid = panel_grid(len(shown), columns, 2.0, base=0.8, sharex=True, sharey=True)
    powers = [2.0**k for k in range(40) if NEAR < 2**k <= lengths[-1] / 2]
    for place, (axes, name) in enumerate(zip(grid, shown, strict=True)):
        style.tidy(axes)
        for half in found[name]:
            options = _SIGHTS[sight(half)] | {"linewidth": 1.2, "alpha": 0.5, "gid": f"reach:{name}:{sight(half)}"}
            axes.plot([*half], [*half.values()], **options)
        axes.plot(lengths, [length / 2 for length in lengths], color="black", linestyle=":", linewidth=1, zorder=1)
        axes.set_title(textwrap.fill(label(name), _TITLE // columns), loc="left", fontsize=8.5)
        scales.log_token_axis(axes, lengths, lengths[0], lengths[-1], at_most=4)
        axes.set_yscale("symlog", base=2, linthresh=NEAR, linscale=1.5)
        axes.set_ylim(-0.4, 1.2 * lengths[-1])
        scales.set_ticks(axes.yaxis, [0, NEAR, *scales.thin(powers, 4)])
        axes.axhline(NEAR, color=GREY, linewidth=0.6, zorder=1)
        axes.tick_params(labelsize=7.5)
        if place + columns >= len(shown):  # no panel below
            axes.set_xlabel("length of the text, tokens", fontsize=8)
            axes.tick_params(labelbottom=True)
    figure.supylabel("distance that holds half of the prior, tokens", fontsize=9.5)
    words = {name: name if name == "between" else f"{name} at the training length" for name in _SIGHTS}
    keys = [Line2D([], [], **one, label=words[name]) for name, one in _SIGHTS.items()]
    keys.append(Line2D([], [], color="black", linestyle=":", label="half of the text: a uniform prior"))
    legend_below(figure, keys, columns=2)
    return figure
