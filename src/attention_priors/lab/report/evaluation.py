"""Tables and figures of ``attention-priors evaluate``, in the form of those of comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from attention_priors.lab.data.genomes import NUCLEOTIDES
from attention_priors.lab.evaluate import Summary
from attention_priors.lab.evaluate.summary import Continuation
from attention_priors.lab.intervals import Estimate
from attention_priors.lab.report.estimates import by_task, loss_measure
from attention_priors.lab.report.figures import curves, layout, write_pngs
from attention_priors.lab.report.figures.heatmaps import depth_heatmap
from attention_priors.lab.report.figures.style import COLOURS, blank, look, png, tidy
from attention_priors.lab.report.table import Cell, Table
from attention_priors.lab.report.tables import answer_tokens, columns_of, percents, share_lines, timing
from attention_priors.lab.report.wording import counted, decimals, quantity, wording
from attention_priors.lab.results import FORMAT, Frame, Results
from attention_priors.lab.tasks.completion import GC_WINDOW, gc_correlation, gc_trajectory

_FILES = "accuracy_by_length|heatmap_.+|perplexity_by_position|genome_completion"
"""Regular expression of the figures' file names, without the extension."""
_HEADS = 8
"""Number of heads in a table, those with the largest weights at any length."""


def evaluation_results(summary: Summary, model: str) -> Results:
    """Return an evaluation as the results of a study with the model as its only scheme.

    Args:
        summary: Summary from :func:`~attention_priors.lab.evaluate.evaluate`.
        model: Name of the model.
    """
    recipe = {"name": model, "tokenizer": NUCLEOTIDES if summary.of_bases else None}
    own = {"scheme": model, "seed": 0, "plan": ""}
    rows = [own | row for row in summary.rows]
    study = {"row": "study", "format": FORMAT, "recipe": recipe}
    return Results.of([study, {"row": "scheme", "scheme": model}, *rows])


def evaluation_tables(results: Results) -> list[Table]:
    """Return a table for each kind of result of an evaluation."""
    tokens, times = answer_tokens(results).without("scheme"), timing(results).without("scheme")
    tokens = replace(tokens, caption=wording("evaluated_tokens"), header=["task", *tokens.header[1:]])
    times = replace(times, caption=wording("evaluated_times"))
    of_texts = _scores(results), tokens, _stops(results), *_losses(results)
    made = [*of_texts, _completions(results), _weights(results), times]
    return [table for table in made if table.lines]


def _scores(results: Results) -> Table:
    rows = results["retrieval"]
    lines = []
    for task, own in by_task(rows):
        counts = own.groupby("length").trials.sum()
        texts = "–".join(map(str, dict.fromkeys((counts.min(), counts.max()))))
        (((_, cells),),) = share_lines(own).values()
        lines.append(([task, texts], cells))
    about = wording("evaluated_scores")
    return Table.across("retrieval", about, ["task", "texts"], columns_of(rows.length), lines, words=1)


def _stops(results: Results) -> Table:
    told = results["retrieval"].dropna(subset="stopped").drop_duplicates("task")
    lines = [[str(row.task), row.stopped] for row in told.itertuples()]
    return Table("stopped", wording("evaluated_stops"), ["task", "why"], lines, words=2)


def _losses(results: Results) -> Iterator[Table]:
    rows, of_bases = results["perplexity"], not loss_measure(results).logarithmic
    unit, lines = "base" if of_bases else "token", []
    for row in rows[rows.position.isna()].itertuples():
        nats = Cell("not finite") if math.isnan(row.nll) else Cell.of((row.nll, row.low, row.high), "{:.3f}".format)
        perplexity = [] if of_bases else [quantity(math.exp(min(row.nll, 700.0)))]
        what = [str(row.task), f"{row.length:.0f}", f"{row.documents:.0f}"]
        lines.append([*what, nats, *perplexity, f"{row.nll / math.log(2):.3f}"])
    header = ["task", "tokens", "documents", "nats", *([] if of_bases else ["perplexity"]), f"bits per {unit}"]
    yield Table("losses", wording("evaluated_losses", unit=unit), header, lines)
    places = rows[(rows.task == "perplexity") & rows.position.notna()]
    found = places.pivot_table("nll", "position", "length", dropna=False)
    lines = [[f"{position:.0f}", *map(quantity, own)] for position, *own in found.itertuples()]
    header = ["position", *(f"texts of {length:.0f}" for length in found)]
    yield Table("losses_by_position", wording("evaluated_positions", unit=unit), header, lines, words=0)


def _completions(results: Results) -> Table:
    lines = []
    for row in results["completion"].itertuples():
        found = 100 * np.array([row.identity, row.identity_low, row.identity_high])
        identity = Cell.of(found, partial(decimals, digits=1))
        gc = Cell.of((row.gc_correlation, row.gc_low, row.gc_high), partial(decimals, digits=2))
        what = [str(row.length), str(row.pieces), str(row.continuations)]
        lines.append([*what, identity, f"{100 * row.chance:.1f}", gc])
    header = ["tokens", "pieces", "continuations of each", "identity, %", "by chance, %", "r of GC"]
    return Table("completions", wording("evaluated_completions"), header, lines, words=0)


