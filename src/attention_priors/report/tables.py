"""The passkey table: its numbers, their intervals, and its form for the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from attention_priors.intervals import wilson_interval
from attention_priors.report.numbers import multiple, percent
from attention_priors.report.results import (
    Results,
    check_results,
    common_training_length,
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


def render_text_table(results: Results) -> Table:
    """The share of pass keys retrieved, in percent: schemes as rows, lengths as columns, the best bold."""
    cells = passkey_table(results)
    by_place = {(cell.scheme, cell.length): cell for cell in cells}
    lengths = sorted({cell.length for cell in cells})
    best = best_shares(cells)
    table = Table(title="Pass keys retrieved, % of trials", caption=_caption(cells), caption_justify="left")
    trained = common_training_length(results)
    table.add_column("scheme\n× training length" if trained else "scheme")
    for length in lengths:
        ratio = f"\n{multiple(length / trained)}×" if trained else ""
        table.add_column(f"{length}{ratio}", justify="right", no_wrap=True)
    for scheme in scheme_names(results):
        line = [Text(scheme)]
        for length in lengths:
            cell = by_place.get((scheme, length))
            if cell is None:
                line.append(Text("–"))
            else:
                is_best = cell.complete and cell.share == best.get(length)
                mark = "" if cell.complete else "†"
                line.append(Text(percent(cell.share) + mark, style="bold" if is_best else ""))
        table.add_row(*line)
    return table


def _caption(cells: list[PasskeyCell]) -> str:
    if not cells:
        return "no pass keys were asked for"
    notes = ["columns: context length in tokens; –: not evaluated"]
    if not all(cell.complete for cell in cells):
        notes.append("†: without the seeds that had stopped")
    return "; ".join(notes)
