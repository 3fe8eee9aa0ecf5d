"""Tables of a study: retrieval, losses, priors, and the training of its models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attention_priors._io import number, write_bytes
from attention_priors.lab.intervals import cut_to_share, over_seeds, wilson_interval
from attention_priors.lab.report import estimates
from attention_priors.lab.report.comparisons import comparisons, trials
from attention_priors.lab.report.differences import best_schemes, differences, panels_side_by_side
from attention_priors.lab.report.estimates import KINDS, NEAR, STRONG, by_scheme, over, own_passkeys
from attention_priors.lab.report.table import ABSENT, Cell, Table
from attention_priors.lab.report.wording import decimals, duration, listing, multiple, percent, quantity, wording
from attention_priors.lab.results import Frame, Results

_POSITIONS = 6
"""Largest number of position ranges in a table; figures show all."""

_HEADINGS = {
    "alpha": "scale α, tokens", "beta": "shape β", "mu": "location μ, tokens", "theta_alpha": "θα",
}  # fmt: skip
"""Headings of the parameters of a Generalized Gaussian."""

_tenths = "{:.1f}".format
_thousandths = "{:.3f}".format


def tables(results: Results, names: Collection[str] | None = None) -> dict[str, Table]:
    """Return the tables of these names, by default all tables; tables without data have no lines."""
    makers = {
        "accuracy": accuracy, "passkey": passkey, "passkey_by_seed": passkey_by_seed,
        "margins_and_reach": margins_and_reach, "perplexity": perplexity, "copying": copying, "retrieval": retrieval,
        "answer_tokens": answer_tokens, "losses": plan_losses, "completions": completions,
        "needle_weights": needle_weights, "timing": timing, "best": best_schemes, "panels": panels_side_by_side,
        "differences": differences, "axes": axes, "best_trials": best_trials, "extension": extension,
        "heads": head_counts, "prior_mass": prior_mass, "prior_reach": prior_reach, "training": training, "runs": runs,
    }  # fmt: skip
    return {name: make(results) for name, make in makers.items() if names is None or name in names}


def write_tables(made: dict[str, Table], folder: Path) -> list[Path]:
    """Write tables as Markdown and LaTeX, and remove the files of tables without data.

    Args:
        made: Tables from :func:`tables`.
        folder: Target folder; created if needed.

    Returns:
        Paths of the files.
    """
    written = []
    for name, table in made.items():
        for ending, form in (("md", table.markdown), ("tex", table.latex)):
            path = folder / f"{name}.{ending}"
            if table.lines:
                write_bytes(path, form().encode())
                written.append(path)
            else:
                path.unlink(missing_ok=True)
    return written


def columns_of(values: Iterable[Any]) -> dict[Any, str]:
    """Return the column heading of each length or size, in rising order."""
    return {value: str(value) for value in sorted({*values})}


def percents(found: dict[Any, Any]) -> dict[Any, Cell]:
    """Format shares in percent with one decimal, with intervals clipped to 0–100."""
    return {key: Cell.of([100 * end for end in cut_to_share(one)], _tenths) for key, one in found.items()}


# ---- retrieval, and attention to the answer


def share_lines(rows: Frame) -> dict[str, list[tuple[str, dict[int, Cell]]]]:
    """Return each scheme's shares by length: over all texts and, with several seeds, over seeds."""
    pooled = estimates.shares_by_length(rows)
    lines: dict[str, list[tuple[str, dict[int, Cell]]]] = {}
    for name, own in by_scheme(estimates.shares(rows, "scheme", "length", "seed")):
        cells = [*pooled[pooled.scheme == name].itertuples()]
        lines[name] = [("texts", {cell.length: _share(cell) for cell in cells})]
        if (seeds := own.seed.nunique()) > 1:
            found = over(own, "length", "share")
            of_seeds = {cell.length: Cell.of_share(found[cell.length], _mark(cell)) for cell in cells}
            lines[name].append((f"{seeds} seeds", of_seeds))
    return lines


