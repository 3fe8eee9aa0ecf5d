"""The figures, one function each, drawn with matplotlib's objects so that no global state is touched.

All take a results dictionary; each raises :class:`NothingToShowError` where there is nothing to draw.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attention_priors.report.numbers import listing, multiple, percent, quantity
from attention_priors.report.results import (
    Results,
    Row,
    count_passkeys,
    distinct,
    number,
    perplexity_curve,
    rows,
    schemes_with,
    stopped,
    training_length,
)
from attention_priors.report.style import GREY, MARKERS, WIDTH, Look, blank, label, looks, thin, tidy
from attention_priors.report.tables import PasskeyCell, passkey_table

DEPTH_OF_CUT = 30.0
"""Log-priors are drawn down to this many nats below their maximum: e^-30 is no weight at all."""

PERPLEXITY_RANGE = 10.0
"""The perplexity axis ends at this many times the lowest value, so that failures do not squash the rest."""

STRONG_RETRIEVAL = -0.6
"""Below this shape β, a retrieval head is called strong."""


class NothingToShowError(ValueError):
    """The results hold no data for a figure."""


_LARGEST_LOG_TICK = 30


def passkey_by_length(results: Results) -> Figure:
    """The share of pass keys retrieved against context length, with intervals.

    Shares are pooled over depths and seeds; where there are several seeds, each is a thin line as well.
    Points are moved sideways a little, so that intervals do not hide each other.
    """
    cells = passkey_table(results)
    schemes = _require(results, "passkey")
    lengths = sorted({cell.length for cell in cells})
    look = looks(results)
    figure, axes = _start(height=4.5)
    crosses = False
    for scheme, nudge in zip(schemes, _nudges(len(schemes), lengths), strict=True):
        mine = [cell for cell in cells if cell.scheme == scheme]
        # What only some seeds were evaluated at does not continue the line of them all.
        for complete in (True, False):
            points = [cell for cell in mine if cell.complete == complete]
            if points:
                _shares_with_intervals(axes, points, nudge, look[scheme], hollow=not complete)
        selected = rows(results, "passkey", scheme)
        seeds = distinct(selected, "seed")
        for seed in seeds:
            counts = sorted(count_passkeys((row for row in selected if row["seed"] == seed), "length").items())
            x = [length * nudge for (length,), _ in counts]
            y = [100 * count.share for _, count in counts]
            if len(seeds) > 1:
                axes.plot(x, y, color=look[scheme].color, linewidth=0.7, alpha=0.5, gid=f"seed:{scheme}:{seed}")
            if stopped(results, scheme, seed) and counts[-1][0][0] < lengths[-1]:
                crosses = True
                axes.plot(
                    x[-1], y[-1], marker="x", markersize=10, markeredgewidth=1.3, color="black", zorder=5,
                    gid=f"stopped:{scheme}:{seed}",
                )  # fmt: skip
    axes.set_ylim(-4, 104)
    axes.set_ylabel("pass keys retrieved, % (bars: 95 % interval)")
    _token_axis(axes, lengths, lengths[0], lengths[-1], training_length(results))
    axes.set_xlabel("context length, tokens")
    keys = [_line_key(results, scheme) for scheme in schemes]
    if crosses:
        keys.append(Line2D([], [], color="black", marker="x", linestyle="none", markersize=9, label="stopped here"))
    if not all(cell.complete for cell in cells):
        hollow_key = Line2D([], [], color=GREY, marker="o", linestyle="none", markerfacecolor="white")
        hollow_key.set_label("without stopped seeds")
        keys.append(hollow_key)
    _legend_below(figure, keys)
    return figure


def passkey_heatmap(results: Results, scheme: str) -> Figure:
    """The share retrieved at each depth and length, in percent, pooled over seeds; means at the edges."""
    selected = _require_rows(rows(results, "passkey", scheme), "passkey", scheme)
    # The lengths and depths of all schemes, so that heatmaps can be laid side by side.
    lengths = distinct(rows(results, "passkey"), "length")
    depths = distinct(rows(results, "passkey"), "depth")
    counts = count_passkeys(selected, "depth", "length")
    shares = np.full((len(depths) + 1, len(lengths) + 1), np.nan)
    for (depth, length), count in counts.items():
        shares[depths.index(depth), lengths.index(length)] = 100 * count.share
    for edge, key, values in (((-1, slice(-1)), "length", lengths), ((slice(-1), -1), "depth", depths)):
        means = count_passkeys(selected, key)
        shares[edge] = [100 * means[value,].share if (value,) in means else np.nan for value in values]

    # Cells keep their size whatever their number.
    figure, axes = _start(width=1.2 + 0.4 * (len(lengths) + 1), height=1.4 + 0.21 * (len(depths) + 1))
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
        elif (i, j) != (len(depths), len(lengths)):  # every cell but the corner where the means meet
            axes.add_patch(
                Rectangle(
                    (columns[j] - 0.5, lines[i] - 0.5), 1, 1, facecolor="#e6e6e6", edgecolor="#b5b5b5",
                    hatch="////", linewidth=0, gid="not evaluated",
                )
            )  # fmt: skip
    trained = training_length(results)
    within = sum(length <= trained for length in lengths)
    for colour, width, dashes in (("white", 4.0, "-"), ("black", 1.4, (0, (5, 3)))):
        axes.plot([within, within], [0, len(depths)], color=colour, linewidth=width, linestyle=dashes)
    axes.set_ylim(row_edges[-1], 0)
    axes.set_xticks(columns, [*map(str, lengths), "mean"], fontsize=8)
    if lengths[-1] > 9999:  # five digits are wider than a cell
        axes.tick_params(axis="x", rotation=90)
    axes.set_yticks(lines, [*(f"{100 * depth:.0f}" for depth in depths), "mean"], fontsize=8)
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("depth of the key, % of the context")
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{label(scheme)}: pass keys retrieved, %", loc="left", fontsize=11, fontweight="bold")
    keys: list[Artist] = [Line2D([], [], color="black", linestyle="--", label=f"training length, {trained} tokens")]
    if np.isnan(shares[:-1, :-1]).any():
        keys.append(Patch(facecolor="#e6e6e6", edgecolor="#b5b5b5", hatch="////", label="not evaluated"))
    _legend_below(figure, keys)
    return figure


def perplexity_by_position(results: Results) -> Figure:
    """Perplexity against position: e to the mean loss over seeds, thin lines for each of several seeds."""
    curves = {
        scheme: perplexity_curve(rows(results, "perplexity", scheme)) for scheme in _require(results, "perplexity")
    }
    curves = {scheme: curve for scheme, curve in curves.items() if curve}
    if not curves:
        raise NothingToShowError("results must hold perplexity rows with a finite nll; there is none")
    look = looks(results)
    figure, axes = _start(height=4.5)
    axes.set_yscale("log")
    for scheme, curve in curves.items():
        axes.plot(
            list(curve), list(curve.values()), **look[scheme]._asdict(), label=label(scheme), markersize=4.5,
            linewidth=1.8, zorder=3,
        )  # fmt: skip
        selected = rows(results, "perplexity", scheme)
        seeds = distinct(selected, "seed")
        for seed in seeds if len(seeds) > 1 else []:
            alone = perplexity_curve(row for row in selected if row["seed"] == seed)
            axes.plot(
                list(alone), list(alone.values()), color=look[scheme].color, linewidth=0.7, alpha=0.5,
                gid=f"seed:{scheme}:{seed}",
            )  # fmt: skip
    values = [value for curve in curves.values() for value in curve.values()]
    cut = PERPLEXITY_RANGE * min(values)
    axes.set_ylim(min(values) / 1.1, min(max(values) * 1.1, cut))
    axes.set_ylabel("perplexity, per token")
    beyond = {scheme: max(curve.values()) for scheme, curve in curves.items() if max(curve.values()) > cut}
    if beyond:
        names = listing([f"{label(scheme)} (up to {_rough(highest)})" for scheme, highest in beyond.items()])
        axes.set_ylabel(f"perplexity, per token (axis ends at {quantity(cut)})")
        axes.set_title(textwrap.fill(f"Beyond the axis: {names}", 92), loc="left", fontsize=9)
    _plain_log_ticks(axes)
    positions = [position for curve in curves.values() for position in curve]
    _token_axis(axes, _powers_of_two(positions), min(positions), max(positions), training_length(results))
    axes.set_xlabel("position in the text, tokens")
    _legend_below(figure, [_line_key(results, scheme) for scheme in curves])
    return figure


def prior_curves(results: Results, scheme: str) -> Figure:
    """Each head's log-prior against distance, below its maximum: one panel per layer (and seed).

    A constant added to a head's log-prior changes no attention weight, so each head is measured from its own
    maximum. Panels that would all be the same, as for a prior that is not learned, are drawn once.
    """
    selected = _require_rows(rows(results, "priors", scheme), "priors", scheme)
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
            shade = _head_look(heads.index(row["head"]), len(heads))
            axes.plot(row["distance"], _below_maximum(row), gid=f"head:{row['head']}", **shade)
        _prior_axes(axes, farthest)
        axes.set_title(title, loc="left", fontsize=10)
        if place % columns == 0:
            axes.set_ylabel(f"log-prior below its\nmaximum, nats (cut at −{DEPTH_OF_CUT:.0f})", fontsize=9)
    for axes in set(grid.flat) - used:
        axes.set_visible(False)
    figure.suptitle(label(scheme), x=0.01, ha="left", fontweight="bold", fontsize=12)
    keys = [Line2D([], [], label=f"head {head}", **_head_look(index, len(heads))) for index, head in enumerate(heads)]
    _legend_below(figure, keys, columns=6)
    return figure


def theta_scatter(results: Results) -> Figure:
    """Where the heads of the Generalized Gaussian priors ended: shape β against θα."""
    heads = [
        row
        for row in rows(results, "priors")
        if row["prior"] == "generalized_gaussian" and math.isfinite(number(row["parameters"]["beta"]))
    ]
    if not heads:
        raise NothingToShowError(
            "results must hold priors rows of a generalized_gaussian with a finite β; there is none"
        )
    look = looks(results)
    layers = distinct(heads, "layer")
    figure, axes = _start(height=4.8)
    shapes = [number(row["parameters"]["beta"]) for row in heads]
    bottom, top = min(-1.2, *shapes), max(0.6, *shapes)
    bottom, top = bottom - 0.06 * (top - bottom), top + 0.06 * (top - bottom)
    bands = (
        (0, top, "#fdf3dc", "local\nβ > 0"),
        (STRONG_RETRIEVAL, 0, "#e3f1ea", "retrieval\n−0.6 ≤ β ≤ 0"),
        (bottom, STRONG_RETRIEVAL, "#e2ecf7", "strong retrieval\nβ < −0.6"),
    )
    for lower, upper, colour, words in bands:
        axes.axhspan(lower, upper, color=colour, linewidth=0, zorder=0)
        axes.annotate(
            words, (1.02, (lower + upper) / 2), xycoords=("axes fraction", "data"), va="center", fontsize=9,
            color="#333333", annotation_clip=False,
        )  # fmt: skip
    axes.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    for row, shape in zip(heads, shapes, strict=True):
        axes.plot(
            number(row["parameters"]["theta_alpha"]), shape, color=look[row["scheme"]].color,
            marker=MARKERS[layers.index(row["layer"]) % len(MARKERS)], linestyle="none", markersize=6.5,
            alpha=0.75, markeredgecolor="white", markeredgewidth=0.5, zorder=3, gid=f"theta:{row['scheme']}",
        )  # fmt: skip
    axes.set_ylim(bottom, top)
    axes.set_xlabel("θα = ln(amplitude), the penalty at a distance of one token; no unit")
    axes.set_ylabel("shape β (the paper's θβ); no unit")
    shown = [scheme for scheme in schemes_with(results, "priors") if any(r["scheme"] == scheme for r in heads)]
    keys: list[Artist] = [Patch(color=look[scheme].color, label=label(scheme)) for scheme in shown]
    for index, layer in enumerate(layers):
        key = Line2D([], [], color=GREY, marker=MARKERS[index % len(MARKERS)], linestyle="none")
        key.set_label(f"layer {layer}")
        keys.append(key)
    _legend_below(figure, keys, columns=4)
    return figure


def logit_scale_histogram(results: Results) -> Figure:
    """How many heads have which logit scale s: one row per scheme, the same bins in all."""
    schemes = _require(results, "logit_scales")
    look = looks(results)
    values = {scheme: [number(row["s"]) for row in rows(results, "logit_scales", scheme)] for scheme in schemes}
    values = {scheme: [s for s in scales if math.isfinite(s)] for scheme, scales in values.items()}
    everything = [s for scales in values.values() for s in scales]
    if not everything:
        raise NothingToShowError("results must hold logit_scales rows with a finite s; there is none")
    bins = np.histogram_bin_edges(everything, bins=min(30, round(2 * math.sqrt(len(everything)))))
    figure = blank(1.0 + 1.4 * len(schemes))
    grid: Any = figure.subplots(len(schemes), 1, sharex=True, sharey=True, squeeze=False)
    for axes, scheme in zip(grid.flat, schemes, strict=True):
        tidy(axes)
        axes.hist(values[scheme], bins=bins.tolist(), color=look[scheme].color, edgecolor="white", linewidth=0.6)
        axes.set_title(f"{label(scheme)}: {len(values[scheme])} heads", loc="left", fontsize=10)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    figure.supxlabel("logit scale s; no unit", fontsize=10)
    figure.supylabel("heads", fontsize=10)
    return figure


# ---- what the figures share


def _require(results: Results, section: str) -> list[str]:
    """The schemes with rows in a section, of which there must be some."""
    return _require_rows(schemes_with(results, section), section)


def _require_rows(selected: list[Any], section: str, scheme: str | None = None) -> list[Any]:
    if not selected:
        whose = "" if scheme is None else f" of the scheme {scheme!r}"
        raise NothingToShowError(f"results[{section!r}] must hold rows{whose}; there is none")
    return selected


def _start(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    figure = blank(height, width)
    axes = figure.add_subplot()
    tidy(axes)
    return figure, axes


def _legend_below(figure: Figure, keys: Sequence[Artist], columns: int = 3) -> None:
    """A legend under the axes, which keep their height however many lines it has."""
    lines = math.ceil(len(keys) / columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * lines)
    figure.legend(
        handles=list(keys),
        loc="outside lower center",
        ncols=min(columns, len(keys)),
        frameon=False,
        fontsize=9.5,
    )


def _line_key(results: Results, scheme: str) -> Line2D:
    return Line2D([], [], **looks(results)[scheme]._asdict(), label=label(scheme), linewidth=1.8)


def _shares_with_intervals(axes: Axes, cells: Sequence[PasskeyCell], nudge: float, look: Look, *, hollow: bool) -> None:
    x, y, low, high = (
        np.array(values)
        for values in zip(
            *((cell.length * nudge, 100 * cell.share, 100 * cell.low, 100 * cell.high) for cell in cells),
            strict=True,
        )
    )
    axes.errorbar(
        x, y, yerr=(y - low, high - y), color=look.color, marker=look.marker, markersize=6,
        linestyle="none" if hollow else look.linestyle, markerfacecolor="white" if hollow else look.color,
        linewidth=1.8, elinewidth=1.2, capsize=2.5, zorder=3,
        label=f"{cells[0].scheme}, without stopped seeds" if hollow else cells[0].scheme,
    )  # fmt: skip


def _token_axis(axes: Axes, ticks: Sequence[float], first: float, last: float, trained: int) -> None:
    """A log2 axis in tokens, multiples of the training length above it, and a line at the training length."""
    axes.set_xscale("log", base=2)
    left, right = min(first, trained) / 1.25, max(last, trained) * 1.25
    axes.set_xlim(left, right)
    axes.xaxis.set_major_locator(FixedLocator(thin(ticks, 9)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(trained, color="#444444", linestyle=(0, (5, 3)), linewidth=1, zorder=1, gid="training length")
    to_ratio: Callable[[Any], Any] = lambda tokens: tokens / trained  # noqa: E731
    to_tokens: Callable[[Any], Any] = lambda ratio: ratio * trained  # noqa: E731
    above = axes.secondary_xaxis("top", functions=(to_ratio, to_tokens))
    ratios = [2.0**k for k in range(-20, 21) if left <= 2.0**k * trained <= right]
    above.xaxis.set_major_locator(FixedLocator(thin(ratios, 9)))
    above.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{multiple(value)}×"))
    above.xaxis.set_minor_locator(NullLocator())
    above.set_xlabel(f"× training length (dashed: {trained} tokens)")
    above.spines["top"].set_visible(False)


def _powers_of_two(values: Iterable[float]) -> list[float]:
    spread = sorted(values)
    return [2.0**k for k in range(_LARGEST_LOG_TICK) if spread[0] / 1.15 <= 2.0**k <= spread[-1] * 1.15]


def _plain_log_ticks(axes: Axes) -> None:
    """Ticks at 1, 2, 5, 10, ... in plain numbers; evenly spaced ones where a log axis spans less."""
    low, high = axes.get_ylim()
    ticks = [digit * 10.0**k for k in range(-1, _LARGEST_LOG_TICK) for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) < 3:
        ticks = [tick for tick in MaxNLocator(nbins=6).tick_values(low, high) if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _nudges(count: int, lengths: Sequence[int]) -> list[float]:
    """A factor per scheme, close to 1: together they fill under half of the closest two lengths' distance."""
    gaps = np.diff(np.log2(lengths))
    step = min(0.07, 0.4 * float(gaps.min()) / count) if gaps.size else 0.0
    return [2 ** ((index - (count - 1) / 2) * step) for index in range(count)]


