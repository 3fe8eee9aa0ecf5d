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
from attention_priors.lab.intervals import Interval, mean_interval, wilson_interval
from attention_priors.lab.tasks.completion import chance_identity, gc_correlation, identity
from attention_priors.lab.tasks.copying import CopyingRow


class AtDepth(NamedTuple):
    """Accuracy of the answers at one depth."""

    mean: float
    trials: int
    token_accuracy: float | None
    tokens_right: list[int] | None
    """Number of right predictions of each token of the answer, from first to last. None if the answer is not unique,
    and in old results without these counts."""
    margin: float | None
    """Mean over texts of the answer's smallest margin, in logits: the logit of a right token minus the largest logit of
    another. None where ``tokens_right`` is None, and in old results."""


class AtPosition(NamedTuple):
    """Loss in a range of positions."""

    position: float
    """Geometric middle of the range."""
    nll: float
    """Mean negative log-likelihood of the tokens in the range, in nats."""
    tokens: int


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the answers at one length."""

    task: str
    length: int
    trials: int
    mean: float
    """Mean score, from 0 to 1."""
    interval: Interval
    """Wilson's 95 % interval of the mean."""
    token_accuracy: float | None
    """Share of the answers' tokens that are predicted correctly; None if the answer is not unique."""
    tokens_right: list[int] | None
    """Number of right predictions of each token of the answer (:attr:`AtDepth.tokens_right`)."""
    margin: float | None
    """Mean smallest margin of the answers (:attr:`AtDepth.margin`)."""
    by_depth: dict[float, AtDepth]
    """Accuracy at each depth; empty if texts have several depths or none."""
    stopped: str | None
    """Reason why longer texts were skipped; None if they were not."""


@dataclass(frozen=True)
class Loss:
    """Negative log-likelihood over the documents of one length."""

    task: str
    length: int
    documents: int
    tokens: int
    nll: float
    """Mean over all tokens in nats per token; nan if a loss is not finite."""
    interval: Interval | None
    """95 % interval over documents; None for a single document."""
    by_position: list[AtPosition]

    @property
    def perplexity(self) -> float:
        """Perplexity ``exp(nll)``; infinity on overflow."""
        try:
            return math.exp(self.nll)
        except OverflowError:
            return math.inf

    @property
    def bits(self) -> float:
        """Loss in bits per token; for nucleotides, in bits per base."""
        return self.nll / math.log(2)


class Continuation(NamedTuple):
    """True continuation of a piece of a genome, and the continuations of a model."""

    document: str
    expected: str
    found: tuple[str, ...]


@dataclass(frozen=True)
class Completion:
    """Continuations of pieces of a genome at one length. Intervals are 95 %, over pieces; None for a single piece."""

    length: int
    identity: float
    """Mean share of bases that equal the true bases."""
    identity_interval: Interval | None
    chance: float
    """Expected identity of independent random bases with the frequencies of each true continuation."""
    gc_correlation: float | None
    """Mean Pearson correlation of the GC trajectories of continuations with the true trajectories; None if undefined
    for all continuations."""
    gc_correlation_interval: Interval | None
    pieces: tuple[Continuation, ...]


class HeadWeight(NamedTuple):
    """Attention weight of one head on the requested needle."""

    length: int
    layer: int
    head: int
    texts: int
    weight: float
    """Mean over texts, from 0 to 1."""
    interval: Interval | None
    """95 % interval over texts; None for a single text."""


@dataclass(frozen=True)
class Duration:
    """Time and memory of one pass."""

    length: int
    kind: str
    record: Record


