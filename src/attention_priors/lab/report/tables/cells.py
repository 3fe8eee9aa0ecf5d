"""Numbers of a comparison as cells of its tables, with their intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from attention_priors._io import number
from attention_priors.lab.intervals import Estimate, over_seeds, wilson_interval
from attention_priors.lab.report.numbers import percent
from attention_priors.lab.report.selections.losses import loss_measure
from attention_priors.lab.report.selections.passkeys import PasskeyCell, passkey_table
from attention_priors.lab.report.selections.results import (
    Count,
    Results,
    Row,
    count_passkeys,
    distinct,
    rows,
    schemes_with,
    training_length,
)
from attention_priors.lab.report.tables.grid import Cell, Line

ABSENT = "–"

_POSITIONS = 6
"""Ranges of positions in a table; the figures have all."""

PASSKEYS = "Pass keys retrieved, % of texts, by context length in tokens. "

SHARES = (
    f"{PASSKEYS}Texts: of the answers of all seeds together, with the 95 % Wilson interval, which is for the chance "
    "in the texts; all seeds read the same, so that it is too narrow where they fail at the same ones. Seeds: the mean "
    "of the seeds' shares, with Student's 95 % interval, which is for models trained with other seeds; where all seeds "
    "agree it is a point, and tells nothing of the chance in the texts. –: not evaluated. †: without the seeds that "
    "had stopped at a shorter length, which flatters the scheme."
)


class Shares:
    """Pass keys retrieved, as cells for each length."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._cells: Mapping[tuple[str, int], PasskeyCell] = {
            (cell.scheme, cell.length): cell for cell in passkey_table(results)
        }
        self.lengths: Sequence[int] = sorted({length for _, length in self._cells})

    def lines(self, scheme: str) -> list[Line]:
        """Over all texts; and, where there are several seeds, over them."""
        selected = rows(self._results, "passkey", scheme)
        seeds = distinct(selected, "seed")
        if not seeds:
            return []
        lines: list[Line] = [["texts", *self.pooled(scheme)]]
        if len(seeds) > 1:
            counts = count_passkeys(selected, "length", "seed")
            lines.append(
                [f"{len(seeds)} seeds", *(self._over_seeds(counts, scheme, length) for length in self.lengths)]
            )
        return lines

    def pooled(self, scheme: str) -> list[Cell]:
        """Over all texts of all seeds."""
        cells = [self._cells.get((scheme, length)) for length in self.lengths]
        return [
            Cell(ABSENT)
            if cell is None
            else Cell(percent(cell.share) + ("" if cell.complete else "†"), interval_text(cell.low, cell.high, _bound))
            for cell in cells
        ]

    def _over_seeds(self, counts: Mapping[tuple[Any, ...], Count], scheme: str, length: int) -> Cell:
        shares = [count.share for (size, _), count in counts.items() if size == length]
        if not shares:
            return Cell(ABSENT)
        return share_over_seeds(shares, "" if self._cells[scheme, length].complete else "†")


class Losses:
    """Losses, as cells in their measure."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self.measure = loss_measure(results)
        self.schemes = schemes_with(results, "perplexity")
        shortest = min((training_length(results, scheme) for scheme in self.schemes), default=0)
        positions = distinct(rows(results, "perplexity"), "position")
        self.beyond: list[float] = _spread([place for place in positions if _first_of_range(place) >= shortest])
        # Neither within the shortest training length nor beyond it.
        self.straddles = any(_first_of_range(place) < shortest <= _end_of_range(place) for place in positions)

    def seeds(self, scheme: str) -> int:
        """How many there are."""
        return len(distinct(rows(self._results, "perplexity", scheme), "seed"))

    def at(self, scheme: str, position: float) -> Cell:
        """At one range of positions."""
        return self._cell(row for row in rows(self._results, "perplexity", scheme) if row["position"] == position)

    def everywhere(self, scheme: str) -> Cell:
        """Over all positions."""
        return self._cell(rows(self._results, "perplexity", scheme))

    def within_training(self, scheme: str) -> Cell:
        """Over the ranges of positions that end within the training length."""
        length = training_length(self._results, scheme)
        return self._cell(
            row for row in rows(self._results, "perplexity", scheme) if _end_of_range(row["position"]) < length
        )

    def _cell(self, selected: Iterable[Row]) -> Cell:
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for row in selected:
            sums[row["seed"]][0] += number(row["nll"]) * row["tokens"]
            sums[row["seed"]][1] += row["tokens"]
        losses = [total / count for total, count in sums.values()]
        if not losses or not all(map(math.isfinite, losses)):
            return Cell(ABSENT)
        return estimate_cell(self.measure.estimate(losses), self.measure.written)


def _first_of_range(middle: float) -> int:
    """The first position of a range: the power of two that is no larger than its middle."""
    return 2 ** math.floor(math.log2(middle))


def _end_of_range(middle: float) -> int:
    """The last position of a range, which ends before the next power of two or with the text."""
    return round(middle**2 / _first_of_range(middle))


def share_of_texts(correct: float, trials: int) -> Cell:
    """A share of texts, in percent, with Wilson's interval."""
    return Cell(percent(correct / trials), interval_text(*wilson_interval(correct, trials), _bound))


def share_over_seeds(shares: Sequence[float], mark: str = "") -> Cell:
    """The mean of the seeds' shares, in percent, with its interval cut to 0–100 %; a mark stands behind the mean."""
    mean, low, high = over_seeds(shares)
    text = percent(mean) + mark
    return Cell(text) if math.isnan(low) else Cell(text, interval_text(max(low, 0.0), min(high, 1.0), _bound))


def _spread(positions: list[float]) -> list[float]:
    """So many of them that a page is wide enough, evenly spaced, the first and the last among them."""
    count = min(len(positions), _POSITIONS)
    if count < 2:
        return positions
    return [positions[round(place * (len(positions) - 1) / (count - 1))] for place in range(count)]


def estimate_cell(value: Estimate, written: Callable[[float], str]) -> Cell:
    """A mean over seeds with its interval, where it has one."""
    if math.isnan(value.low):
        return Cell(written(value.mean))
    return Cell(written(value.mean), interval_text(value.low, value.high, written))


def cells_at_lengths(
    estimates: Mapping[int, Estimate], lengths: Iterable[int], written: Callable[[float], str]
) -> Iterator[Cell | str]:
    """An estimate at each length, or the mark of its absence."""
    for length in lengths:
        yield estimate_cell(estimates[length], written) if length in estimates else ABSENT


def interval_text(low: float, high: float, written: Callable[[float], str]) -> str:
    """``[low, high]``."""
    return f"[{written(low)}, {written(high)}]"


def _bound(share: float) -> str:
    return f"{100 * share:.0f}"


def with_first(lines: Iterable[Any]) -> Iterator[tuple[bool, Any]]:
    """Each item, after whether it is the first."""
    for index, line in enumerate(lines):
        yield index == 0, line
