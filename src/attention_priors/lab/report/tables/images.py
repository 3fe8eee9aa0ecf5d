"""Tables of classifiers of images."""

from __future__ import annotations

import math
import statistics

from rich.table import Table
from rich.text import Text

from attention_priors.lab.intervals import over_seeds
from attention_priors.lab.report.numbers import multiple
from attention_priors.lab.report.selections.images import image_sizes, shares_right, training_words
from attention_priors.lab.report.selections.results import Results
from attention_priors.lab.report.tables.grid import Cell, Grid, Line


def image_table(results: Results) -> Table:
    """The accuracies, for a terminal."""
    grid = accuracy_grid(results)
    table = Table(
        title="Images classified right, %", caption=f"mean over seeds; size in pixels; {training_words(results)}"
    )
    for index, name in enumerate(grid.header):
        table.add_column(name, justify="left" if index < grid.words else "right")
    for line in (line for group in grid.groups for line in group):
        words = (cell if isinstance(cell, str) else f"{cell.text} {cell.interval}".strip() for cell in line)
        table.add_row(*map(Text, words))
    return table


def accuracy_grid(results: Results) -> Grid:
    """Schemes against sizes."""
    sizes, trained = image_sizes(results), results["recipe"]["model"]["image_size"]
    lines: list[Line] = []
    for entry in results["schemes"]:
        cells = []
        for size in sizes:
            mean, low, high = over_seeds([100 * share for share in shares_right(results, entry["name"], size)])
            interval = "" if math.isnan(low) else f"[{max(low, 0.0):.1f}, {min(high, 100.0):.1f}]"
            cells.append(Cell(f"{mean:.1f}", interval))
        lines.append([entry["name"], *cells])
    caption = (
        f"Test images classified right, %, by the side of the images in pixels; {training_words(results)}. Mean over "
        "seeds with Student's 95 % interval (where there are two seeds at least), cut to 0–100 %."
    )
    header = ["scheme", *(f"{size}\n{multiple(size / trained)}×" for size in sizes)]
    return Grid("accuracy", caption, header, [lines], words=1)


def image_training_grid(results: Results) -> Grid:
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
