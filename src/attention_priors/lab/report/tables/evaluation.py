"""The results of an evaluation as tables, for a terminal and for a page."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.table import Table

from attention_priors.lab.evaluate import Accuracy, Completion, Duration, HeadWeight, Loss, Summary
from attention_priors.lab.intervals import Interval, cut_to_share
from attention_priors.lab.report.numbers import decimals, percent, quantity

MIB = 2**20
_HEADS = 8
"""Of a table; of those that give most at any length."""


def evaluation_tables(summary: Summary) -> list[Table]:
    """One table for each kind of result there is."""
    tables = []
    for title, header, rows in _contents(summary):
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(header):
            # Numbers go on in the next line of a narrow terminal; cut off, they would be others.
            table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def evaluation_markdown(summary: Summary) -> str:
    """The same in Markdown."""
    parts = []
    for title, header, rows in _contents(summary):
        lines = [f"**{title}**", "", "| " + " | ".join(header) + " |"]
        lines.append("|" + "|".join("---" if index == 0 else "---:" for index in range(len(header))) + "|")
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _contents(summary: Summary) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    if summary.accuracies:
        header = ["task", "tokens", "texts", "right", "95 %", "answer's tokens right"]
        yield "Retrieval, percent", header, [_of_accuracy(one) for one in summary.accuracies]
        stops = dict.fromkeys((one.task, one.stopped) for one in summary.accuracies if one.stopped)
        if stops:
            yield "Stopped", ["task", "why no longer texts"], [[task, str(why)] for task, why in stops]
    if summary.losses:
        # Of bases, as comparisons have them, bits alone.
        measures = ["bits per base"] if summary.of_bases else ["perplexity", "bits per token"]
        header = ["task", "tokens", "documents", "nats per token", "95 %", *measures]
        yield (
            "Loss, with a t interval over documents",
            header,
            [_of_loss(one, of_bases=summary.of_bases) for one in summary.losses],
        )
        curves = [one for one in summary.losses if one.task == "perplexity"]
        if curves:
            header = ["position", *(f"texts of {one.length}" for one in curves)]
            yield "Nats per token by position", header, _by_position(curves)
    if summary.completions:
        header = ["tokens", "pieces", "continuations of each", "identity, %", "95 %", "by chance, %", "r of GC", "95 %"]
        yield "How a genome goes on, with t intervals over pieces", header, [*map(_of_completion, summary.completions)]
    if summary.weights:
        lengths = sorted({one.length for one in summary.weights})
        header = ["layer, head", *(f"{length} tokens" for length in lengths)]
        title = "Attention on the pass key, %, with t intervals over texts, cut to 0 to 100"
        yield title, header, _by_head(summary.weights, lengths)
    if summary.durations:
        header = ["pass", "tokens", "passes", "mean ms", "standard deviation", "median ms", "memory"]
        yield "Time of one pass", header, [_of_duration(one) for one in summary.durations]


def _of_accuracy(one: Accuracy) -> list[str]:
    tokens = "–" if one.token_accuracy is None else percent(one.token_accuracy)
    interval = f"{percent(one.interval.low)}–{percent(one.interval.high)}"
    return [one.task, str(one.length), str(one.trials), percent(one.mean), interval, tokens]


def _of_loss(one: Loss, *, of_bases: bool) -> list[str]:
    of_what = [one.task, str(one.length), str(one.documents)]
    measures = [f"{one.bits:.3f}"] if of_bases else [quantity(one.perplexity), f"{one.bits:.3f}"]
    if math.isnan(one.nll):
        return [*of_what, "not finite", "–", *("–" for _ in measures)]
    interval = "–" if one.interval is None else f"{one.interval.low:.3f}–{one.interval.high:.3f}"
    return [*of_what, f"{one.nll:.3f}", interval, *measures]


def _of_completion(one: Completion) -> list[str]:
    return [
        str(one.length),
        str(len(one.pieces)),
        str(len(one.pieces[0].found)),
        f"{100 * one.identity:.1f}",
        _range(one.identity_interval, 100, 1),
        f"{100 * one.chance:.1f}",
        "–" if one.gc_correlation is None else decimals(one.gc_correlation, 2),
        _range(one.gc_correlation_interval, 1, 2),
    ]


def _by_head(weights: list[HeadWeight], lengths: list[int]) -> list[list[str]]:
    found: dict[tuple[int, int], dict[int, HeadWeight]] = {}
    for one in weights:
        found.setdefault((one.layer, one.head), {})[one.length] = one
    most = sorted(found, key=lambda place: -max(one.weight for one in found[place].values()))[:_HEADS]
    return [
        [f"{layer}, {head}", *(_of_weight(found[layer, head].get(length)) for length in lengths)]
        for layer, head in most
    ]


def _of_weight(one: HeadWeight | None) -> str:
    if one is None:
        return "–"
    if one.interval is None:
        return f"{100 * one.weight:.1f}"
    return f"{100 * one.weight:.1f} ({_range(cut_to_share(one.interval), 100, 1)})"


def _range(interval: Interval | None, factor: float, digits: int) -> str:
    if interval is None:
        return "–"
    return f"{decimals(factor * interval.low, digits)} to {decimals(factor * interval.high, digits)}"


def _by_position(curves: list[Loss]) -> list[list[str]]:
    found = [{place.position: place.nll for place in one.by_position} for one in curves]
    places = sorted({place for curve in found for place in curve})
    return [[f"{place:.0f}", *(quantity(curve.get(place)) for curve in found)] for place in places]


def _of_duration(one: Duration) -> list[str]:
    record = one.record
    memory = "–" if record["peak_bytes"] is None else _size(record["peak_bytes"])
    times = [quantity(record[name]) for name in ("mean_ms", "std_ms", "median_ms")]
    return [one.kind, str(one.length), str(record["passes"]), *times, memory]


def _size(number: int) -> str:
    return f"{number / MIB:.0f} MiB" if number < 1024 * MIB else f"{number / (1024 * MIB):.2f} GiB"
