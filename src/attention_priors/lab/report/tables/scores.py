"""Tables of what schemes retrieve, and of the attention that goes there.

They are ``passkey``, ``retrieval``, ``answer_tokens`` and ``needle_weights``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from attention_priors.lab.intervals import cut_to_share, over_seeds, wilson_interval
from attention_priors.lab.report import estimates
from attention_priors.lab.report.estimates import by_scheme, by_task
from attention_priors.lab.report.table import ABSENT, Cell, Line, Table
from attention_priors.lab.report.wording import multiple, wording
from attention_priors.lab.results import Frame, Results


def share_lines(rows: Frame, lengths: Sequence[int]) -> dict[str, list[Line]]:
    """Return each scheme's shares by length: over all texts and, where there are several seeds, over seeds."""
    pooled = {(cell.scheme, cell.length): cell for cell in estimates.shares_by_length(rows).itertuples()}
    lines: dict[str, list[Line]] = {}
    for name, own in by_scheme(estimates.shares(rows, "scheme", "length", "seed")):
        cells = [pooled.get((name, length)) for length in lengths]
        lines[name] = [["texts", *map(_share, cells)]]
        if (seeds := own.seed.nunique()) > 1:
            found = estimates.over(own, "length", "share")
            over_seeds = (Cell.of_share(found[one.length], _mark(one)) if one else ABSENT for one in cells)
            lines[name].append([f"{seeds} seeds", *over_seeds])
    return lines


def _mark(cell: Any) -> str:
    return "" if cell.complete else "†"


def _share(cell: Any, best: bool = False) -> Cell:
    """Write a row of :func:`~attention_priors.lab.report.estimates.shares_by_length`, if there is one."""
    if cell is None:
        return Cell(ABSENT)
    return Cell.of_share((cell.share, cell.low, cell.high), _mark(cell), best)


def passkey(results: Results) -> Table:
    """Shares of the recipe's own pass keys, by length."""
    rows = estimates.own_passkeys(results)
    lengths = sorted(rows.length.unique())
    lines = [[name, *line] for name, own in share_lines(rows, lengths).items() for line in own]
    return Table("passkey", wording("passkey"), ["scheme", "over", *map(str, lengths)], lines, words=2)


def passkey_overview(results: Results) -> Table:
    """Shares of the recipe's own pass keys for a terminal and the top of a page: a line per scheme, the best bold."""
    cells = estimates.shares_by_length(estimates.own_passkeys(results))
    lengths, best, trained = sorted(cells.length.unique()), estimates.best_shares(cells), results.context_lengths
    places = {(cell.scheme, cell.length): cell for cell in cells.itertuples()}
    lines = []
    for name in results.names if len(cells) else ():
        own = [places.get((name, length)) for length in lengths]
        lines.append(
            [name, *(_share(one, bool(one and one.complete and one.share == best.get(one.length))) for one in own)]
        )
    one = len(trained) == 1
    header = ["scheme", *(f"{n}\n{multiple(n / trained[0])}×" if one else str(n) for n in lengths)]
    words = wording("passkey_overview", trained=one, complete=cells.complete.all())
    return Table("passkey_overview", words, header, lines)


def retrieval(results: Results) -> Table:
    """Scores of the tasks of each plan that retrieve, by length."""
    rows = results["retrieval"].dropna(subset="plan")
    lengths = sorted(rows.length.unique())
    lines = [
        [title, name, *line]
        for title, task in by_task(rows)
        for name, own in share_lines(task, lengths).items()
        for line in own
    ]
    header = ["plan and task", "scheme", "over", *map(str, lengths)]
    return Table("retrieval", wording("retrieval"), header, lines, words=3)


def answer_tokens(results: Results) -> Table:
    """Which tokens of the answers come out right, in the tasks that have one right answer."""
    rows = results["retrieval"].dropna(subset="token_accuracy")
    places = max((len(right) for right in rows.tokens_right if isinstance(right, list)), default=0)
    lines = [
        [f"{title}, answer's tokens", name, str(length), *_tokens(here, places)]
        for title, task in by_task(rows)
        for name, own in by_scheme(task)
        for length, here in own.groupby("length")
    ]
    header = ["plan and task", "scheme", "length", "all", *map(str, range(1, places + 1))]
    return Table("answer_tokens", wording("answer_tokens"), header, lines, words=2)


def _tokens(rows: Frame, places: int) -> Iterator[Cell]:
    """Return the cells of one scheme at one length: all tokens of the answers together, and each place."""
    seeds = [np.average(own.token_accuracy, weights=own.trials) for _, own in rows.groupby("seed")]
    yield Cell.of_share(over_seeds(seeds))
    kept = [right if isinstance(right, list) else [] for right in rows.tokens_right]
    trials = int(rows.trials.sum())
    for place in range(places):
        right = sum(counts[place] for counts in kept) if all(len(counts) > place for counts in kept) else None
        yield Cell(ABSENT) if right is None else Cell.of_share((right / trials, *wilson_interval(right, trials)))


def needle_weights(results: Results) -> Table:
    """How much of the attention the pass key gets, by length."""
    rows = results["needle_weight"]
    lengths = sorted(rows.length.unique())
    lines = []
    for plan, of_plan in rows.groupby("plan", sort=False):
        for name, own in by_scheme(estimates.leading_heads(of_plan)):
            found = {n: 100 * np.array(cut_to_share(one)) for n, one in estimates.over(own, "length", "weight").items()}
            cells = [Cell.of(found[n], "{:.1f}".format) if n in found else ABSENT for n in lengths]
            lines.append([str(plan), name, *cells])
    header = ["plan", "scheme", *map(str, lengths)]
    return Table("needle_weights", wording("needle_weights"), header, lines, words=2)