def _mark(cell: Any) -> str:
    return "" if cell.complete else "†"


def _share(cell: Any, best: bool = False) -> Cell:
    """Format a row of :func:`~attention_priors.lab.report.estimates.shares_by_length`."""
    return Cell.of_share((cell.share, cell.low, cell.high), _mark(cell), best)


def passkey(results: Results) -> Table:
    """Return the retrieved shares of the recipe's own pass keys, by length."""
    rows = own_passkeys(results)
    lines = [([name, kind], cells) for name, own in share_lines(rows).items() for kind, cells in own]
    return Table.across("passkey", wording("passkey"), ["scheme", "over"], columns_of(rows.length), lines)


def passkey_by_seed(results: Results) -> Table:
    """Return each seed's retrieved shares of the recipe's own pass keys, by length; without lines for a single seed."""
    rows = own_passkeys(results)
    found = estimates.shares(rows, "scheme", "seed", "length").groupby(["scheme", "seed"], observed=True)
    lines = [
        ([str(name), str(seed)], {cell.length: percent(cell.share) for cell in own.itertuples()})
        for (name, seed), own in found
    ]
    about, columns = wording("passkey_by_seed"), columns_of(rows.length)
    return Table.across("passkey_by_seed", about, ["scheme", "seed"], columns, lines if rows.seed.nunique() > 1 else [])


def margins_and_reach(results: Results) -> Table:
    """Return the margin of the recipe's own pass keys by length, beside the number of far-sighted heads per layer."""
    rows, reach = own_passkeys(results).dropna(subset="margin"), results["prior_reach"]
    longest, layers = rows.length.max(), sorted({*reach.layer})
    seen = [{int(length): half for length, half in each.items()} for each in reach.half]
    far = [estimates.sight(each, longest) == "far-sighted" if longest in each else math.nan for each in seen]
    counts = reach.assign(far=far).groupby(["scheme", "seed", "layer"], observed=True).far.sum(min_count=1)
    means, lines = counts.groupby(["scheme", "layer"], observed=True).mean(), []
    for name, own in by_scheme(rows):
        found = [means.get((name, layer), math.nan) for layer in layers]
        heads_of_layers = [ABSENT if math.isnan(mean) else f"{round(mean, 1):g}" for mean in found]
        margins = own.groupby(["seed", "length"]).margin.mean().reset_index()
        cells = {length: Cell.of(each, _tenths) for length, each in over(margins, "length", "margin").items()}
        lines.append(([name, *heads_of_layers], cells))
    first = ["scheme", *(f"layer {layer}" for layer in layers)]
    about = wording("margins_and_reach", longest=longest)
    return Table.across("margins_and_reach", about, first, columns_of(rows.length), lines, words=1)


def passkey_overview(results: Results) -> Table:
    """Return one line of passkey shares per scheme, with the best in bold, for a terminal or the top of a page."""
    cells, trained = estimates.shares_by_length(own_passkeys(results)), results.context_lengths
    best, columns, lines = estimates.best_shares(cells), columns_of(cells.length), []
    for name in results.names if len(cells) else ():
        own = cells[cells.scheme == name].itertuples()
        lines.append(([name], {c.length: _share(c, bool(c.complete and c.share == best.get(c.length))) for c in own}))
    if one := len(trained) == 1:
        columns = {n: f"{n}\n{multiple(n / trained[0])}×" for n in columns}
    words = wording("passkey_overview", trained=one, complete=cells.complete.all())
    return Table.across("passkey_overview", words, ["scheme"], columns, lines)


def retrieval(results: Results) -> Table:
    """Return the scores of each plan's retrieval tasks, by length."""
    rows = results["retrieval"].dropna(subset="plan")
    lines = [
        ([title, name, kind], cells)
        for title, task in estimates.by_task(rows)
        for name, own in share_lines(task).items()
        for kind, cells in own
    ]
    first = ["plan and task", "scheme", "over"]
    return Table.across("retrieval", wording("retrieval"), first, columns_of(rows.length), lines)


