"""The results of a comparison of classifiers of images: figures, a table and a page."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rich.table import Table

from attention_priors.files import write_bytes
from attention_priors.intervals import over_seeds
from attention_priors.report.grids import Cell, Grid, Line, latex, markdown
from attention_priors.report.numbers import multiple
from attention_priors.report.rendering import embedded_figure, render
from attention_priors.report.results import Results, Row
from attention_priors.report.style import blank, label, look, png, tidy

LOWEST = -8.0
"""Nats; what is below weighs less than a thousandth."""


def are_of_images(results: Results) -> bool:
    """Whether results are of classifiers of images."""
    return "images" in results


def write_image_results(results: Results, folder: Path) -> Path:
    """Write ``report.html``, and every figure and table under ``figures`` and ``tables``.

    Args:
        results: of classifiers of images.
        folder: the comparison's.

    Returns:
        The page.
    """
    figures = {"accuracy_by_size": (accuracy_by_size(results), "Share of images classified right against their size.")}
    for place, entry in enumerate(results["schemes"], start=1):
        if _maps(results, entry["name"]):
            words = f"What the prior of each head says around the middle patch: {entry['name']}."
            figures[f"prior_maps_{place:02d}"] = (prior_maps(results, entry["name"]), words)
    for stem, (figure, _) in figures.items():
        write_bytes(folder / "figures" / f"{stem}.png", png(figure))
    grids = [accuracy_grid(results), training_grid(results)]
    for grid in grids:
        for ending, content in (("md", markdown(grid)), ("tex", latex(grid))):
            write_bytes(folder / "tables" / f"{grid.stem}.{ending}", content.encode())
    page = folder / "report.html"
    recipe = yaml.safe_dump(results["recipe"], sort_keys=False, allow_unicode=True, width=88)
    shown = [embedded_figure(figure, words) for figure, words in figures.values()]
    write_bytes(page, render("images.html", results=results, recipe=recipe, figures=shown, grids=grids).encode())
    return page


def image_table(results: Results) -> Table:
    """The accuracies, for a terminal."""
    grid = accuracy_grid(results)
    table = Table(title="Images classified right, %", caption=f"mean over seeds; size in pixels; {_trained(results)}")
    for index, name in enumerate(grid.header):
        table.add_column(name, justify="left" if index < grid.words else "right")
    for line in (line for group in grid.groups for line in group):
        table.add_row(*(cell if isinstance(cell, str) else f"{cell.text} {cell.interval}".strip() for cell in line))
    return table


def accuracy_by_size(results: Results) -> Figure:
    """Share of test images that are classified right against their size (GOAT, Figure 5a)."""
    sizes = _sizes(results)
    figure = blank(4.3)
    axes = figure.add_subplot()
    tidy(axes)
    for index, entry in enumerate(results["schemes"]):
        found = [over_seeds([100 * share for share in _shares(results, entry["name"], size)]) for size in sizes]
        means = np.array([one.mean for one in found])
        low, high = (np.array([getattr(one, end) for one in found]).clip(0, 100) for end in ("low", "high"))
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
    maps = _maps(results, scheme)
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


def accuracy_grid(results: Results) -> Grid:
    """Schemes against sizes."""
    sizes, trained = _sizes(results), results["recipe"]["model"]["image_size"]
    lines: list[Line] = []
    for entry in results["schemes"]:
        cells = []
        for size in sizes:
            mean, low, high = over_seeds([100 * share for share in _shares(results, entry["name"], size)])
            interval = "" if math.isnan(low) else f"[{max(low, 0.0):.1f}, {min(high, 100.0):.1f}]"
            cells.append(Cell(f"{mean:.1f}", interval))
        lines.append([entry["name"], *cells])
    caption = (
        f"Test images classified right, %, by the side of the images in pixels; {_trained(results)}. Mean over "
        "seeds with Student's 95 % interval (where there are two seeds at least), cut to 0–100 %."
    )
    header = ["scheme", *(f"{size}\n{multiple(size / trained)}×" for size in sizes)]
    return Grid("accuracy", caption, header, [lines], words=1)


def training_grid(results: Results) -> Grid:
    """How the models were made."""
    lines: list[Line] = []
    for entry in results["schemes"]:
        runs = [row for row in results["runs"] if row["scheme"] == entry["name"]]
        minutes = statistics.fmean(row["train_seconds"] for row in runs) / 60
        lines.append(
            [
                entry["name"],
                entry["description"],
                ", ".join(str(row["seed"]) for row in runs),
                str(runs[0]["steps"]),
                str(entry["parameters"]),
                str(entry["prior_parameters"]),
                f"{statistics.fmean(row['final_loss'] for row in runs):.3f}",
                f"{minutes:.1f}",
            ]
        )
    known = {**results["versions"], **results["machine"]}
    caption = (
        "How the models were made; the loss is the mean over the last steps, in nats, of changed images. On: "
        + "; ".join(f"{key} {value}" for key, value in known.items())
        + f". Wall time of the comparison: {results['wall_seconds'] / 3600:.2f} hours."
    )
    header = ["scheme", "positions", "seeds", "steps", "parameters", "of priors", "loss", "minutes a run"]
    return Grid("training", caption, header, [lines], words=3)


def _trained(results: Results) -> str:
    return f"trained at {results['recipe']['model']['image_size']}"


def _sizes(results: Results) -> list[int]:
    return sorted({row["size"] for row in results["accuracy"]})


def _shares(results: Results, scheme: str, size: int) -> list[float]:
    """Of each seed."""
    return [
        row["correct"] / row["trials"] for row in results["accuracy"] if (row["scheme"], row["size"]) == (scheme, size)
    ]


def _maps(results: Results, scheme: str) -> list[Row]:
    mine = [row for row in results["prior_maps"] if row["scheme"] == scheme]
    return [row for row in mine if row["seed"] == mine[0]["seed"]]
