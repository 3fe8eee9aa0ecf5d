"""Tables of losses: perplexity or bits per base, the copy-mixture task, and how genomes go on.

They are ``perplexity``, ``losses``, ``copying`` and ``completions``.
"""

from __future__ import annotations

from functools import partial

from attention_priors.lab.intervals import over_seeds
from attention_priors.lab.report import estimates
from attention_priors.lab.report.estimates import KINDS, by_scheme
from attention_priors.lab.report.table import ABSENT, Cell, Table
from attention_priors.lab.report.wording import decimals, wording
from attention_priors.lab.results import Frame, Results

_POSITIONS = 6
"""Ranges of positions in a table; the figures have all."""


class Losses:
    """Losses by position as cells in their measure.

    Attributes:
        rows: Perplexity rows.
        measure: What is made of the losses.
        beyond: Ranges of positions beyond the shortest training length; of many, some.
        straddles: Whether a range is neither within the shortest training length nor beyond it.
        documents: Number of documents, such as "7", or "4 or 7" where models read different numbers; empty if unknown.
    """

    def __init__(self, results: Results, rows: Frame) -> None:
        self._results, self.rows, self.measure = results, rows[rows.position.notna()], estimates.loss_measure(results)
        self._by_scheme = dict(by_scheme(self.rows))
        shortest = min((results.context_length(name) for name in estimates.schemes_in(self.rows)), default=0)
        positions = sorted(self.rows.position.unique())
        beyond = [position for position in positions if estimates.first_of_range(position) >= shortest]
        count = min(len(beyond), _POSITIONS)
        places = range(count) if count < 2 else (round(k * (len(beyond) - 1) / (count - 1)) for k in range(count))
        self.beyond = [beyond[place] for place in places]
        self.straddles = any(estimates.first_of_range(p) < shortest <= estimates.end_of_range(p) for p in positions)
        self.documents = " or ".join(f"{count:.0f}" for count in sorted(self.rows.documents.dropna().unique()))

    def of(self, scheme: str) -> Frame:
        """Return the rows of a scheme."""
        return self._by_scheme.get(scheme, self.rows[:0])

    def at(self, scheme: str, position: float) -> Cell:
        """Write the loss in one range of positions."""
        rows = self.of(scheme)
        return self.cell(rows[rows.position == position])

    def within_training(self, scheme: str) -> Cell:
        """Write the loss over the ranges of positions that end within the training length."""
        rows, length = self.of(scheme), self._results.context_length(scheme)
        return self.cell(rows[[estimates.end_of_range(position) < length for position in rows.position]])

    def cell(self, rows: Frame) -> Cell:
        """Write the loss of some rows of a scheme."""
        losses = estimates.mean_losses(rows)
        return Cell.of(self.measure.estimate(losses), self.measure.written) if losses else Cell(ABSENT)


def perplexity(results: Results) -> Table:
    """Losses within the training length and beyond."""
    rows = results["perplexity"]
    losses = Losses(results, rows[rows.plan.isna()])
    lines = [
        [name, str(own.seed.nunique()), losses.within_training(name), *(losses.at(name, p) for p in losses.beyond)]
        for name, own in by_scheme(losses.rows)
    ]
    words = wording("perplexity", measure=losses.measure, straddles=losses.straddles, documents=losses.documents)
    header = ["scheme", "seeds", "within\ntraining", *(f"{position:.0f}" for position in losses.beyond)]
    return Table("perplexity", words, header, lines)


def plan_losses(results: Results) -> Table:
    """Losses on the texts of each plan."""
    lines = []
    for title, rows in estimates.by_text(results["perplexity"]):
        losses = Losses(results, rows)
        if losses.documents:
            title += f"; documents: {losses.documents}"
        for name, own in by_scheme(losses.rows):
            lines.append([title, name, str(own.seed.nunique()), losses.within_training(name), losses.cell(own)])
    header = ["plan, task and texts", "scheme", "seeds", "within\ntraining", "all\npositions"]
    words = wording("losses", measure=estimates.loss_measure(results))
    return Table("losses", words, header, lines, words=2)


def copying(results: Results) -> Table:
    """Losses in the copy-mixture task, by length of the row."""
    rows = results["copying"]
    lengths = sorted(rows.length.unique())
    expected = {(row.kind, row.length): row.expected_nll for row in rows.itertuples()}
    lines, written = [], partial(decimals, digits=3)
    for kind, words in KINDS.items():
        if lengths and all((kind, length) in expected for length in lengths):
            lines.append(["the optimum", words, *(f"{expected[kind, length]:.3f}" for length in lengths)])
    for name, own in by_scheme(rows):
        for kind, words in KINDS.items():
            found = estimates.excess_losses(own, kind)
            lines.append([name, words, *(Cell.of(found[n], written) if n in found else ABSENT for n in lengths)])
    return Table("copying", wording("copying"), ["scheme", "loss of", *map(str, lengths)], lines, words=2)


def completions(results: Results) -> Table:
    """How the genomes of each plan go on."""
    lines = []
    for (plan, length), rows in results["completion"].groupby(["plan", "length"], sort=False):
        for name, own in by_scheme(rows):
            correlations = [*own.gc_correlation.dropna()]
            gc = Cell.of(over_seeds(correlations), partial(decimals, digits=2)) if correlations else ABSENT
            identity = Cell.of(over_seeds([*(100 * own.identity)]), "{:.1f}".format)
            title = f"{plan}: {own.pieces.iloc[0]} pieces of {length} tokens"
            lines.append([title, name, identity, f"{100 * own.chance.iloc[0]:.1f}", gc])
    header = ["plan and texts", "scheme", "identity, %", "by chance, %", "r of GC"]
    return Table("completions", wording("completions"), header, lines, words=2)
