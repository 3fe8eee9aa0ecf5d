"""Tables of what the heads' priors became: how many of which shape, and where they look.

They are ``heads``, ``prior_mass`` and ``prior_reach``.
"""

from __future__ import annotations

from attention_priors.lab.intervals import over_seeds
from attention_priors.lab.report.estimates import (
    GAUSSIAN,
    NEAR,
    ROLES,
    STRONG,
    by_scheme,
    gaussian_heads,
    halves,
    role,
    sight,
)
from attention_priors.lab.report.table import ABSENT, Cell, Table
from attention_priors.lab.report.wording import listing, quantity, wording
from attention_priors.lab.results import Frame, Results

_HEADINGS = {
    "alpha": "scale α, tokens", "beta": "shape β", "mu": "location μ, tokens", "amplitude": "amplitude, nats",
    "theta_alpha": "θα", "theta_beta": "θβ", "theta_mu": "θμ",
}  # fmt: skip
"""Headings of the parameters of a Generalized Gaussian."""


def heads(rows: Frame) -> Table:
    """Every head of one scheme.

    Args:
        rows: Prior rows of the scheme, at least one.
    """
    rows = rows.sort_values(["seed", "layer", "head"])
    kinds = sorted(rows.prior.unique())
    roles = [role(row.prior, row.parameters) for row in rows.itertuples()]
    words = f"{len(rows)} heads, {listing([kind.replace('_', ' ') for kind in kinds])}"
    shown = rows[["seed", "layer", "head"]].astype(str)
    if len(kinds) > 1:
        shown["prior"] = rows.prior.str.replace("_", " ")
    if any(roles):
        shown["in words"] = [ROLES.get(found or "", "") for found in roles]
        words += f": {listing([f'{roles.count(name)} {called}' for name, called in ROLES.items() if name in roles])}"
    # Another prior may have an alpha too, of another meaning.
    explained = _HEADINGS if kinds == [GAUSSIAN] else {}
    for name in dict.fromkeys(name for own in rows.parameters for name in own):
        shown[explained.get(name, name)] = [_value(own.get(name)) for own in rows.parameters]
    return Table("heads_of_scheme", words, [*shown], shown.to_numpy().tolist(), words=0)


def _value(value: float | list[float] | None) -> str:
    return f"{len(value)} numbers" if isinstance(value, list) else quantity(value)


def head_counts(results: Results) -> Table:
    """How many heads are local, and how many retrieve."""
    gaussian, scales = gaussian_heads(results["prior"]), results["logit_scale"].dropna(subset="s")
    lines = []
    for name in results.names:
        beta, s = gaussian.beta[gaussian.scheme == name], scales.s[scales.scheme == name]
        if not len(beta) and not len(s):
            continue
        clusters = (beta > 0, (beta >= STRONG) & (beta <= 0), beta < STRONG)
        spread = Cell.of((s.mean(), s.min(), s.max()), quantity) if len(s) else ABSENT
        lines.append([name, *(str(cluster.sum()) if len(beta) else ABSENT for cluster in clusters), spread])
    header = ["scheme", "local", "retrieval", "strong\nretrieval", "s"]
    return Table("heads", wording("heads"), header, lines)


def prior_mass(results: Results) -> Table:
    """Where the prior alone looks, by layer."""
    rows, places = results["prior_mass"], ["first", "previous", "itself"]
    lines = []
    for name, own in by_scheme(rows):
        layers = own.groupby("layer")
        # Which layer takes which part may be another one with each seed.
        parts = [*layers, ("any", own)] if len(layers) > 1 else [*layers]
        for layer, part in parts:
            largest = part.groupby("seed")[places].max()
            cells = [Cell.of_share(over_seeds([*largest[place]])) for place in places]
            lines.append([name, str(layer), str(own.seed.nunique()), *cells])
    # Earlier results do not say so, and have no scale in them.
    words = wording("prior_mass", scaled=rows.scaled.eq(True).any())
    return Table("prior_mass", words, ["scheme", "layer", "seeds", *places], lines, words=2)


def prior_reach(results: Results) -> Table:
    """How many heads look near and far, and go on to do so as texts grow."""
    found = {name: [halves(row) for row in own.itertuples()] for name, own in by_scheme(results["prior_reach"])}
    lengths = sorted({length for own in found.values() for half in own for length in half})
    lines = []
    for name, own in found.items():
        # Runs that were measured when the recipe asked for shorter texts do not know of longer ones.
        measured = set.intersection(*map(set, own))
        for called in ("near-sighted", "far-sighted"):
            trained = [half for half in own if sight(half) == called]
            counts = {n: str(sum(sight(half, n) == called for half in trained)) for n in measured}
            lines.append([name, called, str(len(own)), *(counts.get(n, ABSENT) for n in lengths)])
    header = ["scheme", "heads", "of", *map(str, lengths)]
    return Table("prior_reach", wording("prior_reach", near=NEAR), header, lines, words=2)
