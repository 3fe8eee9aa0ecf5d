"""Rows of a study grouped as tables and figures show them: shares, means with their intervals, and kinds of heads."""

from __future__ import annotations

import math
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
    return [name for name in rows.scheme.cat.categories if name in {*rows.scheme}]


def by_scheme(rows: Frame) -> Iterator[tuple[str, Frame]]:
    """Split rows by scheme, in display order."""
    for name, own in rows.groupby("scheme", observed=True):
        yield str(name), own


def by_task(rows: Frame) -> Iterator[tuple[str, Frame]]:
    """Split rows by plan and task, in the order of the rows; with the title of each part."""
    for (plan, task), own in rows.groupby(["plan", "task"], sort=False):
        yield f"{plan}: {task}" if plan else str(task), own


def own_passkeys(results: Results) -> Frame:
    """Return the rows of the recipe's own pass keys."""
    return results["retrieval"][results["retrieval"].plan.isna()]


# ---- shares of texts


def shares(rows: Frame, *keys: str) -> Frame:
    """Pool texts by some fields: ``correct``, ``trials``, ``share`` and the ends of its 95 % Wilson interval."""
    found = rows.groupby([*keys], observed=True)[["correct", "trials"]].sum()
    found["share"] = found.correct / found.trials
    intervals = [wilson_interval(*pair) for pair in zip(found.correct, found.trials, strict=True)]
    found[["low", "high"]] = np.array(intervals).reshape(-1, 2)
    return found.reset_index()


def shares_by_length(rows: Frame) -> Frame:
    """Pool texts by scheme and length as :func:`shares` does.

    Each row also says whether it is ``complete``: whether every seed of the scheme was evaluated at its length. Where
    one had stopped, the share is that of the others, which flatters the scheme.
    """
    found = shares(rows, "scheme", "length")
    seeds = rows.groupby("scheme", observed=True).seed.nunique()
    evaluated = rows.groupby(["scheme", "length"], observed=True).seed.nunique()
    complete = [evaluated[row.scheme, row.length] == seeds[row.scheme] for row in found.itertuples()]
    return found.assign(complete=np.array(complete, dtype=bool))


def best_shares(cells: Frame) -> dict[int, float]:
    """Return the best share above 0 at each length, among the cells that hold all their seeds."""
    held = cells[cells.complete & (cells.share > 0)]
    return dict(held.groupby("length").share.max())


def stopped(results: Results, rows: Frame) -> set[tuple[str, int]]:
    """Return scheme and seed of each model that stopped before the longest texts.

    Args:
        results: Results that have the rows.
        rows: Retrieval rows of one task.
    """
    told = results["run"] if rows.plan.isna().all() else rows
    told = told[told.stopped.notna()]
    last = rows.groupby(["scheme", "seed"], observed=True).length.max()
    ended = {*last[last < rows.length.max()].index}
    return ended & {*zip(told.scheme, told.seed, strict=True)}


def over(rows: Frame, key: str, column: str) -> dict[Any, Estimate]:
    """Return the mean over seeds by some field, with Student's interval over them."""
    return {value: over_seeds([*own.astype(float)]) for value, own in rows.groupby(key)[column]}


def points(found: Mapping[Any, Estimate]) -> Frame:
    """Return estimates as the columns ``x``, ``mean``, ``low`` and ``high``."""
    return pd.DataFrame([(x, *one) for x, one in found.items()], columns=["x", "mean", "low", "high"])


def leading_heads(rows: Frame, along: str = "length", weight: str = "weight") -> Frame:
    """Keep, of each scheme and seed, the head that gives most weight at the shortest length, or the lowest factor."""
    first = rows[along] == rows.groupby(["scheme", "seed"], observed=True)[along].transform("min")
    order = rows[first].sort_values(weight, ascending=False, kind="stable")
    return rows.merge(order.drop_duplicates(["scheme", "seed"])[["scheme", "seed", "layer", "head"]])


# ---- losses

_LARGEST_LOSS = 600.0
"""Nats. The exponential of much more overflows, here or in a figure's margins."""


@dataclass(frozen=True)
class LossMeasure:
    """A number made of a mean loss: perplexity per token, or bits per base.

    Attributes:
        name: Name of the number: ``"perplexity"``.
        of: The number of a mean loss in nats.
        written: The number in tables.
        logarithmic: Whether its axis is.
    """

    name: str
    of: Callable[[float], float]
    written: Callable[[float], str]
    logarithmic: bool

    @property
    def words(self) -> Mapping[str, str]:
        """What is said about the number: ``title``, ``definition``, ..."""
        return words()[f"{self.name.replace(' ', '_')}_measure"]

    def estimate(self, losses: Iterable[float]) -> Estimate:
        """Convert the mean of the seeds' losses, and the ends of its interval."""
        return Estimate(*map(self.of, over_seeds([*losses])))

    def by_position(self, rows: Frame) -> Frame:
        """Estimate the number at each position; positions where a loss is missing are left out."""
        at = {place: losses for place, losses in rows.groupby("position").nll if losses.notna().all()}
        return points({place: self.estimate(losses) for place, losses in at.items()})


