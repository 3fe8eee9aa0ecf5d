"""Tables of how models were made and of how long they take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from attention_priors._io import number
from attention_priors.lab.intervals import over_seeds
from attention_priors.lab.report.numbers import quantity
from attention_priors.lab.report.selections.results import (
    Results,
    Row,
    distinct,
    rows,
    schemes_with,
    training_length,
)
from attention_priors.lab.report.tables.cells import ABSENT, estimate_cell
from attention_priors.lab.report.tables.grid import Cell, Grid, Line


def training_grid(results: Results) -> Grid:
    """How the models of each scheme were made."""
    lines = []
    for entry in results["schemes"]:
        runs = rows(results, "runs", entry["name"])
        if not runs:
            continue
        minutes = statistics.fmean(number(row["train_seconds"]) for row in runs) / 60
        loss = over_seeds([number(row["final_loss"]) for row in runs])
        seeds, steps = (", ".join(map(str, distinct(runs, key))) for key in ("seed", "steps"))
        lines.append(
            [
                entry["name"],
                entry["description"],
                seeds,
                str(training_length(results, entry["name"])),
                steps,
                str(entry["parameters"]),
                str(entry["prior_parameters"]),
                estimate_cell(loss, "{:.3f}".format) if math.isfinite(loss.mean) else ABSENT,
                f"{minutes:.1f}" if math.isfinite(minutes) else ABSENT,
            ]
        )
    header = ["scheme", "made by", "seeds", "tokens", "steps", "parameters", "of prior\nand scale", "loss", "minutes"]
    return Grid("training", _provenance(results) if lines else "", header, [lines] if lines else [], words=3)


def _provenance(results: Results) -> str:
    made, machine = (
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in results[what].items())
        for what in ("versions", "machine")
    )
    return (
        f"How the models of {results['recipe']['name']!r} were made. Loss: of training, the last that was recorded, "
        "mean over seeds with Student's 95 % interval (where there are two seeds at least); what it weighs is the "
        "recipe's. Minutes: wall time of a training, mean over seeds; others may have run beside it. Whole comparison: "
        f"{results['wall_seconds'] / 3600:.1f} hours, last collected {results['created'][:10]}. Versions: {made}. "
        f"Machine: {machine}."
    )


def timing_grid(results: Results) -> Grid:
    """Time and memory of a pass, by plan and length."""
    places = list(dict.fromkeys((row["plan"], row["length"], row["pass"]) for row in rows(results, "timing")))
    groups = []
    for plan, length, kind in places:
        group: list[Line] = []
        for name in schemes_with(results, "timing"):
            values = {"plan": plan, "length": length, "pass": kind}
            found = [row for row in rows(results, "timing", name) if values.items() <= row.items()]
            if found:
                group.append(["" if group else f"{plan}: {kind}, {length} tokens", name, *_durations(found)])
        groups.append(group)
    caption = (
        "What one pass of a single text takes. Median: of the passes, the mean over seeds, in milliseconds. Mean: of "
        "the passes of all seeds, with their standard deviation. Memory: what one pass takes at its peak beside "
        "the model, the largest of the seeds, in MiB."
    )
    header = ["plan and pass", "scheme", "median, ms", "mean, ms", "memory, MiB"]
    return Grid("timing", caption, header, groups, words=2)


def _durations(found: Sequence[Row]) -> list[Cell]:
    """Cells of the same pass of several seeds."""
    median, mean = (statistics.fmean(row[key] for row in found) for key in ("median_ms", "mean_ms"))
    deviations = [row["std_ms"] for row in found if row["std_ms"] is not None]
    spread = ""
    if deviations:
        # Each seed has as many passes: their variance is that within the seeds, and that between them.
        within = statistics.fmean(deviation**2 for deviation in deviations)
        spread = f"± {quantity(math.sqrt(within + statistics.pvariance([row['mean_ms'] for row in found])))}"
    sizes = [row["peak_bytes"] for row in found if row["peak_bytes"] is not None]
    memory = f"{max(sizes) / 2**20:.0f}" if sizes else ABSENT
    return [Cell(quantity(median)), Cell(quantity(mean), spread), Cell(memory)]