def answer_tokens(results: Results) -> Table:
    """Return which tokens of the answers are right, for tasks with one right answer."""
    rows = results["retrieval"].dropna(subset="token_accuracy")
    rows = rows.assign(tokens_right=[right if isinstance(right, list) else [] for right in rows.tokens_right])
    places = range(1, 1 + max(map(len, rows.tokens_right), default=0))
    lines = [
        ([f"{title}, answer's tokens", name, str(length)], _tokens(here))
        for title, task in estimates.by_task(rows)
        for name, own in by_scheme(task)
        for length, here in own.groupby("length")
    ]
    margins = bool(rows.margin.notna().any())
    columns = {"all": "all"} | columns_of(places) | ({"margin": "margin"} if margins else {})
    first, about = ["plan and task", "scheme", "length"], wording("answer_tokens", margins=margins)
    return Table.across("answer_tokens", about, first, columns, lines, words=2)


def _tokens(rows: Frame) -> dict[Any, Cell]:
    """Return the cells of one scheme at one length: all answer tokens together, and each place."""
    seeds = [np.average(own.token_accuracy, weights=own.trials) for _, own in rows.groupby("seed")]
    cells: dict[Any, Cell] = {"all": Cell.of_share(over_seeds(seeds))}
    trials = int(rows.trials.sum())
    # Places that some texts lack are left out.
    for place, counts in enumerate(zip(*rows.tokens_right, strict=False), start=1):
        cells[place] = Cell.of_share((sum(counts) / trials, *wilson_interval(sum(counts), trials)))
    if rows.margin.notna().all():
        margins = [np.average(own.margin, weights=own.trials) for _, own in rows.groupby("seed")]
        cells["margin"] = Cell.of(over_seeds(margins), "{:.1f}".format)
    return cells


def needle_weights(results: Results) -> Table:
    """Return the layer of the head that attends to the pass key most, and its attention by length."""
    rows = results["needle_weight"]
    lines = []
    for plan, of_plan in rows.groupby("plan", sort=False):
        for name, own in by_scheme(estimates.leading_heads(of_plan)):
            layers = ", ".join(map(str, own.groupby("seed").layer.first()))
            lines.append(([str(plan), name, layers], percents(over(own, "length", "weight"))))
    about = wording("needle_weights")
    return Table.across("needle_weights", about, ["plan", "scheme", "layer"], columns_of(rows.length), lines)


# ---- losses


class Losses:
    """Losses by position, formatted in their measure.

    Attributes:
        rows: Perplexity rows.
        measure: Measure of the losses.
        beyond: Ranges of positions beyond the shortest training length. At most six, evenly chosen.
        straddles: Whether a range is neither within the shortest training length nor beyond it.
        documents: Number of documents, such as "7", or "4 or 7" if models read different numbers. Empty if unknown.
    """

    def __init__(self, results: Results, rows: Frame) -> None:
        self._results, self.rows, self.measure = results, rows[rows.position.notna()], estimates.loss_measure(results)
        shortest = min((results.context_length(name) for name in estimates.schemes_in(self.rows)), default=0)
        positions = sorted(self.rows.position.unique())
        beyond = [position for position in positions if estimates.first_of_range(position) >= shortest]
        places = np.linspace(0, len(beyond) - 1, min(len(beyond), _POSITIONS)).round().astype(int)
        self.beyond = [beyond[place] for place in places]
        self.straddles = any(estimates.first_of_range(p) < shortest <= estimates.end_of_range(p) for p in positions)
        self._ranges = dict([*self.rows.groupby(["scheme", "position"], observed=True)])
        self.documents = " or ".join(f"{count:.0f}" for count in sorted(self.rows.documents.dropna().unique()))

    def at(self, scheme: str, position: float) -> Cell:
        """Format a scheme's loss in one range of positions."""
        return self.cell(self._ranges.get((scheme, position), self.rows[:0]))

    def within_training(self, scheme: str) -> Cell:
        """Format a scheme's loss over the ranges of positions that end within its training length."""
        return self.cell(self.rows_within_training(scheme))

    def rows_within_training(self, scheme: str) -> Frame:
        """Return a scheme's rows of the ranges of positions that end within its training length."""
        rows, length = self.rows[self.rows.scheme == scheme], self._results.context_length(scheme)
        return rows[[estimates.end_of_range(position) < length for position in rows.position]]

    def cell(self, rows: Frame) -> Cell:
        """Format the loss of some rows of a scheme."""
        losses = estimates.mean_losses(rows)
        return Cell.of(self.measure.estimate(losses), self.measure.written) if losses else Cell(ABSENT)


