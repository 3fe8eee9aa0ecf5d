"""Aggregated rows of a study for tables and figures: shares, means with intervals, and kinds of heads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from attention_priors._io import number
from attention_priors.lab.data.genomes import NUCLEOTIDES
from attention_priors.lab.intervals import Estimate, over_seeds, wilson_interval
from attention_priors.lab.report.wording import quantity, words
from attention_priors.lab.results import Frame, Results


def schemes_in(rows: Frame) -> list[str]:
    """Return the schemes that have rows, in display order."""
    return [*rows.scheme.cat.remove_unused_categories().cat.categories]


def by_scheme(rows: Frame) -> Iterator[tuple[str, Frame]]:
    """Yield the rows of each scheme, in display order."""
    for name, own in rows.groupby("scheme", observed=True):
        yield str(name), own


def by_task(rows: Frame) -> Iterator[tuple[str, Frame]]:
    """Yield the rows of each plan and task with a title, in the order of the rows."""
    for (plan, task), own in rows.groupby(["plan", "task"], sort=False):
        yield f"{plan}: {task}" if plan else str(task), own


def own_passkeys(results: Results) -> Frame:
    """Return the rows of the recipe's own pass keys, without those of named plans."""
    return results["retrieval"][results["retrieval"].plan.isna()]


# ---- shares of texts


def shares(rows: Frame, *keys: str) -> Frame:
    """Pool texts by some fields into ``correct``, ``trials``, ``share`` and the ends of its 95 % Wilson interval."""
    found = rows.groupby([*keys], observed=True)[["correct", "trials"]].sum()
    found["share"] = found.correct / found.trials
    intervals = [wilson_interval(*pair) for pair in zip(found.correct, found.trials, strict=True)]
    found[["low", "high"]] = np.array(intervals).reshape(-1, 2)
    return found.reset_index()


def shares_by_length(rows: Frame) -> Frame:
    """Pool texts by scheme and length, as :func:`shares` does.

    The column ``complete`` says whether every seed of the scheme was evaluated at this length. If a seed stopped
    earlier, the share of the remaining seeds flatters the scheme.
    """
    found = shares(rows, "scheme", "length")
    seeds = rows.groupby("scheme", observed=True).seed.nunique()
    evaluated = rows.groupby(["scheme", "length"], observed=True).seed.nunique()
    complete = [evaluated[row.scheme, row.length] == seeds[row.scheme] for row in found.itertuples()]
    return found.assign(complete=np.array(complete, dtype=bool))


def best_shares(cells: Frame) -> dict[int, float]:
    """Return the best share above 0 at each length, among the cells with all seeds."""
    held = cells[cells.complete & (cells.share > 0)]
    return dict(held.groupby("length").share.max())


def stopped(results: Results, rows: Frame) -> set[tuple[str, int]]:
    """Return scheme and seed of each model whose evaluation stopped before the longest texts.

    Args:
        results: Results that contain the rows.
        rows: Retrieval rows of one task.
    """
    told = results["run"] if rows.plan.isna().all() else rows
    told = told[told.stopped.notna()]
    last = rows.groupby(["scheme", "seed"], observed=True).length.max()
    ended = {*last[last < rows.length.max()].index}
    return ended & {*zip(told.scheme, told.seed, strict=True)}


def over(rows: Frame, key: str, column: str) -> dict[Any, Estimate]:
    """Return the mean over seeds for each value of a field, with Student's interval."""
    found = defaultdict[Any, list[float]](list)
    for value, one in zip(rows[key], rows[column].astype(float), strict=True):
        found[value].append(one)
    return {value: over_seeds(found[value]) for value in sorted(found)}


def points(found: Mapping[Any, Estimate]) -> Frame:
    """Return estimates as a frame with the columns ``x``, ``mean``, ``low`` and ``high``."""
    return pd.DataFrame([(x, *one) for x, one in found.items()], columns=["x", "mean", "low", "high"])


def leading_heads(rows: Frame, along: str = "length", weight: str = "weight") -> Frame:
    """Keep, for each scheme and seed, the head with the largest weight at the smallest length or factor."""
    first = rows[along] == rows.groupby(["scheme", "seed"], observed=True)[along].transform("min")
    order = rows[first].sort_values(weight, ascending=False, kind="stable")
    return rows.merge(order.drop_duplicates(["scheme", "seed"])[["scheme", "seed", "layer", "head"]])


# ---- losses

_LARGEST_LOSS = 600.0
"""Largest loss in nats; the exponential of larger losses overflows, here or in the margins of a figure."""


@dataclass(frozen=True)
class LossMeasure:
    """Measure derived from a mean loss: perplexity per token, or bits per base.

    Attributes:
        name: Name of the measure, such as ``"perplexity"``.
        of: Conversion of a mean loss in nats.
        written: Format in tables.
        logarithmic: Whether the axis of the measure is logarithmic.
    """

    name: str
    of: Callable[[float], float]
    written: Callable[[float], str]
    logarithmic: bool

    @property
    def words(self) -> Mapping[str, str]:
        """Texts about the measure: ``title``, ``definition``, ..."""
        return words()[f"{self.name.replace(' ', '_')}_measure"]

    def estimate(self, losses: Iterable[float]) -> Estimate:
        """Convert the mean of the seeds' losses and the ends of its interval."""
        return Estimate(*map(self.of, over_seeds([*losses])))

    def by_position(self, rows: Frame) -> Frame:
        """Estimate the measure at each position, without positions where a loss is missing."""
        at = {place: losses for place, losses in rows.groupby("position").nll if losses.notna().all()}
        return points({place: self.estimate(losses) for place, losses in at.items()})


