"""The tables of a comparison, with intervals over texts and over seeds."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_priors.files import write_bytes
from attention_priors.intervals import Estimate, over_seeds
from attention_priors.report.axes import comparisons
from attention_priors.report.copying import KINDS, excess_losses
from attention_priors.report.drawing import STRONG_RETRIEVAL, gaussian_heads, logit_scales
from attention_priors.report.grids import Cell, Grid, Line, latex, markdown
from attention_priors.report.needle_weights import looking_heads, plans_with_weights
from attention_priors.report.numbers import percent, quantity
from attention_priors.report.plans import loss_views, retrieval_views
from attention_priors.report.results import (
    Count,
    Results,
    Row,
    check_results,
    count_passkeys,
    distinct,
    number,
    perplexity_of,
    rows,
    scheme_names,
    schemes_with,
    training_length,
)
from attention_priors.report.tables import PasskeyCell, passkey_table

ABSENT = "–"

_POSITIONS = 6
"""Ranges of positions in a table; the figures have all."""

PASSKEYS = "Pass keys retrieved, % of texts, by context length in tokens. "
SHARES = (
    f"{PASSKEYS}Texts: of the texts of all seeds together, with the "
    "95 % Wilson interval, which is for the chance in the texts. Seeds: the mean of the seeds' shares, with Student's "
    "95 % interval, which is for models trained with other seeds; where all seeds agree it is a point, and tells "
    "nothing of the chance in the texts. –: not evaluated. †: without the seeds that had stopped at a shorter length, "
    "which flatters the scheme."
)
PERPLEXITIES = (
    "e to the mean loss over seeds, with e to the ends of Student's 95 % interval of that mean (where there are two "
    "seeds at least)."
)


def result_grids(results: Results) -> Iterator[Grid]:
    """Every table that the results have data for."""
    check_results(results)
    makers = (
        _passkey, _perplexity, _copying, _retrieval, _losses, _completions, _needle_weights, _timing, _axes,
        _extension, _heads, _prior_mass, _training,
    )  # fmt: skip
    for make in makers:
        grid = make(results)
        if grid.groups:
            yield grid


def write_tables(results: Results, folder: Path) -> list[Path]:
    """Write every table that the results have data for, as Markdown and as LaTeX.

    Args:
        results: A results dictionary.
        folder: Where to; made if it is not there.

    Returns:
        The files.

    Raises:
        ValueError: ``results`` is of an unknown format, or one of its rows names an unknown scheme.
    """
    written = []
    for grid in result_grids(results):
        for ending, content in (("md", markdown(grid)), ("tex", latex(grid))):
            path = Path(folder) / f"{grid.stem}.{ending}"
            write_bytes(path, content.encode())
            written.append(path)
    return written


# ---- the tables


def _passkey(results: Results) -> Grid:
    shares = _Shares(results)
    groups = [
        [[name if first else "", *line] for first, line in _with_first(shares.lines(name))]
        for name in schemes_with(results, "passkey")
    ]
    return Grid("passkey", SHARES, ["scheme", "over", *map(str, shares.lengths)], groups, words=2)


def _perplexity(results: Results) -> Grid:
    losses = _Losses(results)
    lines = [
        [name, str(losses.seeds(name)), losses.within_training(name), *(losses.at(name, p) for p in losses.beyond)]
        for name in losses.schemes
    ]
    caption = (
        f"Perplexity per token: {PERPLEXITIES} Within training: over the ranges of positions that end within the "
        "training length. The other columns are ranges of positions beyond it (of many, some), named by their middle, "
        "in tokens."
    )
    header = ["scheme", "seeds", "within\ntraining", *(f"{position:.0f}" for position in losses.beyond)]
    return Grid("perplexity", caption, header, [lines] if lines else [], words=1)


def _copying(results: Results) -> Grid:
    lengths = distinct(rows(results, "copying"), "length")
    groups: list[list[Line]] = []
    if lengths:
        expected = {(row["kind"], row["length"]): number(row["expected_nll"]) for row in rows(results, "copying")}
        groups.append(
            [
                ["the optimum" if first else "", words, *(f"{expected[kind, length]:.3f}" for length in lengths)]
                for first, (kind, words) in _with_first(
                    [item for item in KINDS.items() if all((item[0], length) in expected for length in lengths)]
                )
            ]
        )
    for name in schemes_with(results, "copying"):
        found = [(words, excess_losses(results, name, kind)) for kind, words in KINDS.items()]
        groups.append(
            [
                [
                    name if first else "",
                    words,
                    *_at_lengths(losses, lengths, _signed),
                ]
                for first, (words, losses) in _with_first(found)
            ]
        )
    caption = (
        "The copy-mixture task by length of the row in tokens. The optimum: the expected loss of the true "
        "distribution, nats per token. Schemes: loss above that of the true distribution on the same tokens, nats per "
        "token; mean over seeds with Student's 95 % interval (where there are two seeds at least). Of all tokens it "
        "cannot be below 0 but by chance; of one kind it can, at the cost of the others."
    )
    return Grid("copying", caption, ["scheme", "loss of", *map(str, lengths)], groups, words=2)


def _retrieval(results: Results) -> Grid:
    views = list(retrieval_views(results))
    shares = [_Shares(view.results) for view in views]
    lengths = sorted({length for one in shares for length in one.lengths})
    groups = []
    for view, one in zip(views, shares, strict=True):
        group: list[Line] = []
        for name in schemes_with(view.results, "passkey"):
            for first, (over, *cells) in _with_first(one.lines(name)):
                at = dict(zip(one.lengths, cells, strict=True))
                row = [name if first else "", over, *(at.get(length, Cell(ABSENT)) for length in lengths)]
                group.append(["" if group else view.title, *row])
        groups.append(group)
    caption = f"Score in each task of each plan, in percent. {SHARES.removeprefix(PASSKEYS)}"
    return Grid("retrieval", caption, ["plan and task", "scheme", "over", *map(str, lengths)], groups, words=3)


def _losses(results: Results) -> Grid:
    groups = []
    for view in loss_views(results):
        losses = _Losses(view.results)
        lines: list[Line] = [
            [name, str(losses.seeds(name)), losses.within_training(name), losses.everywhere(name)]
            for name in losses.schemes
        ]
        groups.append([["" if place else view.title, *line] for place, line in enumerate(lines)])
    caption = (
        f"Perplexity per token of each plan: {PERPLEXITIES} Within training: over the ranges of positions that end "
        "within the training length."
    )
    header = ["plan, task and texts", "scheme", "seeds", "within\ntraining", "all\npositions"]
    return Grid("losses", caption, header, groups, words=2)


def _completions(results: Results) -> Grid:
    groups = []
    places = dict.fromkeys((row["plan"], row["length"]) for row in rows(results, "completions"))
    for plan, length in places:
        group: list[Line] = []
        for name in schemes_with(results, "completions"):
            found = [
                row for row in rows(results, "completions", name) if (row["plan"], row["length"]) == (plan, length)
            ]
            if found:
                title = "" if group else f"{plan}: {found[0]['pieces']} pieces of {length} tokens"
                correlations = [row["gc_correlation"] for row in found if row["gc_correlation"] is not None]
                group.append(
                    [
                        title,
                        name,
                        _estimate(over_seeds([100 * row["identity"] for row in found]), "{:.1f}".format),
                        f"{100 * found[0]['chance']:.1f}",
                        _estimate(over_seeds(correlations), "{:.2f}".format) if correlations else ABSENT,
                    ]
                )
        groups.append(group)
    caption = (
        "How genomes go on, in 200 bases drawn from each model. Identity: bases that are the true ones. By chance: "
        "those of bases drawn one by one with the truth's own frequencies. GC: Pearson's r between the share of G and "
        "C in windows of 25 bases and the true one, the mean over continuations. Mean over seeds with Student's 95 % "
        "interval (where there are two seeds at least)."
    )
    header = ["plan and texts", "scheme", "identity, %", "by chance, %", "r of GC"]
    return Grid("completions", caption, header, groups, words=2)


def _needle_weights(results: Results) -> Grid:
    lengths = distinct(rows(results, "needle_weights"), "length")
    groups = []
    for plan in plans_with_weights(results):
        group: list[Line] = []
        for name in schemes_with(results, "needle_weights"):
            found = looking_heads(results, plan, name)
            if found:
                shares = {length: Estimate(*(100 * value for value in one)) for length, one in found.items()}
                group.append(["" if group else plan, name, *_at_lengths(shares, lengths, "{:.1f}".format)])
        groups.append(group)
    caption = (
        "Attention on the pass key when it is asked for, %: the weight that the question's last token gives to the "
        "sentences with the key, of the head that gives most at the shortest length, by length in tokens; mean over "
        "texts. Mean over seeds, in each its own head, with Student's 95 % interval (where there are two seeds at "
        "least)."
    )
    return Grid("needle_weights", caption, ["plan", "scheme", *map(str, lengths)], groups, words=2)


def _timing(results: Results) -> Grid:
    places = list(dict.fromkeys((row["plan"], row["length"], row["pass"]) for row in rows(results, "timing")))
    groups = []
    for plan, length, kind in places:
        group: list[Line] = []
        for name in schemes_with(results, "timing"):
            values = {"plan": plan, "length": length, "pass": kind}
            found = [row for row in rows(results, "timing", name) if values.items() <= row.items()]
            if found:
                group.append(["" if group else f"{plan}: {kind}, {length} tokens", name, *_durations(found)])
        groups.append(group)
    caption = (
        "What one pass of a single text takes. Median: of the passes, the mean over seeds, in milliseconds. Mean: of "
        "the passes, with their standard deviation, over all seeds. Memory: what one pass takes at its peak beside "
        "the model, the largest of the seeds, in MiB."
    )
    header = ["plan and pass", "scheme", "median, ms", "mean, ms", "memory, MiB"]
    return Grid("timing", caption, header, groups, words=2)


def _durations(found: Sequence[Row]) -> list[Cell]:
    """Cells of the same pass of several seeds."""
    median, mean = (statistics.fmean(row[key] for row in found) for key in ("median_ms", "mean_ms"))
    deviations = [row["std_ms"] for row in found if row["std_ms"] is not None]
    spread = f"± {quantity(statistics.fmean(deviations))}" if deviations else ""
    sizes = [row["peak_bytes"] for row in found if row["peak_bytes"] is not None]
    memory = f"{max(sizes) / 2**20:.0f}" if sizes else ABSENT
    return [Cell(quantity(median)), Cell(quantity(mean), spread), Cell(memory)]


def _axes(results: Results) -> Grid:
    shares, losses = _Shares(results), _Losses(results)
    farthest = losses.beyond[-1:]
    groups = []
    for comparison in comparisons(results):
        group: list[Line] = []
        for place, (name, value) in enumerate(comparison.values.items()):
            tail = [losses.within_training(name), *(losses.at(name, position) for position in farthest)]
            tail = tail if losses.schemes else []
            for first, line in _with_first(shares.lines(name) or [[""]]):
                title = comparison.title if first and place == 0 else ""
                group.append([title, value if first else "", *line, *(tail if first else [""] * len(tail))])
        groups.append(group)
    header = ["axis", "value", "over", *map(str, shares.lengths)]
    caption = "Schemes that differ along one axis alone."
    if shares.lengths:
        caption += f" {SHARES}"
    if losses.schemes:
        header += ["perplexity\nwithin training", *(f"perplexity\nat {position:.0f}" for position in farthest)]
        caption += (
            f" Perplexity per token: {PERPLEXITIES} Within training: over the ranges of positions that end within the "
            "training length."
        )
    return Grid("axes", caption, header, groups, words=3)


def _extension(results: Results) -> Grid:
    shares, losses = _Shares(results), _Losses(results)
    farthest = losses.beyond[-1:]
    # The ways in which one model was extended to one length stand together.
    together: dict[tuple[str, int], list[tuple[str, list[Row]]]] = defaultdict(list)
    for entry in results["schemes"]:
        if entry.get("extended_from"):
            made = rows(results, "extensions", entry["name"])
            together[entry["extended_from"], made[0]["to"]].append((entry["name"], made))
    groups = []
    for (first, reached), ways in together.items():
        # Of every seed with which the model was extended in some way.
        before = list({row["seed"]: row for _, made in ways for row in made}.values())
        lines = [(first, "before", ABSENT, before, "before")]
        lines += [(name, made[0]["axes"]["extension"], str(made[0]["steps"]), made, "after") for name, made in ways]
        places = [first, f"{before[0]['from']} → {reached}", *[""] * (len(ways) - 1)]
        group: list[Line] = []
        for place, (name, way, steps, made, when) in zip(places, lines, strict=True):
            losses_there = [
                _estimate(over_seeds([row["loss"][when][str(row[size])] for row in made]), "{:.3f}".format)
                for size in ("from", "to")
            ]
            group.append(
                [
                    place,
                    way,
                    steps,
                    *losses_there,
                    *(shares.pooled(name) if shares.lengths else []),
                    *(losses.at(name, position) for position in farthest),
                ]
            )
        groups.append(group)
    header = ["scheme", "extension", "steps", "loss at\nfirst length", "loss at\nsecond length"]
    header += map(str, shares.lengths)
    header += [f"perplexity\nat {position:.0f}" for position in farthest]
    caption = (
        "Before and after each extension of the context (second line of each scheme: from and to how many tokens). "
        "Steps: of further training; with 0, positions are changed and nothing is trained. Loss: nats per token on "
        "held-out rows of both lengths, mean over seeds with Student's 95 % interval."
    )
    if shares.lengths:
        caption += (
            " Numbered columns: pass keys retrieved, % of the texts of all seeds, by context length in tokens, with "
            "the 95 % Wilson interval. –: not evaluated. †: without the seeds that had stopped."
        )
    if farthest:
        caption += f" Perplexity per token: {PERPLEXITIES}"
    return Grid("extension", caption, header, groups, words=2)


def _heads(results: Results) -> Grid:
    lines = []
    scales = logit_scales(results, schemes_with(results, "logit_scales"))
    for name in scheme_names(results):
        shapes = [number(row["parameters"]["beta"]) for row in gaussian_heads(results, name)]
        found = scales.get(name, [])
        if not shapes and not found:
            continue
        clusters = (
            sum(shape > 0 for shape in shapes),
            sum(STRONG_RETRIEVAL <= shape <= 0 for shape in shapes),
            sum(shape < STRONG_RETRIEVAL for shape in shapes),
        )
        spread = (
            Cell(quantity(sum(found) / len(found)), _interval(min(found), max(found), quantity)) if found else ABSENT
        )
        lines.append([name, *(str(count) if shapes else ABSENT for count in clusters), spread])
    caption = (
        "Heads of Generalized Gaussian priors, of all layers and seeds, by their shape β: local β > 0, retrieval "
        f"{STRONG_RETRIEVAL} ≤ β ≤ 0, strong retrieval β < {STRONG_RETRIEVAL}. s: mean logit scale, and its range over "
        "heads (no interval)."
    ).replace("-0.6", "−0.6")
    return Grid(
        "heads", caption, ["scheme", "local", "retrieval", "strong\nretrieval", "s"], [lines] if lines else [], 1
    )


def _prior_mass(results: Results) -> Grid:
    groups = []
    places = ("first", "previous", "itself")
    for name in schemes_with(results, "prior_mass"):
        mine = rows(results, "prior_mass", name)
        seeds, layers = distinct(mine, "seed"), distinct(mine, "layer")
        # Which layer takes which part may be another one with each seed.
        lines = [(str(layer), [layer]) for layer in layers] + ([("any", layers)] if len(layers) > 1 else [])
        groups.append(
            [
                [
                    name if first else "",
                    words,
                    str(len(seeds)),
                    *(_share_over_seeds(_largest(mine, among, place)) for place in places),
                ]
                for first, (words, among) in _with_first(lines)
            ]
        )
    caption = (
        "Where priors look before anything is read: the weight that the prior alone gives to the first key, to the key "
        "before the query's own, and to that itself, %, mean over the queries of a text of the training length; of the "
        "head of each layer that gives most, and of any layer. Mean over seeds with Student's 95 % interval (where "
        "there are two seeds at least), cut to 0–100 %."
    )
    return Grid("prior_mass", caption, ["scheme", "layer", "seeds", *places], groups, words=2)


def _training(results: Results) -> Grid:
    lines = []
    for entry in results["schemes"]:
        runs = rows(results, "runs", entry["name"])
        if not runs:
            continue
        minutes = statistics.fmean(number(row["train_seconds"]) for row in runs) / 60
        loss = over_seeds([number(row["final_loss"]) for row in runs])
        seeds, steps = (", ".join(map(str, distinct(runs, key))) for key in ("seed", "steps"))
        lines.append(
            [
                entry["name"],
                entry["description"],
                seeds,
                str(training_length(results, entry["name"])),
                steps,
                str(entry["parameters"]),
                str(entry["prior_parameters"]),
                _estimate(loss, "{:.3f}".format) if math.isfinite(loss.mean) else ABSENT,
                f"{minutes:.1f}" if math.isfinite(minutes) else ABSENT,
            ]
        )
    header = ["scheme", "made by", "seeds", "tokens", "steps", "parameters", "of the\nprior", "loss", "minutes"]
    return Grid("training", _provenance(results) if lines else "", header, [lines] if lines else [], words=3)


def _provenance(results: Results) -> str:
    made, machine = (
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in results[what].items())
        for what in ("versions", "machine")
    )
    return (
        f"How the models of {results['recipe']['name']!r} were made. Loss: of training, the last that was recorded, "
        "mean over seeds with Student's 95 % interval (where there are two seeds at least); what it weighs is the "
        "recipe's. Minutes: wall time of a training, mean over seeds; others may have run beside it. Whole comparison: "
        f"{results['wall_seconds'] / 3600:.1f} hours, last collected {results['created'][:10]}. Versions: {made}. "
        f"Machine: {machine}."
    )


# ---- their numbers


class _Shares:
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
        cells = [self._cells.get((scheme, length)) for length in self.lengths]
        return [
            Cell(ABSENT)
            if cell is None
            else Cell(percent(cell.share) + ("" if cell.complete else "†"), _interval(cell.low, cell.high, _bound))
            for cell in cells
        ]

    def _over_seeds(self, counts: Mapping[tuple[Any, ...], Count], scheme: str, length: int) -> Cell:
        shares = [count.share for (size, _), count in counts.items() if size == length]
        if not shares:
            return Cell(ABSENT)
        return _share_over_seeds(shares, "" if self._cells[scheme, length].complete else "†")


class _Losses:
    """Perplexities, as cells."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self.schemes = schemes_with(results, "perplexity")
        shortest = min((training_length(results, scheme) for scheme in self.schemes), default=0)
        beyond = [row for row in rows(results, "perplexity") if row["position"] > shortest]
        self.beyond: list[float] = _spread(distinct(beyond, "position"))

    def seeds(self, scheme: str) -> int:
        return len(distinct(rows(self._results, "perplexity", scheme), "seed"))

    def at(self, scheme: str, position: float) -> Cell:
        return self._cell(row for row in rows(self._results, "perplexity", scheme) if row["position"] == position)

    def everywhere(self, scheme: str) -> Cell:
        return self._cell(rows(self._results, "perplexity", scheme))

    def within_training(self, scheme: str) -> Cell:
        # Ranges double, so that one ends at the square root of 2 times its middle.
        end = training_length(self._results, scheme) / math.sqrt(2)
        return self._cell(row for row in rows(self._results, "perplexity", scheme) if row["position"] <= end)

    def _cell(self, selected: Iterable[Row]) -> Cell:
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for row in selected:
            sums[row["seed"]][0] += number(row["nll"]) * row["tokens"]
            sums[row["seed"]][1] += row["tokens"]
        losses = [total / count for total, count in sums.values()]
        if not losses or not all(map(math.isfinite, losses)):
            return Cell(ABSENT)
        return _estimate(perplexity_of(over_seeds(losses)), _perplexity_text)


