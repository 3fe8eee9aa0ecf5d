"""What a mean loss is shown as: perplexity per token, or bits per base where the tokens are the bases of a genome."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attention_priors._io import number
from attention_priors.lab.data.nucleotides import NUCLEOTIDES
from attention_priors.lab.intervals import Estimate, over_seeds
from attention_priors.lab.report.numbers import quantity
from attention_priors.lab.report.selections.results import Results, Row

_LARGEST_LOSS = 600.0
"""In nats; the exponential of much more overflows, here or in a figure's margins."""


def bounded_exp(loss: float) -> float:
    """E to a loss; nan stays nan, and what is too large for a figure is as large as one can show."""
    return math.exp(min(loss, _LARGEST_LOSS))


@dataclass(frozen=True)
class LossMeasure:
    """What is made of a mean loss.

    Attributes:
        name: Of one of its numbers: ``"perplexity"``.
        least: The best of it: ``"the lowest perplexity"``.
        title: Its name with what it is counted by, at the beginning of a sentence: ``"Perplexity per token"``.
        axis: The same on an axis.
        definition: How it is made of the seeds' losses, for captions.
        meaning: What it says, for readers of a page.
        of: From a mean loss in nats.
        written: A number of it, in tables.
        logarithmic: Whether its axis is.
    """

    name: str
    least: str
    title: str
    axis: str
    definition: str
    meaning: str
    of: Callable[[float], float]
    written: Callable[[float], str]
    logarithmic: bool

    def estimate(self, losses: Iterable[float]) -> Estimate:
        """Of the seeds' mean losses: that of their mean and of the ends of its interval."""
        return Estimate(*map(self.of, over_seeds([*losses])))

    def by_position(self, selected: Iterable[Row]) -> dict[float, Estimate]:
        """Of the rows of each position, in the order of positions; those where a loss is missing are left out."""
        losses: dict[float, list[float]] = defaultdict(list)
        for row in selected:
            losses[row["position"]].append(number(row["nll"]))
        return {
            position: self.estimate(found)
            for position, found in sorted(losses.items())
            if all(map(math.isfinite, found))
        }


PERPLEXITY = LossMeasure(
    name="perplexity",
    least="the lowest perplexity",
    title="Perplexity per token",
    axis="perplexity, per token",
    definition="e to the mean loss over seeds, with e to the ends of Student's 95 % interval of that mean (where "
    "there are two seeds at least).",
    meaning="how many tokens the model hesitates between",
    of=bounded_exp,
    written=quantity,
    logarithmic=True,
)

BITS_PER_BASE = LossMeasure(
    name="bits per base",
    least="the fewest bits per base",
    title="Bits per base",
    axis="bits per base",
    definition="the mean loss over seeds by ln 2, with Student's 95 % interval (where there are two seeds at "
    "least). Bases that are drawn at random, each as often as the others, have 2.",
    meaning="2 is what a fair die with four sides has",
    of=lambda loss: loss / math.log(2),
    written="{:.3f}".format,
    logarithmic=False,
)


def measure_of_tokens(*, are_bases: bool) -> LossMeasure:
    """Bits per base of the bases of genomes, of other tokens perplexity."""
    return BITS_PER_BASE if are_bases else PERPLEXITY


def loss_measure(results: Results) -> LossMeasure:
    """Of the tokens of the recipe."""
    return measure_of_tokens(are_bases=results["recipe"].get("tokenizer") == NUCLEOTIDES)