def own_losses(results: Results) -> Losses:
    """Return the losses on the recipe's own texts, without those of named plans."""
    return Losses(results, results["perplexity"][results["perplexity"].plan.isna()])


def perplexity(results: Results) -> Table:
    """Return losses within the training length and beyond."""
    losses = own_losses(results)
    lines = [
        [name, str(own.seed.nunique()), losses.within_training(name), *(losses.at(name, p) for p in losses.beyond)]
        for name, own in by_scheme(losses.rows)
    ]
    words = wording("perplexity", measure=losses.measure, straddles=losses.straddles, documents=losses.documents)
    header = ["scheme", "seeds", "within\ntraining", *(f"{position:.0f}" for position in losses.beyond)]
    return Table("perplexity", words, header, lines)


def plan_losses(results: Results) -> Table:
    """Return losses on the texts of each plan."""
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
    """Return losses in the copy-mixture task, by row length."""
    rows, written = results["copying"], partial(decimals, digits=3)
    columns, lines = columns_of(rows.length), []
    for kind, words in KINDS.items():
        own = rows[rows.kind == kind]
        expected = dict(zip(own.length, own.expected_nll.map(_thousandths), strict=True))
        if columns and expected.keys() == columns.keys():
            lines.append((["the optimum", words], expected))
    for name, own in by_scheme(rows):
        for kind, words in KINDS.items():
            found = estimates.excess_losses(own, kind)
            lines.append(([name, words], {length: Cell.of(one, written) for length, one in found.items()}))
    return Table.across("copying", wording("copying"), ["scheme", "loss of"], columns, lines)


def completions(results: Results) -> Table:
    """Return the scores of each plan's genome continuations."""
    lines = []
    for (plan, length), rows in results["completion"].groupby(["plan", "length"], sort=False):
        for name, own in by_scheme(rows):
            correlations = [*own.gc_correlation.dropna()]
            gc = Cell.of(over_seeds(correlations), partial(decimals, digits=2)) if correlations else ABSENT
            identity = Cell.of(over_seeds([*(100 * own.identity)]), _tenths)
            title = f"{plan}: {own.pieces.iloc[0]} pieces of {length} tokens"
            lines.append([title, name, identity, _tenths(100 * own.chance.iloc[0]), gc])
    header = ["plan and texts", "scheme", "identity, %", "by chance, %", "r of GC"]
    return Table("completions", wording("completions"), header, lines, words=2)


# ---- learned priors of the heads


def heads(rows: Frame) -> Table:
    """Return every head of one scheme.

    Args:
        rows: Prior rows of the scheme, at least one.
    """
    rows = rows.sort_values(["seed", "layer", "head"])
    kinds = sorted(rows.prior.unique())
    roles = [estimates.role(row.prior, row.parameters) for row in rows.itertuples()]
    words = f"{len(rows)} heads, {listing([kind.replace('_', ' ') for kind in kinds])}"
    shown = rows[["seed", "layer", "head"]].astype(str)
    if len(kinds) > 1:
        shown["prior"] = rows.prior.str.replace("_", " ")
    if any(roles):
        called = estimates.ROLES
        shown["role"] = [called.get(found or "", "") for found in roles]
        words += f": {listing([f'{roles.count(name)} {word}' for name, word in called.items() if name in roles])}"
    # Parameters of other priors, such as alpha, have other meanings.
    names = {name: name for own in rows.parameters for name in own}
    for name, heading in (_HEADINGS if kinds == [estimates.GAUSSIAN] else names).items():
        shown[heading] = [_value(own.get(name)) for own in rows.parameters]
    return Table("heads_of_scheme", words, [*shown], shown.to_numpy().tolist(), words=0)


