"""What the records of an evaluation come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attention_priors.evaluation.records import Record, Records
from attention_priors.intervals import Interval, mean_interval, wilson_interval


@dataclass(frozen=True)
class Accuracy:
    """How right the answers at one length were."""

    task: str
    length: int
    trials: int
    mean: float
    """Mean score, from 0 to 1."""
    interval: Interval
    """95 %, Wilson's."""
    token_accuracy: float | None
    """Share of the answers' tokens predicted right; None where there is no one right answer."""
    by_depth: dict[float, tuple[float, int]]
    """Mean score and number of trials at each depth; empty where a text has no one depth."""
    stopped: str | None
    """Why no longer texts were tried."""


@dataclass(frozen=True)
class Loss:
    """Negative log-likelihood over the documents of one length."""

    task: str
    length: int
    documents: int
    tokens: int
    nll: float
    """In nats per token, over all tokens."""
    interval: Interval | None
    """95 %, over documents; None for a single one."""
    by_position: list[tuple[float, float]]
    """Geometric middle of a range of positions, and the mean over the tokens in it."""

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return math.exp(self.nll)


@dataclass(frozen=True)
class Duration:
    """What one pass took."""

    length: int
    kind: str
    record: Record


@dataclass(frozen=True)
class Summary:
    """All results of some runs."""

    accuracies: list[Accuracy]
    losses: list[Loss]
    durations: list[Duration]


def summarize(records: Records, runs: Iterable[str]) -> Summary:
    """Put together the results of runs, in their order.

    Args:
        records: the lines of a file.
        runs: IDs of runs in it.
    """
    accuracies: list[Accuracy] = []
    losses: list[Loss] = []
    durations: list[Duration] = []
    for run in runs:
        lines = records.of(run)
        stops = {line["stopped_before"]: line["reason"] for line in lines if "stopped_before" in line}
        results = [line for line in lines if "stopped_before" not in line]
        for length in sorted({line["length"] for line in results}):
            here = [line for line in results if line["length"] == length]
            if "score" in here[0]:
                accuracies.append(_accuracy(here, _stop_after(stops, length, results)))
            elif "losses" in here[0]:
                losses.append(_loss(here))
            else:
                durations += [Duration(length, line["pass"], line) for line in here]
    return Summary(accuracies, losses, durations)


def _stop_after(stops: dict[int, str], length: int, results: Sequence[Record]) -> str | None:
    later = [line["length"] for line in results if line["length"] > length]
    return next((reason for before, reason in stops.items() if before > length), None) if not later else None


def _accuracy(lines: Sequence[Record], stopped: str | None) -> Accuracy:
    scores = [line["score"] for line in lines]
    shares = [line["token_accuracy"] for line in lines if "token_accuracy" in line]
    places = sorted({line["depth"] for line in lines if line["depth"] is not None})
    of_depth = {place: [line["score"] for line in lines if line["depth"] == place] for place in places}
    return Accuracy(
        task=lines[0]["task"],
        length=lines[0]["length"],
        trials=len(scores),
        mean=statistics.fmean(scores),
        interval=wilson_interval(math.fsum(scores), len(scores)),
        token_accuracy=statistics.fmean(shares) if shares else None,
        by_depth={place: (statistics.fmean(found), len(found)) for place, found in of_depth.items()},
        stopped=stopped,
    )


def _loss(lines: Sequence[Record]) -> Loss:
    sums: dict[int, tuple[float, int]] = {}
    ends: dict[int, int] = {}
    means = []
    for line in lines:
        for first, last, loss in line["losses"]:
            total, number = sums.get(first, (0.0, 0))
            sums[first] = (total + loss, number + last - first + 1)
            ends[first] = max(last, ends.get(first, 0))
        tokens = sum(last - first + 1 for first, last, _ in line["losses"])
        means.append(math.fsum(loss for _, _, loss in line["losses"]) / tokens)
    tokens = sum(number for _, number in sums.values())
    return Loss(
        task=lines[0]["task"],
        length=lines[0]["length"],
        documents=len(lines),
        tokens=tokens,
        nll=math.fsum(loss for loss, _ in sums.values()) / tokens,
        interval=mean_interval(means),
        by_position=[(math.sqrt(first * ends[first]), loss / number) for first, (loss, number) in sorted(sums.items())],
    )