# Losses too large for a figure are clamped.
PERPLEXITY = LossMeasure("perplexity", lambda loss: math.exp(min(loss, _LARGEST_LOSS)), quantity, True)
BITS_PER_BASE = LossMeasure("bits per base", lambda loss: loss / math.log(2), "{:.3f}".format, False)


def loss_measure(results: Results) -> LossMeasure:
    """Return bits per base for models of genomes, and perplexity for all other models."""
    return BITS_PER_BASE if results.study["recipe"].get("tokenizer") == NUCLEOTIDES else PERPLEXITY


def mean_losses(rows: Frame) -> list[float]:
    """Return the mean loss over tokens of each seed; nan if a loss is missing."""
    seeds, losses, tokens = (rows[column].to_numpy() for column in ("seed", "nll", "tokens"))
    return [float(np.average(losses[seeds == seed], weights=tokens[seeds == seed])) for seed in np.unique(seeds)]


def by_text(rows: Frame) -> Iterator[tuple[str, Frame]]:
    """Yield the perplexity rows of each plan, task and length with a title, in the order of the rows."""
    for (plan, task, length), own in rows.groupby(["plan", "task", "length"], sort=False):
        up_to = "up to " if task == "perplexity_short" else ""
        yield f"{plan}: {task}, texts of {up_to}{length:.0f} tokens", own


def first_of_range(middle: float) -> int:
    """Return the first position of a range: the largest power of two up to its geometric middle."""
    return 2 ** math.floor(math.log2(middle))


def end_of_range(middle: float) -> int:
    """Return the last position of a range, which ends before the next power of two or with the text."""
    return round(middle**2 / first_of_range(middle))


# ---- the copy-mixture task

KINDS = {
    "all": "all tokens", "first": "copies of the first token", "previous": "copies of the previous token",
    "noise": "noise",
}  # fmt: skip
"""Descriptions of the copy-mixture task's kinds of tokens."""


def excess_losses(rows: Frame, kind: str) -> dict[int, Estimate]:
    """Return a scheme's loss above the true distribution's on the same tokens, in nats per token, by length."""
    own = rows[rows.kind == kind]
    return over(own.assign(excess=own.nll - own.optimal_nll), "length", "excess")


GAUSSIAN = "generalized_gaussian"
"""Catalogue name of the Generalized Gaussian."""

STRONG = -0.6
"""Shape β below which a retrieval head counts as strong."""

UNIFORM_BELOW = 0.005
"""Absolute shape β below which a head counts as uniform; such a shape is printed as 0.00."""

ROLES = {"retrieval": "retrieval (β < 0)", "local": "local (β > 0)", "uniform": "uniform"}
"""Labels of Generalized Gaussian heads."""

NEAR = 8
"""Largest distance, in tokens, that holds half of a near-sighted head's prior."""
FAR = 1 / 8
"""Smallest distance, as a share of the text, that holds half of a far-sighted head's prior."""


def role(prior: str, parameters: Mapping[str, Any]) -> str | None:
    """Return the key in :data:`ROLES` of a Generalized Gaussian head, or None for other priors."""
    beta = number(parameters.get("beta"))
    if prior != GAUSSIAN or beta != beta:
        return None
    return "uniform" if abs(beta) < UNIFORM_BELOW else "local" if beta > 0 else "retrieval"


def gaussian_heads(priors: Frame) -> Frame:
    """Return ``scheme``, ``layer``, ``theta_alpha`` and ``beta`` of every Generalized Gaussian with a shape.

    A prior that is a sum has one row for each of its Generalized Gaussians.
    """
    found = []
    for row in priors.itertuples():
        kinds = row.prior.split(" + ")
        # Sums number repeated terms of the same kind.
        leads = [
            f"{GAUSSIAN}_{place}." if place > 1 else f"{GAUSSIAN}." for place in range(1, 1 + kinds.count(GAUSSIAN))
        ]
        for lead in [""] if kinds == [GAUSSIAN] else leads:
            theta_alpha, beta = (number(row.parameters.get(f"{lead}{name}")) for name in ("theta_alpha", "beta"))
            # Older results lack θα of terms.
            if f"{lead}theta_alpha" in row.parameters and beta == beta:
                found.append((row.scheme, row.layer, theta_alpha, beta))
    return pd.DataFrame(found, columns=["scheme", "layer", "theta_alpha", "beta"])


def halves(results: Results) -> dict[str, list[dict[int, int]]]:
    """Return the distance that holds half of each head's prior, by scheme and length; training length first."""
    return {
        name: [{int(length): half for length, half in found.items()} for found in own.half]
        for name, own in by_scheme(results["prior_reach"])
    }


def sight(found: Mapping[int, int], length: int | None = None) -> str:
    """Return the label of a head in a text of this length, by default the training length.

    Args:
        found: Distances of a head from :func:`halves`.
        length: Length of the text in tokens.
    """
    length = next(iter(found)) if length is None else length
    if found[length] <= NEAR:
        return "near-sighted"
    return "far-sighted" if found[length] >= FAR * length else "between"
