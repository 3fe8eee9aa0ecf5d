"""Tables of schemes that differ along one axis, and of contexts before and after their extension."""

from __future__ import annotations

from collections import defaultdict

from attention_priors._io import number
from attention_priors.lab.intervals import over_seeds
from attention_priors.lab.report.selections.axes import comparisons
from attention_priors.lab.report.selections.results import Results, Row, rows
from attention_priors.lab.report.tables.cells import ABSENT, SHARES, Losses, Shares, estimate_cell, with_first
from attention_priors.lab.report.tables.grid import Grid, Line


def axis_grid(results: Results) -> Grid:
    """What schemes reach that differ along one axis alone."""
    shares, losses = Shares(results), Losses(results)
    farthest = losses.beyond[-1:]
    groups = []
    for comparison in comparisons(results):
        group: list[Line] = []
        for place, (name, value) in enumerate(comparison.values.items()):
            tail = [losses.within_training(name), *(losses.at(name, position) for position in farthest)]
            tail = tail if losses.schemes else []
            for first, line in with_first(shares.lines(name) or [["", *[ABSENT] * len(shares.lengths)]]):
                title = comparison.title if first and place == 0 else ""
                group.append([title, value if first else "", *line, *(tail if first else [""] * len(tail))])
        groups.append(group)
    header = ["axis", "value", "over", *map(str, shares.lengths)]
    caption = "Schemes that differ along one axis alone."
    if shares.lengths:
        caption += f" {SHARES}"
    if losses.schemes:
        name = losses.measure.name
        header += [f"{name}\nwithin training", *(f"{name}\nat {position:.0f}" for position in farthest)]
        caption += (
            f" {losses.measure.title}: {losses.measure.definition} Within training: over the ranges of positions that "
            "end within the training length."
        )
    return Grid("axes", caption, header, groups, words=3)


def extension_grid(results: Results) -> Grid:
    """Each extended context before and after."""
    shares, losses = Shares(results), Losses(results)
    farthest = losses.beyond[-1:]
    # The ways in which one model was extended to one length stand together.
    together: dict[tuple[str, int], list[tuple[str, list[Row]]]] = defaultdict(list)
    for entry in results["schemes"]:
        if entry.get("extended_from"):
            made = rows(results, "extensions", entry["name"])
            together[entry["extended_from"], made[0]["to"]].append((entry["name"], made))
    groups = []
    for (first, reached), ways in together.items():
        # Of every seed with which the model was extended in some way.
        before = list({row["seed"]: row for _, made in ways for row in made}.values())
        lines = [(first, "before", ABSENT, before, "before")]
        lines += [(name, made[0]["axes"]["extension"], str(made[0]["steps"]), made, "after") for name, made in ways]
        places = [first, f"{before[0]['from']} → {reached}", *[""] * (len(ways) - 1)]
        group: list[Line] = []
        for place, (name, way, steps, made, when) in zip(places, lines, strict=True):
            losses_there = [
                estimate_cell(over_seeds([number(row["loss"][when][str(row[size])]) for row in made]), "{:.3f}".format)
                for size in ("from", "to")
            ]
            group.append(
                [
                    place,
                    way,
                    steps,
                    *losses_there,
                    *(shares.pooled(name) if shares.lengths else []),
                    *(losses.at(name, position) for position in farthest),
                ]
            )
        groups.append(group)
    header = ["scheme", "extension", "steps", "loss at\nfirst length", "loss at\nsecond length"]
    header += map(str, shares.lengths)
    header += [f"{losses.measure.name}\nat {position:.0f}" for position in farthest]
    caption = (
        "Before and after each extension of the context (second line of each scheme: from and to how many tokens). "
        "Steps: of further training; with 0, positions are changed and nothing is trained. Loss: nats per token on "
        "held-out rows of both lengths, mean over seeds with Student's 95 % interval."
    )
    if shares.lengths:
        caption += (
            " Numbered columns: pass keys retrieved, % of the texts of all seeds, by context length in tokens, with "
            "the 95 % Wilson interval. –: not evaluated. †: without the seeds that had stopped."
        )
    if farthest:
        caption += f" {losses.measure.title}: {losses.measure.definition}"
    return Grid("extension", caption, header, groups, words=2)
