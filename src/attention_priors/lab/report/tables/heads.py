"""What the heads' priors became: each in numbers and words, how many of which shape, and where their priors look."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from attention_priors._io import number
from attention_priors.lab.report.numbers import listing, quantity
from attention_priors.lab.report.selections.heads import ROLES, STRONG_RETRIEVAL, gaussian_heads, logit_scales, role
from attention_priors.lab.report.selections.reach import NEAR, Reach, Sight, lengths_of, reaches, still
from attention_priors.lab.report.selections.results import Results, Row, distinct, rows, scheme_names, schemes_with
from attention_priors.lab.report.tables.cells import ABSENT, interval_text, share_over_seeds, with_first
from attention_priors.lab.report.tables.grid import Cell, Grid

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


def head_count_grid(results: Results) -> Grid:
    """How many heads are local, and how many retrieve."""
    lines = []
    scales = logit_scales(results, schemes_with(results, "logit_scales"))
    for name in scheme_names(results):
        shapes = [number(row["parameters"]["beta"]) for row in gaussian_heads(results, name)]
        found = scales.get(name, [])
        if not shapes and not found:
            continue
        clusters = (
            sum(shape > 0 for shape in shapes),
            sum(STRONG_RETRIEVAL <= shape <= 0 for shape in shapes),
            sum(shape < STRONG_RETRIEVAL for shape in shapes),
        )
        spread = (
            Cell(quantity(sum(found) / len(found)), interval_text(min(found), max(found), quantity))
            if found
            else ABSENT
        )
        lines.append([name, *(str(count) if shapes else ABSENT for count in clusters), spread])
    caption = (
        "Heads of Generalized Gaussian priors, of all layers and seeds, by their shape β: local β > 0, retrieval "
        f"{STRONG_RETRIEVAL} ≤ β ≤ 0, strong retrieval β < {STRONG_RETRIEVAL}. s: mean logit scale, and its range over "
        "heads (no interval)."
    ).replace("-0.6", "−0.6")
    return Grid(
        "heads", caption, ["scheme", "local", "retrieval", "strong\nretrieval", "s"], [lines] if lines else [], 1
    )


def prior_mass_grid(results: Results) -> Grid:
    """Where the prior alone looks, by layer."""
    groups = []
    places = ("first", "previous", "itself")
    for name in schemes_with(results, "prior_mass"):
        mine = rows(results, "prior_mass", name)
        seeds, layers = distinct(mine, "seed"), distinct(mine, "layer")
        # Which layer takes which part may be another one with each seed.
        lines = [(str(layer), [layer]) for layer in layers] + ([("any", layers)] if len(layers) > 1 else [])
        groups.append(
            [
                [
                    name if first else "",
                    words,
                    str(len(seeds)),
                    *(share_over_seeds(_largest(mine, among, place)) for place in places),
                ]
                for first, (words, among) in with_first(lines)
            ]
        )
    # Earlier results do not say so, and have no scale in them.
    scaled = any(row.get("scaled") for row in rows(results, "prior_mass"))
    caption = (
        "Where priors look before anything is read: the weight that the prior alone"
        + (", multiplied by the logit scale where attention does so," if scaled else "")
        + " gives to the first key, to the key before the query's own, and to that itself, %, mean over the queries of "
        "a text of the training length; of the head of each layer that gives most, and of any layer. Mean over seeds "
        "with Student's 95 % interval (where there are two seeds at least), cut to 0–100 %."
    )
    return Grid("prior_mass", caption, ["scheme", "layer", "seeds", *places], groups, words=2)


def prior_reach_grid(results: Results) -> Grid:
    """How many heads look near and far, and go on to do so as texts grow."""
    lengths = lengths_of(results)
    groups = []
    for name in schemes_with(results, "prior_reach"):
        heads = reaches(results, name)
        sights: tuple[Sight, ...] = ("near-sighted", "far-sighted")
        groups.append(
            [
                [name if first else "", sight, str(len(heads)), *_counts(heads, sight, lengths)]
                for first, sight in with_first(sights)
            ]
        )
    caption = (
        "Heads by how far their priors look before anything is read, by length of the text in tokens. Near-sighted: "
        f"half of the prior's mass, as attention applies it to the last query, is at most {NEAR} tokens away; "
        "far-sighted: half of it is at least an eighth of the text away. Counted are heads that are so at the "
        "training length, each scheme's first number, and still are at the other lengths; of those of all layers and "
        "seeds. –: not asked for."
    )
    return Grid("prior_reach", caption, ["scheme", "heads", "of", *map(str, lengths)], groups, words=2)


def _counts(heads: list[Reach], sight: Sight, lengths: list[int]) -> list[str]:
    # Runs that were measured when the recipe asked for shorter texts do not know of longer ones.
    measured = set.intersection(*(set(head.halves) for head in heads))
    return [str(still(heads, sight, length)) if length in measured else ABSENT for length in lengths]


def _largest(selected: Iterable[Row], layers: Collection[int], key: str) -> list[float]:
    """The largest value of some layers' heads, for each seed."""
    found: dict[int, float] = {}
    for row in selected:
        if row["layer"] in layers:
            found[row["seed"]] = max(found.get(row["seed"], 0.0), row[key])
    return list(found.values())
