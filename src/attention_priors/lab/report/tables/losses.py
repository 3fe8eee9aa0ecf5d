"""Tables of losses: perplexity or bits per base, the copy-mixture task, and how genomes go on."""

from __future__ import annotations

from functools import partial

from attention_priors._io import number
from attention_priors.lab.intervals import over_seeds
from attention_priors.lab.report.numbers import decimals
from attention_priors.lab.report.selections.copying import KINDS, excess_losses
from attention_priors.lab.report.selections.losses import loss_measure
from attention_priors.lab.report.selections.plans import loss_views
from attention_priors.lab.report.selections.results import Results, distinct, rows, schemes_with
from attention_priors.lab.report.tables.cells import (
    ABSENT,
    Losses,
    cells_at_lengths,
    estimate_cell,
    with_first,
)
from attention_priors.lab.report.tables.grid import Grid, Line


def perplexity_grid(results: Results) -> Grid:
    """Losses within the training length and beyond."""
    losses = Losses(results)
    lines = [
        [name, str(losses.seeds(name)), losses.within_training(name), *(losses.at(name, p) for p in losses.beyond)]
        for name in losses.schemes
    ]
    caption = (
        f"{losses.measure.title}: {losses.measure.definition} Within training: over the ranges of positions that end "
        "within the training length. The other columns are ranges of positions beyond it (of many, some), named by "
        "their middle, in tokens."
    )
    if losses.straddles:
        caption += " A range that begins within the training length and ends beyond it is in neither."
    header = ["scheme", "seeds", "within\ntraining", *(f"{position:.0f}" for position in losses.beyond)]
    return Grid("perplexity", caption, header, [lines] if lines else [], words=1)


def loss_grid(results: Results) -> Grid:
    """Losses on the texts of each plan."""
    measure = loss_measure(results)
    groups = []
    for view in loss_views(results):
        losses = Losses(view.results)
        lines: list[Line] = [
            [name, str(losses.seeds(name)), losses.within_training(name), losses.everywhere(name)]
            for name in losses.schemes
        ]
        groups.append([["" if place else view.title, *line] for place, line in enumerate(lines)])
    caption = (
        f"{measure.title} of each plan: {measure.definition} Within training: over the ranges of positions that end "
        "within the training length."
    )
    header = ["plan, task and texts", "scheme", "seeds", "within\ntraining", "all\npositions"]
    return Grid("losses", caption, header, groups, words=2)


def copying_grid(results: Results) -> Grid:
    """The copy-mixture task's losses, by length of the row."""
    lengths = distinct(rows(results, "copying"), "length")
    groups: list[list[Line]] = []
    if lengths:
        expected = {(row["kind"], row["length"]): number(row["expected_nll"]) for row in rows(results, "copying")}
        groups.append(
            [
                ["the optimum" if first else "", words, *(f"{expected[kind, length]:.3f}" for length in lengths)]
                for first, (kind, words) in with_first(
                    [item for item in KINDS.items() if all((item[0], length) in expected for length in lengths)]
                )
            ]
        )
    for name in schemes_with(results, "copying"):
        found = [(words, excess_losses(results, name, kind)) for kind, words in KINDS.items()]
        groups.append(
            [
                [
                    name if first else "",
                    words,
                    *cells_at_lengths(losses, lengths, partial(decimals, digits=3)),
                ]
                for first, (words, losses) in with_first(found)
            ]
        )
    caption = (
        "The copy-mixture task by length of the row in tokens. The optimum: the expected loss of the true "
        "distribution, nats per token. Schemes: loss above that of the true distribution on the same tokens, nats per "
        "token; mean over seeds with Student's 95 % interval (where there are two seeds at least). Of all tokens it "
        "cannot be below 0 but by chance; of one kind it can, at the cost of the others."
    )
    return Grid("copying", caption, ["scheme", "loss of", *map(str, lengths)], groups, words=2)


def completion_grid(results: Results) -> Grid:
    """How the genomes of each plan go on."""
    groups = []
    places = dict.fromkeys((row["plan"], row["length"]) for row in rows(results, "completions"))
    for plan, length in places:
        group: list[Line] = []
        for name in schemes_with(results, "completions"):
            found = [
                row for row in rows(results, "completions", name) if (row["plan"], row["length"]) == (plan, length)
            ]
            if found:
                title = "" if group else f"{plan}: {found[0]['pieces']} pieces of {length} tokens"
                correlations = [row["gc_correlation"] for row in found if row["gc_correlation"] is not None]
                group.append(
                    [
                        title,
                        name,
                        estimate_cell(over_seeds([100 * row["identity"] for row in found]), "{:.1f}".format),
                        f"{100 * found[0]['chance']:.1f}",
                        estimate_cell(over_seeds(correlations), partial(decimals, digits=2))
                        if correlations
                        else ABSENT,
                    ]
                )
        groups.append(group)
    caption = (
        "How genomes go on, in 200 bases drawn from each model. Identity: bases that are the true ones. By chance: "
        "those of bases drawn one by one with the truth's own frequencies. GC: Pearson's r between the share of G and "
        "C in windows of 25 bases and the true one, the mean over continuations. Mean over seeds with Student's 95 % "
        "interval (where there are two seeds at least)."
    )
    header = ["plan and texts", "scheme", "identity, %", "by chance, %", "r of GC"]
    return Grid("completions", caption, header, groups, words=2)
