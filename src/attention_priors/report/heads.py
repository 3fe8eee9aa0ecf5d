"""What the heads' priors became, in numbers and words."""

from __future__ import annotations

from dataclasses import dataclass

from attention_priors.report.numbers import listing, quantity
from attention_priors.report.results import Results, Row, distinct, number, rows

UNIFORM_BELOW = 0.005
"""A shape β that is written as 0.00 counts as 0."""

ROLES = {"retrieval": "retrieval (β < 0)", "local": "local (β > 0)", "uniform": "uniform"}
"""What a Generalized Gaussian head is called."""

_HEADINGS: dict[str, str] = {
    "alpha": "scale α, tokens",
    "beta": "shape β",
    "mu": "location μ, tokens",
    "amplitude": "amplitude, nats",
    "theta_alpha": "θα",
    "theta_beta": "θβ",
    "theta_mu": "θμ",
}


@dataclass(frozen=True)
class HeadTable:
    """The parameters of one scheme's priors, a line per head."""

    headings: list[str]
    lines: list[list[str]]
    caption: str


def role(row: Row) -> str | None:
    """One of :data:`ROLES` for a Generalized Gaussian head; None for other priors."""
    beta = number(row["parameters"].get("beta"))
    if row["prior"] != "generalized_gaussian" or beta != beta:
        return None
    if abs(beta) < UNIFORM_BELOW:
        return "uniform"
    return "local" if beta > 0 else "retrieval"


def head_table(results: Results, scheme: str) -> HeadTable | None:
    """Every head of a scheme; None where the scheme has no prior."""
    selected = sorted(rows(results, "priors", scheme), key=lambda row: (row["seed"], row["layer"], row["head"]))
    if not selected:
        return None
    kinds = distinct(selected, "prior")
    parameters = list(dict.fromkeys(name for row in selected for name in row["parameters"]))
    # Another prior may have an alpha too, of another meaning.
    explained = _HEADINGS if kinds == ["generalized_gaussian"] else {}
    roles = [role(row) for row in selected]
    columns: dict[str, list[str]] = {key: [str(row[key]) for row in selected] for key in ("seed", "layer", "head")}
    if len(kinds) > 1:
        columns["prior"] = [_words(row["prior"]) for row in selected]
    if any(roles):
        columns["in words"] = [ROLES[found] if found else "" for found in roles]
    for name in parameters:
        columns[explained.get(name) or name] = [_value(row["parameters"].get(name)) for row in selected]
    return HeadTable(
        headings=list(columns),
        lines=[list(line) for line in zip(*columns.values(), strict=True)],
        caption=_caption(kinds, roles),
    )


def _caption(kinds: list[str], roles: list[str | None]) -> str:
    counts = [f"{roles.count(name)} {words}" for name, words in ROLES.items() if name in roles]
    heads = f"{len(roles)} heads, {listing([_words(kind) for kind in kinds])}"
    return f"{heads}: {listing(counts)}" if counts else heads


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(value: float | list[float] | None) -> str:
    return f"{len(value)} numbers" if isinstance(value, list) else quantity(value)