# A loss too large for a figure is as large as one can show.
PERPLEXITY = LossMeasure("perplexity", lambda loss: math.exp(min(loss, _LARGEST_LOSS)), quantity, True)
BITS_PER_BASE = LossMeasure("bits per base", lambda loss: loss / math.log(2), "{:.3f}".format, False)


def loss_measure(results: Results) -> LossMeasure:
    """Return bits per base for models of genomes, and perplexity for all others."""
    return BITS_PER_BASE if results.study["recipe"].get("tokenizer") == NUCLEOTIDES else PERPLEXITY


def mean_losses(rows: Frame) -> list[float]:
    """Return the mean loss over tokens of each seed; nan where a loss is missing."""
    seeds, losses, tokens = (rows[column].to_numpy() for column in ("seed", "nll", "tokens"))
    return [float(np.average(losses[seeds == seed], weights=tokens[seeds == seed])) for seed in np.unique(seeds)]


def by_text(rows: Frame) -> Iterator[tuple[str, Frame]]:
    """Split perplexity rows by plan, task and length, in the order of the rows; with the title of each part."""
    for (plan, task, length), own in rows.groupby(["plan", "task", "length"], sort=False):
        up_to = "up to " if task == "perplexity_short" else ""
        yield f"{plan}: {task}, texts of {up_to}{length:.0f} tokens", own


def first_of_range(middle: float) -> int:
    """Return the first position of a range: the power of two that is no larger than its geometric middle."""
    return 2 ** math.floor(math.log2(middle))


def end_of_range(middle: float) -> int:
    """Return the last position of a range, which ends before the next power of two or with the text."""
    return round(middle**2 / first_of_range(middle))


# ---- the copy-mixture task

KINDS = {
    "all": "all tokens", "first": "copies of the first token", "previous": "copies of the previous token",
    "noise": "noise",
}  # fmt: skip
"""Kinds of tokens of the copy-mixture task, in words."""


def excess_losses(rows: Frame, kind: str) -> dict[int, Estimate]:
    """Return a scheme's loss above that of the true distribution on the same tokens, in nats per token, by length."""
    own = rows[rows.kind == kind]
    return over(own.assign(excess=own.nll - own.optimal_nll), "length", "excess")


GAUSSIAN = "generalized_gaussian"
"""Name of the Generalized Gaussian in the catalogue."""

STRONG = -0.6
"""Below this shape β, a retrieval head is called strong."""

UNIFORM_BELOW = 0.005
"""A shape β that is written as 0.00 counts as 0."""

ROLES = {"retrieval": "retrieval (β < 0)", "local": "local (β > 0)", "uniform": "uniform"}
"""What a Generalized Gaussian head is called."""

NEAR = 8
"""Tokens: half of a near-sighted head's prior is no farther away."""
FAR = 1 / 8
"""Of the text: half of a far-sighted head's prior is farther away."""


def role(prior: str, parameters: Mapping[str, Any]) -> str | None:
    """Return one of :data:`ROLES` for a Generalized Gaussian head, None for other priors."""
    beta = number(parameters.get("beta"))
    if prior != GAUSSIAN or beta != beta:
        return None
    return "uniform" if abs(beta) < UNIFORM_BELOW else "local" if beta > 0 else "retrieval"


def gaussian_heads(priors: Frame) -> Frame:
    """Return ``scheme``, ``layer``, ``theta_alpha`` and ``beta`` of every Generalized Gaussian that has a shape.

    A prior that is a sum has a row for each of its Generalized Gaussians.
    """
    found = []
    for row in priors.itertuples():
        kinds = row.prior.split(" + ")
        # Sums number the further ones of a kind.
        leads = [
            f"{GAUSSIAN}_{place}." if place > 1 else f"{GAUSSIAN}." for place in range(1, 1 + kinds.count(GAUSSIAN))
        ]
        for lead in [""] if kinds == [GAUSSIAN] else leads:
            amplitude, shape = (number(row.parameters.get(f"{lead}{name}")) for name in ("theta_alpha", "beta"))
            # Earlier results have no θα of summands.
            if f"{lead}theta_alpha" in row.parameters and shape == shape:
                found.append((row.scheme, row.layer, amplitude, shape))
    return pd.DataFrame(found, columns=["scheme", "layer", "theta_alpha", "beta"])


def halves(results: Results) -> dict[str, list[dict[int, int]]]:
    """Return the distance that holds half of each head's prior, by scheme and length; training lengths are first."""
    return {
        name: [{int(length): half for length, half in found.items()} for found in own.half]
        for name, own in by_scheme(results["prior_reach"])
    }


def sight(found: Mapping[int, int], length: int | None = None) -> str:
    """Return what a head is called in a text of a length, by default the training length.

    Args:
        found: Distances of a head as :func:`halves` returns them.
        length: Length of the text in tokens.
    """
    length = next(iter(found)) if length is None else length
    if found[length] <= NEAR:
        return "near-sighted"
    return "far-sighted" if found[length] >= FAR * length else "between"