def _value(value: float | list[float] | None) -> str:
    return f"{len(value)} numbers" if isinstance(value, list) else quantity(value)


def head_counts(results: Results) -> Table:
    """Return the number of local and retrieval heads of each scheme."""
    gaussian, scales = estimates.gaussian_heads(results["prior"]), results["logit_scale"].dropna(subset="s")
    lines = []
    for name in results.names:
        beta, s = gaussian.beta[gaussian.scheme == name], scales.s[scales.scheme == name]
        if len(beta) or len(s):
            clusters = (beta > 0, (beta >= STRONG) & (beta <= 0), beta < STRONG)
            spread = Cell.of((s.mean(), s.min(), s.max()), quantity)
            lines.append([name, *(str(cluster.sum()) if len(beta) else ABSENT for cluster in clusters), spread])
    return Table("heads", wording("heads"), ["scheme", "local", "retrieval", "strong\nretrieval", "s"], lines)


def prior_mass(results: Results) -> Table:
    """Return the mass of the prior alone on selected keys, by layer."""
    rows, places = results["prior_mass"], ["first", "previous", "itself"]
    lines = []
    for name, own in by_scheme(rows):
        largest = own.groupby(["layer", "seed"])[places].max()
        parts = [*largest.groupby("layer")]
        if len(parts) > 1:  # different seeds may give a role to different layers
            parts.append(("any", largest.groupby("seed").max()))
        for layer, part in parts:
            cells = [Cell.of_share(over_seeds([*part[place]])) for place in places]
            lines.append([name, str(layer), str(own.seed.nunique()), *cells])
    # Older results lack this column, and their masses exclude the scale.
    words = wording("prior_mass", scaled=rows.scaled.eq(True).any())
    return Table("prior_mass", words, ["scheme", "layer", "seeds", *places], lines, words=2)


def prior_reach(results: Results) -> Table:
    """Return the number of near-sighted and far-sighted heads, and how many remain so in longer texts."""
    found, lines = estimates.halves(results), []
    for name, own in found.items():
        # Runs measured under a recipe with shorter texts lack the longer lengths.
        measured = set.intersection(*map(set, own))
        for called in ("near-sighted", "far-sighted"):
            trained = [half for half in own if estimates.sight(half) == called]
            counts = {n: str(sum(estimates.sight(half, n) == called for half in trained)) for n in measured}
            lines.append(([name, called, str(len(own))], counts))
    columns = columns_of(length for own in found.values() for half in own for length in half)
    about, first = wording("prior_reach", near=NEAR), ["scheme", "heads", "of"]
    return Table.across("prior_reach", about, first, columns, lines, words=2)


# ---- training, cost, axes and extensions


def training(results: Results) -> Table:
    """Return the training of each scheme's models."""
    of_images, lines = results.of_images, []
    for entry in results.schemes:
        name, runs = entry["scheme"], results["run"][results["run"].scheme == entry["scheme"]]
        if not len(runs):
            continue
        minutes, loss = runs.train_seconds.mean(skipna=False) / 60, over_seeds([*runs.final_loss])
        seeds, steps = (", ".join(map(str, sorted(runs[key].unique()))) for key in ("seed", "steps"))
        length = [] if of_images else [str(results.row_length(name))]
        size = [str(entry["parameters"]), str(entry["prior_parameters"])]
        spent = _tenths(minutes) if math.isfinite(minutes) else ABSENT
        final = _thousandths(loss.mean) if of_images else Cell.of(loss, _thousandths)
        lines.append([name, entry["description"], seeds, *length, steps, *size, final, spent])
    header = ["scheme", "made by", "seed numbers", "tokens", "steps", "parameters", "of prior\nand scale"]
    header += ["loss", "minutes"]
    if of_images:
        header = ["scheme", "positions", "seed numbers", "steps", "parameters", "of priors", "loss", "minutes a run"]
    words = wording("training_of_images" if of_images else "training", study=results.study) if lines else ""
    return Table("training", words, header, lines, words=3)