def _rough(value: float) -> str:
    """A large number in at most two significant digits."""
    return f"{float(f'{value:.1e}'):,.0f}".replace(",", " ") if value < 1e6 else f"{value:.0e}"


def _below_maximum(row: Row) -> np.ndarray:
    """A head's log-prior less its maximum, not below the cut; nan where there is none."""
    curve = np.array([number(value) for value in row["log_prior"]])
    if np.isnan(curve).all():
        return curve
    return np.maximum(curve - np.nanmax(curve), -DEPTH_OF_CUT)


def _nats_or_less(value: float, _: int) -> str:
    return f"{'≤ ' if value == -DEPTH_OF_CUT else ''}{value:g}".replace("-", "−")


def _shape(panel: Iterable[Row]) -> str:
    """What makes two panels look the same."""
    return json.dumps(sorted([row["head"], row["distance"], row["log_prior"]] for row in panel))


def _prior_axes(axes: Axes, farthest: int) -> None:
    """Distance from 0, linear up to 1 and then logarithmic; nats below the maximum, likewise, to the cut."""
    tidy(axes)
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.6)
    axes.set_xlim(0, max(farthest, 1) * 1.1)
    powers = [4**k for k in range(_LARGEST_LOG_TICK) if 4**k <= farthest]
    axes.xaxis.set_major_locator(FixedLocator([0, *thin(powers, 6)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("distance, tokens", fontsize=9)
    axes.set_yscale("symlog", linthresh=1, linscale=0.6)
    axes.set_ylim(-DEPTH_OF_CUT * 1.15, 0.12)
    axes.yaxis.set_major_locator(FixedLocator([0, -0.5, -1, -3, -10, -DEPTH_OF_CUT]))
    axes.yaxis.set_major_formatter(FuncFormatter(_nats_or_less))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8.5, labelbottom=True, labelleft=True)


def _head_look(index: int, count: int) -> dict[str, Any]:
    """Heads are coloured along a scale of their own, as the schemes' colours mean schemes."""
    return {
        "color": colormaps["viridis"](0.85 * index / max(count - 1, 1)),  # its last part is lost on white
        "linestyle": ("-", "--", "-.")[index % 3],
        "linewidth": 1.6,
    }
