"""What heads are called: by the shape of a Generalized Gaussian prior, and by how far a prior looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from attention_priors._io import number
from attention_priors.lab.results import Frame

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


def halves(row: Any) -> dict[int, int]:
    """Return the distance that holds half of a head's prior, by length of the text; the training length is first."""
    return {int(length): half for length, half in row.half.items()}


def sight(found: Mapping[int, int], length: int | None = None) -> str:
    """Return what a head is called in a text of a length, by default the training length.

    Args:
        found: Distances as :func:`halves` returns them.
        length: Length of the text in tokens.
    """
    length = next(iter(found)) if length is None else length
    if found[length] <= NEAR:
        return "near-sighted"
    return "far-sighted" if found[length] >= FAR * length else "between"