@dataclass(frozen=True)
class Summary:
    """Summary of the results of runs."""

    accuracies: list[Accuracy]
    losses: list[Loss]
    completions: list[Completion]
    weights: list[HeadWeight]
    durations: list[Duration]
    copying: list[CopyingRow] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """Hash of all inputs that determine the texts of each task, so that equal hashes mean equal texts. Empty for a
    summary of a file alone."""
    of_bases: bool = False
    """Whether the tokens are the bases of genomes. Records do not store this, so it is False for a summary of a file
    alone."""

    def totals(self) -> Iterator[dict[str, Any]]:
        """Yield one row for each line of the tables: scores over all depths, losses over all positions, and the rest.

        Rows are those of :meth:`rows`, but ``retrieval`` has ``mean`` and its 95 % interval in place of depths.
        """
        for one in self.accuracies:
            ends = _ends(one.interval, "low", "high")
            fields = "task", "trials", "mean", "token_accuracy", "tokens_right", "margin", "stopped"
            yield _row("retrieval", one, *fields, **ends)
        for row in self.rows():
            if row["row"] != "retrieval" and row.get("position") is None:
                yield row

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the results as rows of :mod:`attention_priors.lab.results`, without plan, scheme and seed."""
        for one in self.accuracies:
            whole = AtDepth(one.mean, one.trials, one.token_accuracy, one.tokens_right, one.margin)
            for depth, at in (one.by_depth or {None: whole}).items():
                score = {"trials": at.trials, "correct": at.mean * at.trials, "token_accuracy": at.token_accuracy}
                score |= {"tokens_right": at.tokens_right, "margin": at.margin}
                yield _row("retrieval", one, "task", depth=depth, **score, stopped=one.stopped)
        for one in self.losses:
            ends = _ends(one.interval, "low", "high")
            yield _row("perplexity", one, "task", "nll", "tokens", "documents", position=None, **ends)
            for place in one.by_position:
                yield _row("perplexity", one, "task", "documents", **place._asdict())
        for one in self.completions:
            ends = _ends(one.identity_interval, "identity_low", "identity_high")
            ends |= _ends(one.gc_correlation_interval, "gc_low", "gc_high")
            counts = {"pieces": len(one.pieces), "continuations": len(one.pieces[0].found)}
            yield _row("completion", one, "identity", "chance", "gc_correlation", **counts, **ends)
        for one in self.weights:
            yield _row("needle_weight", one, "layer", "head", "texts", "weight", **_ends(one.interval, "low", "high"))
        for one in self.durations:
            yield _row("timing", one, **{key: one.record[key] for key in _TIMES})
        yield from ({"row": "copying"} | one for one in self.copying)


_TIMES = ("pass", "passes", "mean_ms", "std_ms", "median_ms", "peak_bytes")


def _row(kind: str, one: Any, *fields: str, **others: Any) -> dict[str, Any]:
    return {"row": kind, "length": one.length} | {name: getattr(one, name) for name in fields} | others


def _ends(interval: Interval | None, low: str, high: str) -> dict[str, float | None]:
    return {low: None, high: None} if interval is None else {low: interval.low, high: interval.high}


def summarize(records: Iterable[Record]) -> Summary:
    """Summarise records by run, in the order of the records, and by length.

    Args:
        records: Some or all lines of a file (:class:`~attention_priors.lab.evaluate.Records`).
    """
    accuracies: list[Accuracy] = []
    losses: list[Loss] = []
    completions: list[Completion] = []
    weights: list[HeadWeight] = []
    durations: list[Duration] = []
    copying: list[CopyingRow] = []
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
                accuracies.append(_accuracy(here, _stop_after(stops, length, results)))
            elif "losses" in here[0]:
                losses.append(_loss(here))
            elif "continuation" in here[0]:
                completions.append(_completion(here))
            elif "weights" in here[0]:
                weights += _weights(here)
            elif "kinds" in here[0]:
                copying += here[0]["kinds"]
            else:
                durations += [Duration(length, line["pass"], line) for line in here]
    return Summary(accuracies, losses, completions, weights, durations, copying)


def _stop_after(stops: dict[int, str], length: int, results: Sequence[Record]) -> str | None:
    later = [line["length"] for line in results if line["length"] > length]
    return next((reason for before, reason in stops.items() if before > length), None) if not later else None


def _accuracy(lines: Sequence[Record], stopped: str | None) -> Accuracy:
    whole = _scores(lines)
    places = sorted({line["depth"] for line in lines if line["depth"] is not None})
    of_depth = {place: [line for line in lines if line["depth"] == place] for place in places}
    return Accuracy(
        task=lines[0]["task"],
        length=lines[0]["length"],
        trials=whole.trials,
        mean=whole.mean,
        interval=wilson_interval(math.fsum(line["score"] for line in lines), whole.trials),
        token_accuracy=whole.token_accuracy,
        tokens_right=whole.tokens_right,
        margin=whole.margin,
        by_depth={place: _scores(found) for place, found in of_depth.items()},
        stopped=stopped,
    )


def _scores(lines: Sequence[Record]) -> AtDepth:
    shares = [line["token_accuracy"] for line in lines if "token_accuracy" in line]
    right = [line.get("tokens_right") for line in lines]
    margins = [float(np.min([*map(number, line["margins"])])) for line in lines if "margins" in line]
    return AtDepth(
        mean=statistics.fmean(line["score"] for line in lines),
        trials=len(lines),
        token_accuracy=statistics.fmean(shares) if shares else None,
        tokens_right=None if None in right else [sum(place) for place in zip(*right, strict=True)],
        margin=statistics.fmean(margins) if len(margins) == len(lines) else None,
    )


def _loss(lines: Sequence[Record]) -> Loss:
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
    return Loss(
        task=lines[0]["task"],
        length=lines[0]["length"],
        documents=len(lines),
        tokens=tokens,
        nll=mean,
        interval=mean_interval(values),
        by_position=[
            AtPosition(math.sqrt(first * ends[first]), loss / number, number)
            for first, (loss, number) in sorted(sums.items())
        ],
    )


def _losses_of(line: Record) -> list[tuple[int, int, float]]:
    """Return the ranges of positions and the loss in each; nan for non-finite losses."""
    return [(first, last, number(loss)) for first, last, loss in line["losses"]]


def _weights(lines: Sequence[Record]) -> list[HeadWeight]:
    found = []
    for layer, heads in enumerate(lines[0]["weights"]):
        for head in range(len(heads)):
            values = [number(line["weights"][layer][head]) for line in lines]
            mean = statistics.fmean(values)
            found.append(HeadWeight(lines[0]["length"], layer, head, len(lines), mean, mean_interval(values)))
    return found


def _completion(lines: Sequence[Record]) -> Completion:
    of_piece: dict[str, list[Record]] = {}
    for line in lines:
        of_piece.setdefault(line["document"], []).append(line)
    pieces = tuple(
        Continuation(document, own[0]["expected"], tuple(line["continuation"] for line in own))
        for document, own in of_piece.items()
    )
    identities = [statistics.fmean(identity(found, piece.expected) for found in piece.found) for piece in pieces]
    correlations = []
    for piece in pieces:
        defined = [r for r in (gc_correlation(found, piece.expected) for found in piece.found) if r is not None]
        if defined:
            correlations.append(statistics.fmean(defined))
    return Completion(
        length=lines[0]["length"],
        identity=statistics.fmean(identities),
        identity_interval=mean_interval(identities),
        chance=statistics.fmean(chance_identity(piece.expected) for piece in pieces),
        gc_correlation=statistics.fmean(correlations) if correlations else None,
        gc_correlation_interval=mean_interval(correlations),
        pieces=pieces,
    )
