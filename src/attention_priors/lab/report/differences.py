"""Which schemes differ by more than their seeds do: Tukey's test over all pairs of schemes."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from attention_priors.lab.intervals import CONFIDENCE, over_seeds, wilson_interval
from attention_priors.lab.report import estimates
from attention_priors.lab.report.comparisons import family, panels
from attention_priors.lab.report.estimates import by_scheme
from attention_priors.lab.report.table import Cell, Table
from attention_priors.lab.report.wording import wording
from attention_priors.lab.results import Frame, Results

MOST_NAMED = 6
"""Largest number of equally good schemes that a table names."""


@dataclass(frozen=True)
class Measure:
    """One number per seed of each scheme.

    Attributes:
        title: Name of the measure, which heads its column.
        values: Values by scheme, on a scale where seeds vary about equally. Larger is better.
        written: Mean and interval of each scheme, formatted.
        least_variance: Variance that chance in the texts alone would give; a lower one is due to chance.
    """

    title: str
    values: Mapping[str, Sequence[float]]
    written: Mapping[str, Cell]
    least_variance: float = 0.0

    @property
    def groups(self) -> dict[str, Sequence[float]]:
        """Values of the schemes with at least two seeds and no missing value."""
        return {name: own for name, own in self.values.items() if len(own) > 1 and np.isfinite(own).all()}

    def cell(self, name: str, best: Container[str]) -> Cell:
        """Return the mean of a scheme without its interval, marked if it is among the best."""
        return self.written[name]._replace(interval="", best=name in best)


def best_schemes(results: Results) -> Table:
    """Return the best schemes of each measure with an interval, and the number of others not shown to be worse."""
    found = _compared(results)
    lines: list[tuple[tuple[str, ...], dict[str, Cell | str]]] = []
    for trained, one, level in found:
        groups = one.groups
        best = one.written[max(groups, key=lambda name: np.mean(groups[name]))]
        alike = [name for name in groups if one.written[name].text == best.text]
        others = f"{len(level or groups) - len(alike)} of {len(groups) - len(alike)}"
        named = "; ".join(alike) if len(alike) <= MOST_NAMED else f"{len(alike)} schemes"
        lines.append(((*trained, one.title, named), {"mean": best, "others": others}))
    first = [*["trained at" for trained, *_ in found[:1] for _ in trained], "measure", "best schemes"]
    columns = {"mean": "mean and\n95 % interval", "others": "others not\nshown to be worse"}
    return Table.across("best", wording("best"), first, columns, lines)


def differences(results: Results) -> Table:
    """Return the mean of each measure for each scheme, with the best schemes marked.

    Only models of the same training length are compared.
    """
    found = _compared(results)
    columns = {one.title: one.title.replace(", ", ",\n") for _, one, _ in found}
    lines: dict[tuple[str, ...], dict[str, Cell]] = {}
    for trained, one, best in found:
        for name in one.groups:
            lines.setdefault((*trained, name), {})[one.title] = one.cell(name, best)
    first = [*["trained at" for trained, *_ in found[:1] for _ in trained], "scheme"]
    about = wording("differences", measures=len(found), trained=len(first) > 1)
    return Table.across("differences", about, first, columns, lines.items())


def panels_side_by_side(results: Results) -> Table:
    """Return pass keys at the longest length, and the loss within training, with the recipe's panels as columns.

    Panels with several schemes of one family, such as the extensions of one model, are left out.
    """
    shown = {one.title: one.values for one in panels(results) if len({*map(family, one.values)}) == len(one.values)}
    longest, loss = estimates.own_passkeys(results).length.max(), estimates.loss_measure(results).name
    titles = f"pass keys, {longest} tokens", f"{loss} within training"
    found = [(one, best) for _, one, best in _compared(results) if one.title in titles] if len(shown) > 1 else []
    lines: dict[tuple[str, str], dict[str, Cell]] = {}
    for one, best in found:
        for panel, name in ((panel, name) for panel, names in shown.items() for name in names):
            if name in one.written:
                lines.setdefault((one.title, family(name)), {})[panel] = one.cell(name, best)
    about, columns = wording("panels", loss=loss), dict(zip(shown, shown, strict=True))
    return Table.across("panels", about, ["measure", "scheme"], columns, lines.items())


@lru_cache(maxsize=1)
def _compared(results: Results) -> list[tuple[tuple[str, ...], Measure, set[str]]]:
    """Return each measure of at least two schemes: its training length, if there are several, and its best schemes.

    A measure with 0 for every scheme compares nothing and is left out.
    """
    found = [
        (trained, one)
        for trained, models in _by_training(results)
        for one in _measures(models)
        if len(one.groups) > 1 and any(map(any, one.values.values()))
    ]
    return [(trained, one, _best(one, 1 - (1 - CONFIDENCE) / len(found))) for trained, one in found]


def significant_difference(
    values: Mapping[str, Sequence[float]], confidence: float, least_variance: float = 0.0
) -> float:
    """Return ``d``, Tukey's honestly significant difference for groups of one value each.

    Groups of sizes ``m`` and ``n`` differ if their means are more than ``d · √((1/m + 1/n) / 2)`` apart. The
    variance is pooled over the better half of the groups: models that fail vary far more, or not at all.

    Args:
        values: At least two groups of at least two values.
        confidence: Probability that no difference is found if all true means are equal.
        least_variance: Lower bound of the variance.
    """
    better = sorted(values.values(), key=np.mean, reverse=True)[: len(values) // 2 + 1]
    freedom = sum(len(group) - 1 for group in better)
    variance = sum(float(np.var(group)) * len(group) for group in better) / freedom
    return _studentized_range(confidence, len(values), freedom) * math.sqrt(max(variance, least_variance))


@cache
def _studentized_range(confidence: float, groups: int, freedom: int) -> float:
    from scipy.stats import studentized_range  # takes most of a second to import

    return float(studentized_range.ppf(confidence, groups, freedom))


def _best(measure: Measure, confidence: float) -> set[str]:
    """Return the best scheme and those level with it, or nothing if no scheme is worse."""
    groups = measure.groups
    apart = significant_difference(groups, confidence, measure.least_variance)
    means = {name: np.mean(seeds) for name, seeds in groups.items()}
    first = max(means, key=lambda name: means[name])
    needed = {name: apart * math.sqrt((1 / len(groups[first]) + 1 / len(groups[name])) / 2) for name in means}
    level = {name for name in means if means[first] - means[name] <= needed[name]}
    return level if level < means.keys() else set()


def _by_training(results: Results) -> Iterator[tuple[tuple[str, ...], Results]]:
    """Yield the results of each training length, with the length if there are several."""
    lengths = results.context_lengths
    if len(lengths) < 2:
        yield (), results
        return
    for length in lengths:
        names = [name for name in results.names if results.context_length(name) == length]
        frames = {kind: rows[rows.scheme.isin(names)] for kind, rows in results.frames.items()}
        yield (str(length),), replace(results, frames=frames)


def _measures(results: Results) -> Iterator[Measure]:
    yield from _shares("pass keys", estimates.own_passkeys(results))
    for title, rows in estimates.by_task(results["retrieval"].dropna(subset="plan")):
        yield from _shares(title, rows)
    losses = results["perplexity"].dropna(subset="position")
    yield from _losses("", losses[losses.plan.isna()], results)
    for title, rows in estimates.by_text(losses):
        yield from _losses(f"{title}: ", rows, results)
    for length, rows in results["copying"].groupby("length"):
        own = rows[rows.kind == "all"]
        excess = {name: [*(each.nll - each.optimal_nll)] for name, each in by_scheme(own)}
        written = {name: Cell.of(over_seeds(each), "{:.3f}".format) for name, each in excess.items()}
        yield Measure(f"copying, {length} tokens", {name: [-one for one in x] for name, x in excess.items()}, written)
    sizes = results["accuracy"].rename(columns={"size": "length"})
    yield from _shares("accuracy", sizes, "pixels")


def _shares(title: str, rows: Frame, unit: str = "tokens") -> Iterator[Measure]:
    """Yield a measure for each length; a seed that had stopped before counts as 0."""
    found = estimates.shares(rows, "scheme", "seed", "length")
    seeds = found[["scheme", "seed"]].drop_duplicates()
    for length, here in found.groupby("length"):
        share = seeds.merge(here, how="left", on=["scheme", "seed"]).fillna({"share": 0.0})
        # The arcsine of the root gives shares of n texts the variance 1/4n at any mean.
        values = {name: [*np.arcsin(np.sqrt(own.share))] for name, own in by_scheme(share)}
        written = {name: _pooled(own.share, here.trials.max()) for name, own in by_scheme(share)}
        yield Measure(f"{title}, {length} {unit}", values, written, 1 / (4 * here.trials.min()))


def _pooled(seeds: Frame, trials: int) -> Cell:
    """Return the mean share, with Wilson's interval over the texts of all seeds."""
    mean, texts = seeds.mean(), len(seeds) * trials
    return Cell.of_share((mean, *wilson_interval(mean * texts, texts)))


def _losses(title: str, rows: Frame, results: Results) -> Iterator[Measure]:
    """Yield a measure within the training length, and one at the farthest positions."""
    measure = estimates.loss_measure(results)
    lengths = {name: results.context_length(name) for name in estimates.schemes_in(rows)}
    places = zip(rows.scheme, rows.position, strict=True)
    within = [estimates.end_of_range(position) < lengths[name] for name, position in places]
    far = rows.position.max()
    for place, own in (("within training", rows[within]), (f"at {far:.0f} tokens", rows[rows.position == far])):
        if len(own):
            losses = {name: estimates.mean_losses(each) for name, each in by_scheme(own)}
            written = {name: Cell.of(measure.estimate(each), measure.written) for name, each in losses.items()}
            values = {name: [-loss for loss in each] for name, each in losses.items()}
            yield Measure(f"{title}{measure.name} {place}", values, written)
