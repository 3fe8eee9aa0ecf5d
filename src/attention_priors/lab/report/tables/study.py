"""Tables of a whole study: how its models were made, what they cost, and what each axis and extension comes to.

They are ``accuracy``, ``axes``, ``extension``, ``runs``, ``timing`` and ``training``.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pandas as pd

from attention_priors._io import number
from attention_priors.lab.intervals import over_seeds
from attention_priors.lab.report.comparisons import comparisons
from attention_priors.lab.report.estimates import by_scheme, over, own_passkeys
from attention_priors.lab.report.table import ABSENT, Cell, Table
from attention_priors.lab.report.tables.losses import Losses
from attention_priors.lab.report.tables.scores import share_lines
from attention_priors.lab.report.wording import duration, multiple, quantity, wording
from attention_priors.lab.results import Frame, Results


def training(results: Results) -> Table:
    """How the models of each scheme were made."""
    of_images, lines = results.of_images, []
    for entry in results.schemes:
        name, runs = entry["scheme"], results["run"][results["run"].scheme == entry["scheme"]]
        if not len(runs):
            continue
        minutes, loss = runs.train_seconds.mean(skipna=False) / 60, over_seeds([*runs.final_loss])
        seeds, steps = (", ".join(map(str, sorted(runs[key].unique()))) for key in ("seed", "steps"))
        length = [] if of_images else [str(results.context_length(name))]
        size = [str(entry["parameters"]), str(entry["prior_parameters"])]
        spent = f"{minutes:.1f}" if math.isfinite(minutes) else ABSENT
        final = f"{loss.mean:.3f}" if of_images else Cell.of(loss, "{:.3f}".format)
        lines.append([name, entry["description"], seeds, *length, steps, *size, final, spent])
    header = ["scheme", "made by", "seeds", "tokens", "steps", "parameters", "of prior\nand scale", "loss", "minutes"]
    if of_images:
        header = ["scheme", "positions", "seeds", "steps", "parameters", "of priors", "loss", "minutes a run"]
    words = wording("training_of_images" if of_images else "training", study=results.study) if lines else ""
    return Table("training", words, header, lines, words=3)


def runs(results: Results) -> Table:
    """What became of each run."""
    lines = []
    for row in results["run"].itertuples():
        times = duration(row.train_seconds), duration(row.evaluate_seconds)
        why = row.stopped if isinstance(row.stopped, str) else ABSENT
        lines.append([row.scheme, str(row.seed), str(row.steps), quantity(row.final_loss), *times, why])
    header = ["run", "seed", "steps", "final loss", "training", "evaluation", "stopped"]
    return Table("runs", wording("runs"), header, lines)


def timing(results: Results) -> Table:
    """Time and memory of a pass, by plan and length."""
    groups = results["timing"].groupby(["plan", "length", "pass"], sort=False)
    lines = [
        [f"{plan}: {kind}, {length} tokens".removeprefix(": "), name, *_durations(own)]
        for (plan, length, kind), rows in groups
        for name, own in by_scheme(rows)
    ]
    header = ["plan and pass", "scheme", "median, ms", "mean, ms", "memory, MiB"]
    return Table("timing", wording("timing"), header, lines, words=2)


def _durations(rows: Frame) -> list[Cell]:
    """Return the cells of the same pass of several seeds."""
    # Each seed has as many passes: their variance is that within the seeds, and that between them.
    variance = (rows.std_ms**2).mean() + rows.mean_ms.var(ddof=0)
    spread = "" if math.isnan(variance) else f"± {quantity(math.sqrt(variance))}"
    size = rows.peak_bytes.max()
    memory = Cell(ABSENT if math.isnan(size) else f"{size / 2**20:.0f}")
    return [Cell(quantity(rows.median_ms.mean())), Cell(quantity(rows.mean_ms.mean()), spread), memory]


def axes(results: Results) -> Table:
    """What schemes reach that differ along one axis alone."""
    rows, losses = own_passkeys(results), _own_losses(results)
    lengths, farthest, has_losses = sorted(rows.length.unique()), losses.beyond[-1:], len(losses.rows) > 0
    lines, shares = [], share_lines(rows, lengths)
    for comparison in comparisons(results):
        for name, value in comparison.values.items():
            tail = [losses.within_training(name), *(losses.at(name, p) for p in farthest)] if has_losses else []
            for place, line in enumerate(shares.get(name, [["", *[ABSENT] * len(lengths)]])):
                lines.append([comparison.title, value, *line, *([""] * len(tail) if place else tail)])
    header, measure = ["axis", "value", "over", *map(str, lengths)], losses.measure
    if has_losses:
        header += [f"{measure.name}\nwithin training", *(f"{measure.name}\nat {p:.0f}" for p in farthest)]
    words = wording("axes", lengths=lengths, has_losses=has_losses, measure=measure)
    return Table("axes", words, header, lines, words=3)


def extension(results: Results) -> Table:
    """Each extended context before and after."""
    rows, losses = own_passkeys(results), _own_losses(results)
    lengths, farthest = sorted(rows.length.unique()), losses.beyond[-1:]
    entries = {entry["scheme"]: entry for entry in results.schemes}
    # The ways in which one model was extended to one length stand together.
    together: dict[tuple[str, int], dict[str, Frame]] = defaultdict(dict)
    for name, made in by_scheme(results["extension"]):
        together[entries[name]["extended_from"], made["to"].iloc[0]][name] = made
    lines, shares = [], share_lines(rows, lengths)
    for (first, reached), ways in together.items():
        # Of every seed with which the model was extended in some way.
        before = pd.concat([*ways.values()]).drop_duplicates("seed", keep="last")
        trained = before["from"].iloc[0]
        places = [first, f"{trained} → {reached}", *[""] * len(ways)]
        for place, name, made in zip(places, (first, *ways), (before, *ways.values()), strict=False):
            when, way, steps = "before", "before", ABSENT
            if name != first:
                when, way, steps = "after", entries[name]["axes"]["extension"], str(made.steps.iloc[0])
            found = [over_seeds([number(one[when][str(n)]) for one in made.loss]) for n in (trained, reached)]
            cells = shares[name][0][1:] if name in shares else [ABSENT] * len(lengths)
            beyond = [losses.at(name, position) for position in farthest]
            lines.append([place, way, steps, *(Cell.of(one, "{:.3f}".format) for one in found), *cells, *beyond])
    header = ["scheme", "extension", "steps", "loss at\nfirst length", "loss at\nsecond length", *map(str, lengths)]
    header += [f"{losses.measure.name}\nat {position:.0f}" for position in farthest]
    words = wording("extension", lengths=lengths, has_losses=bool(farthest), measure=losses.measure)
    return Table("extension", words, header, lines, words=2)


def _own_losses(results: Results) -> Losses:
    return Losses(results, results["perplexity"][results["perplexity"].plan.isna()])


def accuracy(results: Results) -> Table:
    """Share of images classified right, by size."""
    rows = results["accuracy"]
    rows, sizes = rows.assign(share=100 * rows.correct / rows.trials), sorted(rows["size"].unique())
    lines = []
    for name, own in by_scheme(rows):
        found = (np.clip(one, 0, 100) for one in over(own, "size", "share").values())
        lines.append([name, *(Cell.of(one, "{:.1f}".format) for one in found)])
    trained = results.study["recipe"]["model"]["image_size"] if lines else 1
    header = ["scheme", *(f"{size}\n{multiple(size / trained)}×" for size in sizes)]
    return Table("accuracy", wording("accuracy", trained=trained), header, lines)
