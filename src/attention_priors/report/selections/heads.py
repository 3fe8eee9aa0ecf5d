"""The heads of a scheme: what a Generalized Gaussian one is called, and their logit scales."""

from __future__ import annotations

import math
from collections.abc import Iterable

from attention_priors.report.selections.results import Results, Row, number, rows

STRONG_RETRIEVAL = -0.6
"""Below this shape β, a retrieval head is called strong."""

UNIFORM_BELOW = 0.005
"""A shape β that is written as 0.00 counts as 0."""

ROLES = {"retrieval": "retrieval (β < 0)", "local": "local (β > 0)", "uniform": "uniform"}
"""What a Generalized Gaussian head is called."""


def role(row: Row) -> str | None:
    """One of :data:`ROLES` for a Generalized Gaussian head; None for other priors."""
    beta = number(row["parameters"].get("beta"))
    if row["prior"] != "generalized_gaussian" or beta != beta:
        return None
    if abs(beta) < UNIFORM_BELOW:
        return "uniform"
    return "local" if beta > 0 else "retrieval"


def gaussian_heads(results: Results, scheme: str) -> list[Row]:
    """The heads of a scheme whose prior is a Generalized Gaussian with a shape."""
    return [
        row
        for row in rows(results, "priors", scheme)
        if row["prior"] == "generalized_gaussian" and math.isfinite(number(row["parameters"]["beta"]))
    ]


def logit_scales(results: Results, schemes: Iterable[str]) -> dict[str, list[float]]:
    """The logit scales s of each scheme that has some."""
    values = {scheme: [number(row["s"]) for row in rows(results, "logit_scales", scheme)] for scheme in schemes}
    values = {scheme: [s for s in scales if math.isfinite(s)] for scheme, scales in values.items()}
    return {scheme: scales for scheme, scales in values.items() if scales}


def head_name(row: Row) -> str:
    """``layer.head``, both from 0."""
    return f"{row['layer']}.{row['head']}"