def runs(results: Results) -> Table:
    """Return the final loss, times and stop of each run."""
    lines = []
    for row in results["run"].itertuples():
        times = duration(row.train_seconds), duration(row.evaluate_seconds)
        why = row.stopped if isinstance(row.stopped, str) else ABSENT
        lines.append([row.scheme, str(row.seed), str(row.steps), quantity(row.final_loss), *times, why])
    header = ["run", "seed", "steps", "final loss", "training", "evaluation", "stopped"]
    return Table("runs", wording("runs"), header, lines)


def timing(results: Results) -> Table:
    """Return time and memory of each kind of pass, by length."""
    timed, lines = results["timing"], []
    for kind, of_kind in timed.groupby("pass", sort=False):
        for name, rows in by_scheme(of_kind):
            cells: dict[Any, Cell | str] = {}
            for (plan, length), own in rows.groupby(["plan", "length"], sort=False):
                # Seeds have equally many passes, so the total variance is that within seeds plus that between seeds.
                variance = (own.std_ms**2).mean() + own.mean_ms.var(ddof=0)
                spread = "" if math.isnan(variance) else f"± {quantity(math.sqrt(variance))}"
                cells[plan, length, "ms"] = Cell(quantity(own.median_ms.mean()), spread)
                memory = own.peak_bytes.max() / 2**20
                cells[plan, length, "MiB"] = Cell.of((memory, math.nan, math.nan), "{:.0f}".format)
            lines.append(([kind, name], cells))
    places = [*timed.groupby(["plan", "length"], sort=False).groups]
    repeated = len({length for _, length in places}) < len(places)
    columns = {
        (plan, length, unit): f"{plan}: {length} tokens,\n{unit}".removeprefix("" if repeated else f"{plan}: ")
        for plan, length in places
        for unit in ("ms", "MiB")
    }
    return Table.across("timing", wording("timing"), ["pass", "scheme"], columns, lines)


def axes(results: Results) -> Table:
    """Return the results of schemes that differ along one axis alone."""
    rows, losses, lines = own_passkeys(results), own_losses(results), []
    shares, lengths, measure = share_lines(rows), columns_of(rows.length), losses.measure
    farthest = _farthest(losses)
    within = {"within": f"{measure.name}\nwithin training"} if len(losses.rows) else {}
    for comparison in comparisons(results):
        for name, value in comparison.values.items():
            tail: dict[Any, Cell | str] = {key: losses.within_training(name) for key in within}
            tail |= {position: losses.at(name, position) for position in farthest}
            for kind, cells in shares.get(name, [("", {})]):
                lines.append(([comparison.title, value, kind], cells | tail))
                tail = dict.fromkeys(tail, "")
    words = wording("axes", lengths=[*lengths], has_losses=bool(within), measure=measure)
    columns = lengths | within | farthest
    return Table.across("axes", words, ["axis", "value", "over"], columns, lines if columns else [])


