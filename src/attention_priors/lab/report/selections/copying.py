"""The copy-mixture task: how far each scheme's loss is above the best there is."""

from __future__ import annotations

from attention_priors._io import number
from attention_priors.lab.intervals import Estimate, over_seeds
from attention_priors.lab.report.selections.results import Results, rows

KINDS = {
    "all": "all tokens",
    "first": "copies of the first token",
    "previous": "copies of the previous token",
    "noise": "noise",
}
"""What tokens are, and what they are called."""


def excess_losses(results: Results, scheme: str, kind: str) -> dict[int, Estimate]:
    """The loss above the optimum's on the same tokens, in nats per token, by length: mean and interval over seeds."""
    found: dict[int, list[float]] = {}
    for row in rows(results, "copying", scheme):
        if row["kind"] == kind:
            found.setdefault(row["length"], []).append(number(row["nll"]) - number(row["optimal_nll"]))
    return {length: over_seeds(values) for length, values in sorted(found.items())}
