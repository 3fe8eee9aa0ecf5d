"""Tables of what schemes retrieve, and of the attention that goes there."""

from __future__ import annotations

from attention_priors.lab.intervals import Estimate, cut_to_share
from attention_priors.lab.report.selections.needle_weights import mean_weights, plans_with_weights
from attention_priors.lab.report.selections.plans import retrieval_views, token_views
from attention_priors.lab.report.selections.results import Results, Row, count_passkeys, distinct, rows, schemes_with
from attention_priors.lab.report.tables.cells import (
    ABSENT,
    PASSKEYS,
    SHARES,
    Shares,
    cells_at_lengths,
    share_of_texts,
    share_over_seeds,
    with_first,
)
from attention_priors.lab.report.tables.grid import Cell, Grid, Line


def passkey_grid(results: Results) -> Grid:
    """Shares of pass keys retrieved, by length."""
    shares = Shares(results)
    groups = [
        [[name if first else "", *line] for first, line in with_first(shares.lines(name))]
        for name in schemes_with(results, "passkey")
    ]
    return Grid("passkey", SHARES, ["scheme", "over", *map(str, shares.lengths)], groups, words=2)


def retrieval_grid(results: Results) -> Grid:
    """Scores of the tasks of each plan that retrieve, by length."""
    views = list(retrieval_views(results))
    shares = [Shares(view.results) for view in views]
    lengths = sorted({length for one in shares for length in one.lengths})
    groups = []
    for view, one in zip(views, shares, strict=True):
        group: list[Line] = []
        for name in schemes_with(view.results, "passkey"):
            for first, (over, *cells) in with_first(one.lines(name)):
                at = dict(zip(one.lengths, cells, strict=True))
                row = [name if first else "", over, *(at.get(length, Cell(ABSENT)) for length in lengths)]
                group.append(["" if group else view.title, *row])
        groups.append(group)
    caption = f"Score in each task of each plan, in percent. {SHARES.removeprefix(PASSKEYS)}"
    return Grid("retrieval", caption, ["plan and task", "scheme", "over", *map(str, lengths)], groups, words=3)


def answer_token_grid(results: Results) -> Grid:
    """Which tokens of the answers come out right, in the tasks that have one right answer."""
    views = list(token_views(results))
    told = [row for view in views for row in rows(view.results, "passkey")]
    places = max((len(row.get("tokens_right") or ()) for row in told), default=0)
    groups = []
    for view in views:
        group: list[Line] = []
        for name in schemes_with(view.results, "passkey"):
            mine = rows(view.results, "passkey", name)
            for first, length in with_first(distinct(mine, "length")):
                here = [row for row in mine if row["length"] == length]
                group.append(["" if group else view.title, name if first else "", str(length), *_tokens(here, places)])
        groups.append(group)
    caption = (
        "Tokens of the answer that are predicted right, %, each after the true ones before it, by context length in "
        "tokens. All: their share, mean over seeds with Student's 95 % interval (where there are two seeds at least), "
        "cut to 0–100 %. Numbered: the first, the second, ... alone, of the texts of all seeds, with the 95 % Wilson "
        "interval; –: not kept, or no such token."
    )
    header = ["plan and task", "scheme", "length", "all", *map(str, range(1, places + 1))]
    return Grid("answer_tokens", caption, header, groups, words=2)


def _tokens(here: list[Row], places: int) -> list[Cell]:
    """Of one scheme at one length: all tokens of the answers together, and each place."""
    shares = [count.share for count in count_passkeys(here, "seed").values()]
    cells = [share_over_seeds(shares)]
    counts = [row.get("tokens_right") or [] for row in here]
    trials = sum(row["trials"] for row in here)
    for place in range(places):
        if all(len(count) > place for count in counts):
            right = sum(count[place] for count in counts)
            cells.append(share_of_texts(right, trials))
        else:
            cells.append(Cell(ABSENT))
    return cells


def needle_weight_grid(results: Results) -> Grid:
    """How much of the attention the pass key gets, by length."""
    lengths = distinct(rows(results, "needle_weights"), "length")
    groups = []
    for plan in plans_with_weights(results):
        group: list[Line] = []
        for name in schemes_with(results, "needle_weights"):
            found = mean_weights(results, plan, name)
            if found:
                shares = {length: _percent(one) for length, one in found.items()}
                group.append(["" if group else plan, name, *cells_at_lengths(shares, lengths, "{:.1f}".format)])
        groups.append(group)
    caption = (
        "Attention on the pass key when it is asked for, %: the weight that the question's last token gives to the "
        "sentences with the key, of the head that gives most at the shortest length, by length in tokens; mean over "
        "texts. Mean over seeds, in each its own head, with Student's 95 % interval (where there are two seeds at "
        "least), cut to 0–100 %."
    )
    return Grid("needle_weights", caption, ["plan", "scheme", *map(str, lengths)], groups, words=2)


def _percent(share: Estimate) -> Estimate:
    return Estimate(*(100 * value for value in cut_to_share(share)))