def best_trials(results: Results) -> Table:
    """Return each scheme's best trial in a sweep without a base.

    The best trial has the most pass keys, then the lowest loss in training. In the copy-mixture task, it has the lowest
    loss at the shortest length.
    """
    copied, losses, lines = results["copying"], own_losses(results), []
    shortest = int(copied.length.min()) if len(copied) else 0
    excess = {name: estimates.excess_losses(own, "all")[shortest] for name, own in by_scheme(copied)}
    rows = own_passkeys(results)
    # A length that was not reached counts as 0.
    by_length = estimates.shares(rows, "scheme", "length")
    shares = by_length.groupby("scheme", observed=True).share.sum() / max(1, rows.length.nunique())

    def judged(name: str) -> tuple[tuple[float, ...], list[Cell | str]]:
        """Return a trial's rank, lowest first, and its cells."""
        if excess:
            return excess[name][:1], [Cell.of(excess[name], partial(decimals, digits=3))]
        of_seeds = estimates.mean_losses(losses.rows_within_training(name))
        loss = sum(of_seeds) / len(of_seeds) if of_seeds else math.inf
        return (-shares[name], loss), [percent(shares[name]), losses.within_training(name)]

    for (scheme, scaled), settings in trials(results).items():
        if finished := {name: judged(name) for name in settings if name in (excess or shares)}:
            best = min(finished, key=lambda name: finished[name][0])
            words = [scheme, "with" if scaled else "without", settings[best], str(len(finished))]
            lines.append([*words, *finished[best][1]])
    headings = ["loss above\nthe optimum"] if excess else ["share, %", f"{losses.measure.name}\nwithin training"]
    header = ["scheme", "logit\nscale", "best setting", "trials", *headings]
    about = wording("best_trials", measure=losses.measure, shortest=shortest)
    return Table("best_trials", about, header, lines, words=3)


def _farthest(losses: Losses) -> dict[Any, str]:
    """Return the column of the farthest range of positions, if any."""
    return {position: f"{losses.measure.name}\nat {position:.0f}" for position in losses.beyond[-1:]}


def extension(results: Results) -> Table:
    """Return losses and shares before and after each context extension."""
    rows, losses = own_passkeys(results), own_losses(results)
    shares, lengths, farthest = share_lines(rows), columns_of(rows.length), _farthest(losses)
    entries = {entry["scheme"]: entry for entry in results.schemes}
    # Group the extensions of one model to the same length.
    together: dict[tuple[str, int], dict[str, Frame]] = defaultdict(dict)
    for name, made in by_scheme(results["extension"]):
        together[entries[name]["extended_from"], made["to"].iloc[0]][name] = made
    lines = []
    for (first, reached), ways in together.items():
        # Include every seed with at least one extension.
        before = pd.concat([*ways.values()]).drop_duplicates("seed", keep="last")
        trained = before["from"].iloc[0]
        places = [first, f"{trained} → {reached}", *[""] * len(ways)]
        for place, name, made in zip(places, (first, *ways), (before, *ways.values()), strict=False):
            when, way, steps = "before", "before", ABSENT
            if name != first:
                when, way, steps = "after", entries[name]["axes"]["extension"], str(made.steps.iloc[0])
            found = [over_seeds([number(one[when][str(n)]) for one in made.loss]) for n in (trained, reached)]
            cells = dict(shares[name])["texts"] if name in shares else {}
            cells |= {position: losses.at(name, position) for position in farthest}
            lines.append(([place, way, steps, *(Cell.of(one, _thousandths) for one in found)], cells))
    words = wording("extension", lengths=[*lengths], has_losses=bool(farthest), measure=losses.measure)
    header = ["scheme", "extension", "steps", "loss at\nfirst length", "loss at\nsecond length"]
    return Table.across("extension", words, header, lengths | farthest, lines, words=2)


def accuracy(results: Results) -> Table:
    """Return the share of correctly classified images, by size."""
    rows = results["accuracy"]
    rows = rows.assign(share=rows.correct / rows.trials)
    lines = [([name], percents(over(own, "size", "share"))) for name, own in by_scheme(rows)]
    trained = results.study["recipe"]["model"]["image_size"] if lines else 1
    columns = {size: f"{size}\n{multiple(size / trained)}×" for size in columns_of(rows["size"])}
    return Table.across("accuracy", wording("accuracy", trained=trained), ["scheme"], columns, lines)
