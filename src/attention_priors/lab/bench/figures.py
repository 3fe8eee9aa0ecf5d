"""Log-log figures of time and memory against length, with fitted power laws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator

from attention_priors._io import write_bytes
from attention_priors.lab.bench.tables import seconds_text
from attention_priors.lab.bench.way import PASSES
from attention_priors.lab.report.figures.scales import set_ticks, thin
from attention_priors.lab.report.figures.style import Look, blank, label, look, png, tidy

Results = Mapping[str, Any]
MIB = 2**20
QUANTITIES = {"time": "time per pass", "memory": "peak memory above the inputs"}
_WIDTH = 10.6
_LIMIT = Look("#000000", "o", "-")


def write_figures(results: Results, folder: Path) -> list[Path]:
    """Draw time and memory of each measured pass.

    Args:
        results: Return value of :func:`bench`.
        folder: Folder for the PNG files.

    Returns:
        Paths of the files.
    """
    written = []
    for passing in PASSES:
        for of in QUANTITIES:
            if _points(results, passing, of):
                path = folder / f"{of}_{passing.replace('+', '_')}.png"
                write_bytes(path, png(against_length(results, passing, of)))
                written.append(path)
    return written


def against_length(results: Results, passing: str, of: str) -> Figure:
    """Draw one quantity of one pass: this library on the left, other ways on the right, the limit in both.

    Args:
        results: Return value of :func:`bench`.
        passing: Name of the pass.
        of: ``time`` or ``memory``.
    """
    points = _points(results, passing, of)
    kinds = {way["name"]: way["kind"] for way in results["ways"]}
    lengths = sorted({length for values in points.values() for length in values})
    figure = blank(4.9, _WIDTH)
    left, right = figure.subplots(1, 2, sharey=True)
    right.set_visible(any(kinds[name] == "others" for name in points))
    for axes, side in ((left, "ours"), (right, "others")) if right.get_visible() else ((left, "ours"),):
        _panel(results, axes, side, passing, of, points)
        axes.set_xlabel("length, tokens")
        axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
        set_ticks(axes.xaxis, thin(lengths, 7))
    left.set_ylabel(QUANTITIES[of])
    left.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
    left.yaxis.set_major_formatter(FuncFormatter(_time_tick if of == "time" else lambda value, _: f"{value:g} MiB"))
    return figure


def _points(results: Results, passing: str, of: str) -> dict[str, dict[int, float]]:
    """Return the positive values of each way by length: a logarithmic axis has no 0."""
    points: dict[str, dict[int, float]] = {}
    for row in results["rows"]:
        if row["pass"] == passing and row["status"] == "measured":
            value = row["median_seconds"][0] if of == "time" else (row["peak_bytes"] or 0) / MIB
            if value > 0:
                points.setdefault(row["way"], {})[row["length"]] = value
    return points


def _panel(
    results: Results, axes: Axes, side: str, passing: str, of: str, points: Mapping[str, Mapping[int, float]]
) -> None:
    tidy(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(f"{'attend()' if side == 'ours' else 'other ways'}: {passing}", fontsize=11)
    fits = {fit["way"]: fit["exponent"] for fit in results["growth"] if (fit["pass"], fit["of"]) == (passing, of)}
    rows = [row for row in results["rows"] if row["pass"] == passing]
    tried = {row["way"]: row["length"] for row in rows}
    erred = {row["way"] for row in rows if row["status"] == "cannot run"}
    keys: list[Line2D] = []
    stopped = False
    place = 0
    for way in results["ways"]:
        name = way["name"]
        # The wider limit is for GOAT's lanes, so it belongs to this library's panel.
        here = way["kind"] == side or name == "plain" or (way["kind"] == "limit" and side == "ours")
        if name not in tried or not here:
            continue
        style, width, order = _LIMIT, 2.4, 2
        if name != "plain":
            # Black is reserved for the limit.
            place += look(place).color == _LIMIT.color
            style, width, order = look(place), 1.5, 3
            place += 1
        values = points.get(name, {})
        power = f", L^{fits[name]:.2f}" if name in fits else ""
        # A way without an error did not run for lack of memory.
        note = power if values else ": cannot run" if name in erred else ": not run"
        x, y = sorted(values), [values[length] for length in sorted(values)]
        axes.plot(x, y, **style._asdict(), linewidth=width, markersize=5, zorder=order, gid=f"{side}:{name}")
        keys.append(Line2D([], [], **style._asdict(), linewidth=1.5, markersize=5, label=label(way["label"]) + note))
        if x and tried[name] > x[-1]:
            stopped = True
            axes.plot(x[-1], y[-1], "x", color="black", markersize=9, zorder=5, gid=f"stopped:{name}")
    if stopped:
        text = "not measured beyond (see table)"
        keys.append(Line2D([], [], color="black", marker="x", linestyle="none", label=text))
    options = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "frameon": False, "handlelength": 3}
    axes.legend(handles=keys, fontsize=8.5, **options)


def _time_tick(seconds: float, _: int) -> str:
    return seconds_text(seconds).replace(".00", "").replace(".0 ", " ")
