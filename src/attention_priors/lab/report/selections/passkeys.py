"""Pass keys retrieved by scheme and length, with intervals over texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from attention_priors.lab.intervals import wilson_interval
from attention_priors.lab.report.selections.results import (
    Results,
    check_results,
    count_passkeys,
    distinct,
    rows,
    scheme_names,
)


@dataclass(frozen=True)
class PasskeyCell:
    """One scheme at one length, pooled over depths and seeds.

    Attributes:
        scheme: The scheme's name.
        length: Context length in tokens.
        correct: Pass keys retrieved.
        trials: Pass keys asked for.
        share: ``correct / trials``.
        low: Lower end of the 95 % Wilson interval of the share.
        high: Upper end of the interval.
        complete: Whether every seed of the scheme was evaluated here. Where one had stopped, the share is
            that of the others, and flatters the scheme.
    """

    scheme: str
    length: int
    correct: float
    trials: int
    share: float
    low: float
    high: float
    complete: bool


def passkey_table(results: Results) -> list[PasskeyCell]:
    """Every scheme at every length it was evaluated at, in display order and by length."""
    check_results(results)
    cells = []
    for scheme in scheme_names(results):
        selected = rows(results, "passkey", scheme)
        seeds = distinct(selected, "seed")
        evaluated = {(row["seed"], row["length"]) for row in selected}
        for (length,), count in sorted(count_passkeys(selected, "length").items()):
            low, high = wilson_interval(*count)
            complete = all((seed, length) in evaluated for seed in seeds)
            cells.append(PasskeyCell(scheme, length, *count, count.share, low, high, complete))
    return cells


def best_shares(cells: Iterable[PasskeyCell]) -> dict[int, float]:
    """The best share above 0 at each length, among the cells that hold all their seeds."""
    best: dict[int, float] = defaultdict(float)
    for cell in cells:
        if cell.complete:
            best[cell.length] = max(best[cell.length], cell.share)
    return {length: share for length, share in best.items() if share > 0}
