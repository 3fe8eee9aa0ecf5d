"""How much of the attention what is asked for gets: of the head that looks most, followed over lengths."""

from __future__ import annotations

from attention_priors._io import number
from attention_priors.lab.intervals import Estimate, over_seeds
from attention_priors.lab.report.selections.results import Results, Row, distinct, rows


def plans_with_weights(results: Results) -> list[str]:
    """The plans that have measured it."""
    return list(dict.fromkeys(row["plan"] for row in rows(results, "needle_weights")))


def looking_heads(results: Results, plan: str, scheme: str) -> dict[int, dict[int, float]]:
    """Of each seed, by length: the weight, from 0 to 1, of the head that gives most at the shortest length."""
    mine = [row for row in rows(results, "needle_weights", scheme) if row["plan"] == plan]
    found: dict[int, dict[int, float]] = {}
    for seed in distinct(mine, "seed"):
        own = [row for row in mine if row["seed"] == seed]
        shortest = min(row["length"] for row in own)
        most = max((row for row in own if row["length"] == shortest), key=_weight)
        followed = [row for row in own if (row["layer"], row["head"]) == (most["layer"], most["head"])]
        found[seed] = {row["length"]: number(row["weight"]) for row in sorted(followed, key=lambda row: row["length"])}
    return found


def _weight(row: Row) -> float:
    return -1.0 if row["weight"] is None else row["weight"]


def mean_weights(results: Results, plan: str, scheme: str) -> dict[int, Estimate]:
    """The weights of :func:`looking_heads` by length: mean and interval over seeds."""
    of_seeds = looking_heads(results, plan, scheme).values()
    lengths = sorted({length for one in of_seeds for length in one})
    return {length: over_seeds([one[length] for one in of_seeds if length in one]) for length in lengths}
