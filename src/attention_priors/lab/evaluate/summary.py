"""Summary of an evaluation's records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from attention_priors._io import number
from attention_priors.lab.evaluate.records import Record
from attention_priors.lab.intervals import mean_interval, wilson_interval
from attention_priors.lab.tasks.completion import chance_identity, gc_correlation, identity

Row = dict[str, Any]


class Continuation(NamedTuple):
    """True continuation of a piece of a genome, and the continuations of a model."""

    document: str
    expected: str
    found: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """Summary of the results of runs, as rows of :mod:`attention_priors.lab.results` without plan, scheme and seed."""

    rows: list[Row]
    """Rows sorted by kind; ``retrieval`` has one row per depth, or one without depth if texts have several or none."""
    totals: list[Row]
    """One row for each line of the tables: ``retrieval`` over all depths with ``mean``, from 0 to 1, and Wilson's 95 %
    interval; ``perplexity`` over all positions; the other rows as they are."""
    pieces: dict[int, list[Continuation]] = field(default_factory=dict)
    """Pieces of genomes with their continuations, by length."""
    texts: dict[str, str] = field(default_factory=dict)
    """Hash of all inputs that determine the texts of each task, so that equal hashes mean equal texts. Empty for a
    summary of a file alone."""
    of_bases: bool = False
    """Whether the tokens are the bases of genomes. Records do not store this, so it is False for a summary of a file
    alone."""


_KINDS = ("retrieval", "perplexity", "completion", "needle_weight", "timing", "copying")
_TIMES = ("pass", "passes", "mean_ms", "std_ms", "median_ms", "peak_bytes")


def summarize(records: Iterable[Record]) -> Summary:
    """Summarise records by run, in the order of the records, and by length.

    Args:
        records: Some or all lines of a file (:class:`~attention_priors.lab.evaluate.records.Records`).
    """
    rows: list[Row] = []
    totals: list[Row] = []
    pieces: dict[int, list[Continuation]] = {}
    runs: dict[str, list[Record]] = {}
    for line in records:
        if "identity" not in line:
            runs.setdefault(line["run"], []).append(line)
    for lines in runs.values():
        stops = {line["stopped_before"]: line["reason"] for line in lines if "stopped_before" in line}
        results = [line for line in lines if "stopped_before" not in line]
        for length in sorted({line["length"] for line in results}):
            here = [line for line in results if line["length"] == length]
            if "score" in here[0]:
                end = {"stopped": _stop_after(stops, length, results)}
                totals.append(_total(here) | end)
                rows += [row | end for row in _scores(here)]
            elif "losses" in here[0]:
                rows += _losses(here)
            elif "continuation" in here[0]:
                pieces[length] = _pieces(here)
                rows.append({"row": "completion", "length": length} | _completion(pieces[length]))
            elif "weights" in here[0]:
                rows += _weights(here)
            elif "kinds" in here[0]:
                rows += [{"row": "copying"} | row for row in here[0]["kinds"]]
            else:
                rows += [{"row": "timing", "length": length} | {key: line[key] for key in _TIMES} for line in here]
    rows.sort(key=lambda row: _KINDS.index(row["row"]))
    totals += [row for row in rows if row["row"] != "retrieval" and row.get("position") is None]
    return Summary(rows, totals, pieces)


def _stop_after(stops: dict[int, str], length: int, results: Sequence[Record]) -> str | None:
    later = [line["length"] for line in results if line["length"] > length]
    return next((reason for before, reason in stops.items() if before > length), None) if not later else None


def _total(lines: Sequence[Record]) -> Row:
    """Return the row of all depths of one length."""
    scores = [line["score"] for line in lines]
    whole = {"task": lines[0]["task"], "trials": len(lines), "mean": statistics.fmean(scores)} | _answers(lines)
    return (
        {"row": "retrieval", "length": lines[0]["length"]}
        | whole
        | wilson_interval(math.fsum(scores), len(lines))._asdict()
    )


def _scores(lines: Sequence[Record]) -> Iterator[Row]:
    """Yield a row for each depth of one length."""
    for depth in sorted({line["depth"] for line in lines if line["depth"] is not None}) or [None]:
        here = [line for line in lines if depth is None or line["depth"] == depth]
        score = {"trials": len(here), "correct": statistics.fmean(line["score"] for line in here) * len(here)}
        about = {"row": "retrieval", "length": lines[0]["length"], "task": lines[0]["task"], "depth": depth}
        yield about | score | _answers(here)


def _answers(lines: Sequence[Record]) -> Row:
    """Return what the tokens of the answers tell; None for answers that are not unique, and in old results."""
    shares = [line["token_accuracy"] for line in lines if "token_accuracy" in line]
    right = [line.get("tokens_right") for line in lines]
    margins = [float(np.min([*map(number, line["margins"])])) for line in lines if "margins" in line]
    return {
        "token_accuracy": statistics.fmean(shares) if shares else None,
        "tokens_right": None if None in right else [sum(place) for place in zip(*right, strict=True)],
        "margin": statistics.fmean(margins) if len(margins) == len(lines) else None,
    }


def _losses(lines: Sequence[Record]) -> Iterator[Row]:
    """Yield the row of whole documents of one length, then a row for each range of positions."""
    sums: dict[int, tuple[float, int]] = {}
    ends: dict[int, int] = {}
    of_text: list[tuple[float, int]] = []
    for line in lines:
        for first, last, loss in _losses_of(line):
            total, number = sums.get(first, (0.0, 0))
            sums[first] = (total + loss, number + last - first + 1)
            ends[first] = max(last, ends.get(first, 0))
        size = sum(last - first + 1 for first, last, _ in line["losses"])
        of_text.append((math.fsum(loss for _, _, loss in _losses_of(line)), size))
    tokens = sum(size for _, size in of_text)
    mean = math.fsum(loss for loss, _ in of_text) / tokens
    # For texts of different sizes, the mean over tokens is a ratio of sums. These linearised values have this mean, and
    # the spread of its ratio estimator (Cochran, Sampling Techniques, 1977, section 6.4).
    values = [mean + (loss - mean * size) * len(lines) / tokens for loss, size in of_text]
    about = {"row": "perplexity", "length": lines[0]["length"], "task": lines[0]["task"]}
    whole = {"nll": mean, "tokens": tokens, "documents": len(lines), "position": None}
    yield about | whole | _ends(values)
    for first, (loss, number) in sorted(sums.items()):
        place = {"position": math.sqrt(first * ends[first]), "nll": loss / number, "tokens": number}
        yield about | {"documents": len(lines)} | place


def _losses_of(line: Record) -> list[tuple[int, int, float]]:
    """Return the ranges of positions and the loss in each; nan for non-finite losses."""
    return [(first, last, number(loss)) for first, last, loss in line["losses"]]


def _weights(lines: Sequence[Record]) -> Iterator[Row]:
    for layer, heads in enumerate(lines[0]["weights"]):
        for head in range(len(heads)):
            values = [number(line["weights"][layer][head]) for line in lines]
            place = {"row": "needle_weight", "length": lines[0]["length"], "layer": layer, "head": head}
            yield place | {"texts": len(lines), "weight": statistics.fmean(values)} | _ends(values)


def _pieces(lines: Sequence[Record]) -> list[Continuation]:
    of_piece: dict[str, list[Record]] = {}
    for line in lines:
        of_piece.setdefault(line["document"], []).append(line)
    return [
        Continuation(document, own[0]["expected"], tuple(line["continuation"] for line in own))
        for document, own in of_piece.items()
    ]


def _completion(pieces: Sequence[Continuation]) -> Row:
    identities = [statistics.fmean(identity(found, piece.expected) for found in piece.found) for piece in pieces]
    correlations = []
    for piece in pieces:
        defined = [r for r in (gc_correlation(found, piece.expected) for found in piece.found) if r is not None]
        if defined:
            correlations.append(statistics.fmean(defined))
    means = {
        "identity": statistics.fmean(identities),
        "chance": statistics.fmean(chance_identity(piece.expected) for piece in pieces),
        "gc_correlation": statistics.fmean(correlations) if correlations else None,
    }
    counts = {"pieces": len(pieces), "continuations": len(pieces[0].found)}
    return means | counts | _ends(identities, "identity_") | _ends(correlations, "gc_")


def _ends(values: Sequence[float], prefix: str = "") -> Row:
    """Return the ends of the 95 % interval of the mean; None for fewer than two values."""
    interval = mean_interval(values)
    return {f"{prefix}{end}": None if interval is None else getattr(interval, end) for end in ("low", "high")}
