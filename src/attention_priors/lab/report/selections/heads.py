"""The heads of a scheme: what a Generalized Gaussian one is called, and their logit scales."""

from __future__ import annotations

import math
from collections.abc import Iterable

from attention_priors._io import number
from attention_priors.lab.report.selections.results import Results, Row, rows

GAUSSIAN = "generalized_gaussian"
"""Its name among the priors."""

STRONG_RETRIEVAL = -0.6
"""Below this shape β, a retrieval head is called strong."""

UNIFORM_BELOW = 0.005
"""A shape β that is written as 0.00 counts as 0."""

ROLES = {"retrieval": "retrieval (β < 0)", "local": "local (β > 0)", "uniform": "uniform"}
"""What a Generalized Gaussian head is called."""


def role(row: Row) -> str | None:
    """One of :data:`ROLES` for a Generalized Gaussian head; None for other priors."""
    beta = number(row["parameters"].get("beta"))
    if row["prior"] != GAUSSIAN or beta != beta:
        return None
    if abs(beta) < UNIFORM_BELOW:
        return "uniform"
    return "local" if beta > 0 else "retrieval"


def keys_ahead(row: Row) -> list[float]:
    """A head's curve for keys that follow the query; that of those before it where none follow, or they are alike."""
    return row.get("log_prior_ahead", row["log_prior"])


def gaussian_heads(results: Results, scheme: str) -> list[Row]:
    """The Generalized Gaussians of a scheme that have a shape, each as if it were its head's whole prior."""
    found = [
        {**row, "prior": GAUSSIAN, "parameters": parameters}
        for row in rows(results, "priors", scheme)
        for parameters in _gaussian_terms(row)
    ]
    return [row for row in found if math.isfinite(number(row["parameters"]["beta"]))]


def _gaussian_terms(row: Row) -> list[dict[str, float | None]]:
    """The parameters of the Generalized Gaussians that a head's prior is, or is a sum of."""
    kinds = row["prior"].split(" + ")
    # Sums number the further ones of a kind.
    leads = [f"{GAUSSIAN}_{place}." if place > 1 else f"{GAUSSIAN}." for place in range(1, 1 + kinds.count(GAUSSIAN))]
    terms = [
        {name.removeprefix(lead): value for name, value in row["parameters"].items() if name.startswith(lead)}
        for lead in ([""] if kinds == [GAUSSIAN] else leads)
    ]
    # Earlier results have no θα of summands.
    return [parameters for parameters in terms if "theta_alpha" in parameters]


def logit_scales(results: Results, schemes: Iterable[str]) -> dict[str, list[float]]:
    """The logit scales s of each scheme that has some."""
    values = {scheme: [number(row["s"]) for row in rows(results, "logit_scales", scheme)] for scheme in schemes}
    values = {scheme: [s for s in scales if math.isfinite(s)] for scheme, scales in values.items()}
    return {scheme: scales for scheme, scales in values.items() if scales}


def head_name(row: Row) -> str:
    """``layer.head``, both from 0."""
    return f"{row['layer']}.{row['head']}"
