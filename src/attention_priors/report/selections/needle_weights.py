"""How much of the attention what is asked for gets: of the head that looks most, followed over lengths."""

from __future__ import annotations

from attention_priors.intervals import Estimate, over_seeds
from attention_priors.report.selections.results import Results, distinct, rows


def plans_with_weights(results: Results) -> list[str]:
    """The plans that have measured it."""
    return list(dict.fromkeys(row["plan"] for row in rows(results, "needle_weights")))


def looking_heads(results: Results, plan: str, scheme: str) -> dict[int, Estimate]:
    """By length: the weight, from 0 to 1, that the head which gives most at the shortest length gives at each.

    It is chosen in each seed and followed; mean and interval over seeds.
    """
    mine = [row for row in rows(results, "needle_weights", scheme) if row["plan"] == plan]
    found: dict[int, list[float]] = {}
    for seed in distinct(mine, "seed"):
        own = [row for row in mine if row["seed"] == seed]
        shortest = min(row["length"] for row in own)
        most = max((row for row in own if row["length"] == shortest), key=lambda row: row["weight"])
        for row in own:
            if (row["layer"], row["head"]) == (most["layer"], most["head"]):
                found.setdefault(row["length"], []).append(row["weight"])
    return {length: over_seeds(values) for length, values in sorted(found.items())}