def _largest(selected: Iterable[Row], layers: Collection[int], key: str) -> list[float]:
    """The largest value of some layers' heads, for each seed."""
    found: dict[int, float] = {}
    for row in selected:
        if row["layer"] in layers:
            found[row["seed"]] = max(found.get(row["seed"], 0.0), row[key])
    return list(found.values())


def _share_over_seeds(shares: Sequence[float], mark: str = "") -> Cell:
    mean, low, high = over_seeds(shares)
    text = percent(mean) + mark
    return Cell(text) if math.isnan(low) else Cell(text, _interval(max(low, 0.0), min(high, 1.0), _bound))


def _spread(positions: list[float]) -> list[float]:
    """So many of them that a page is wide enough, evenly spaced, the first and the last among them."""
    count = min(len(positions), _POSITIONS)
    if count < 2:
        return positions
    return [positions[round(place * (len(positions) - 1) / (count - 1))] for place in range(count)]


def _estimate(value: Estimate, written: Callable[[float], str]) -> Cell:
    if math.isnan(value.low):
        return Cell(written(value.mean))
    return Cell(written(value.mean), _interval(value.low, value.high, written))


def _at_lengths(
    estimates: Mapping[int, Estimate], lengths: Iterable[int], written: Callable[[float], str]
) -> Iterator[Cell | str]:
    for length in lengths:
        yield _estimate(estimates[length], written) if length in estimates else ABSENT


def _interval(low: float, high: float, written: Callable[[float], str]) -> str:
    return f"[{written(low)}, {written(high)}]"


def _perplexity_text(value: float) -> str:
    return f"{value:.0f}" if 1000 <= value < 1e5 else quantity(value)


def _bound(share: float) -> str:
    return f"{100 * share:.0f}"


def _signed(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _with_first(lines: Iterable[Any]) -> Iterator[tuple[bool, Any]]:
    for index, line in enumerate(lines):
        yield index == 0, line