def _weights(results: Results) -> Table:
    """Return the table of the heads with most weight on the pass key at any length."""
    rows = results["needle_weight"]
    most = rows.groupby(["layer", "head"]).weight.max().sort_values(ascending=False, kind="stable").index[:_HEADS]
    lines = []
    for layer, head in most:
        own = rows[(rows.layer == layer) & (rows["head"] == head)].itertuples()
        found = {row.length: Estimate(row.weight, row.low, row.high) for row in own}
        lines.append(([f"{layer}.{head}"], percents(found)))
    about = wording("evaluated_weights", heads=_HEADS)
    return Table.across("needle_weights", about, ["head"], columns_of(rows.length), lines)


def write_evaluation_figures(summary: Summary, results: Results, folder: Path) -> list[Path]:
    """Write every figure with data as a PNG file, and remove outdated figures of earlier calls.

    Args:
        summary: Summary from :func:`~attention_priors.lab.evaluate.evaluate`.
        results: Results from :func:`evaluation_results`.
        folder: Target folder; created if missing.

    Returns:
        Paths of the files.
    """
    drawn = {name: figure for name, figure in _figures(summary, results) if figure is not None}
    return write_pngs(((name, png(figure)) for name, figure in drawn.items()), folder, _FILES)


def _figures(summary: Summary, results: Results) -> Iterator[tuple[str, Figure | None]]:
    scores, texts = results["retrieval"], results["perplexity"]
    stops = {(task, 0) for task in scores.task[scores.stopped.notna()]}
    draw = partial(curves.draw_scores, stops=stops, measure="mean score")
    yield "accuracy_by_length", _by_line(scores, scores.task, draw)
    for task, own in by_task(scores):
        yield f"heatmap_{task}", depth_heatmap(own, results.names[0], f"{task}: mean score, %")
    texts = texts[texts.task == "perplexity"]
    whole, rows = texts[texts.position.isna()], texts[texts.position.notna() & texts.nll.notna()]
    counts = {row.length: counted(int(row.documents), "text") for row in whole.itertuples()}
    lines = rows.length.map(lambda length: f"{counts[length]} of {length:.0f} tokens")
    draw = partial(curves.draw_losses, measure=loss_measure(results))
    yield "perplexity_by_position", _by_line(rows, lines, draw)
    if summary.pieces:
        yield "genome_completion", genome_completion(summary.pieces[max(summary.pieces)][0])


def _by_line(rows: Frame, lines: Any, draw: Callable[[Frame], layout.Draw]) -> Figure | None:
    """Draw one line per name, with the names in place of schemes."""
    names = [*lines.unique()]
    rows = rows.assign(scheme=pd.Categorical(lines, categories=names, ordered=True))
    return layout.figure_of_lines({name: look(index) for index, name in enumerate(names)}, draw(rows))


def genome_completion(piece: Continuation) -> Figure:
    """Draw continuations of a genome: GC trajectories, and which bases match the truth (GOAT, Figure 4c)."""
    figure = blank(3.2 + 0.2 * len(piece.found))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 0.2 * len(piece.found)))
    tidy(upper)
    middles = np.arange(len(piece.expected) - GC_WINDOW + 1) + (GC_WINDOW - 1) / 2
    upper.plot(middles, 100 * gc_trajectory(piece.expected), color="black", linewidth=2, label="truth", zorder=3)
    for index, found in enumerate(piece.found):
        r = gc_correlation(found, piece.expected)
        words = f"continuation {index + 1}" + ("" if r is None else f" (r = {decimals(r, 2)})")
        style = {"color": look(index).color, "linestyle": look(index).linestyle, "label": words}
        upper.plot(middles, 100 * gc_trajectory(found), **style)
    upper.set_ylabel(f"GC, % of {GC_WINDOW} bases")
    same = np.array([[a == b for a, b in zip(found, piece.expected, strict=True)] for found in piece.found])
    colours = ListedColormap([COLOURS[1], COLOURS[2]])
    lower.imshow(same, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest", gid="identity")
    lower.set_yticks(range(len(piece.found)), [f"{100 * row.mean():.0f} %" for row in same], fontsize=8)
    lower.tick_params(length=0)
    lower.spines[:].set_visible(False)
    lower.set_ylabel("identity", fontsize=9)
    lower.set_xlabel("base after the prompt")
    keys: list[Artist] = [*upper.get_lines(), Patch(facecolor=COLOURS[2], label="the true base")]
    layout.legend_below(figure, [*keys, Patch(facecolor=COLOURS[1], label="another base")], columns=3)
    return figure
