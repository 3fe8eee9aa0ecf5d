"""Page of ``attention-priors inspect``: the heads of one model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attention_priors._io import write_bytes
from attention_priors.lab.report.figures import heads as drawn
from attention_priors.lab.report.figures.attention import attention_map, layer_maps
from attention_priors.lab.report.figures.style import png
from attention_priors.lab.report.pages import embedded_figure, render
from attention_priors.lab.report.table import Table
from attention_priors.lab.report.wording import percent, quantity, wording
from attention_priors.lab.results import FORMAT, Results

Found = Mapping[str, Any]

_MOST_HEADS = 48
"""Largest number of heads in a table that is shown unfolded."""
_FIRST = {"pass key, %": "needle", "prior's share, %": "position_share"}
_LAST = {"s": "s", "γ": "inverse_temperature", "agreement, nats": "agreement", "mean distance, tokens": "distance"}
_HEADINGS = {"beta": "β", "mu": "μ", "theta_alpha": "θα"}
_SUMMANDS = {
    "content_content": "content · content", "content_position": "content · position",
    "position_content": "position · content", "position_position": "position · position", "bias": "bias",
}  # fmt: skip


def write_inspection(found: Found, path: Path) -> None:
    """Write an inspection as one HTML file that needs no other file and no network.

    Args:
        found: Dictionary from :func:`attention_priors.lab.inspect.inspect_model`.
        path: Target file; its folder is created if missing.
    """
    results = inspection_results(found)
    chosen = Counter(shown.get("why") for shown in found["passkey"].get("maps", ()))
    page = render(
        "inspection.html", found=found, summary=inspection_summary(found), tables=inspection_tables(found),
        open=len(found["priors"]) <= _MOST_HEADS, scaled=_prior_is_scaled(found),
        linear="threshold" in found["additive"], ahead=drawn.keys_ahead_differ(results["prior"]),
        chosen=wording("inspected_maps", counts=chosen), figures=_figures(found, results),
    )  # fmt: skip
    write_bytes(Path(path), page.encode())


def inspection_results(found: Found) -> Results:
    """Return an inspection as the results of a study with one scheme, for figures of priors."""
    own = {"scheme": found["title"], "seed": 0}
    kinds = {"priors": "prior", "prior_terms": "prior_term", "logit_scales": "logit_scale"}
    rows = [{"row": kind, **row, **own} for section, kind in kinds.items() for row in found[section]]
    recipe = {"training": {"context_length": found["length"]}}
    study = {"row": "study", "format": FORMAT, "recipe": recipe}
    return Results.of([study, {"row": "scheme", "scheme": found["title"]}, *rows])


def inspection_summary(found: Found) -> str:
    """Summarize an inspection in a few sentences."""
    texts, asked = found["text"].get("heads"), found["passkey"].get("heads")
    roles = Counter(row["role"] for row in found["priors"])
    return wording(
        "inspection", found=found, roles=[f"{number} {role}" for role, number in roles.most_common()],
        sink=max(texts, key=lambda row: row["first"]) if texts else None,
        best=max(asked, key=lambda row: row["needle"]) if asked else None,
        share=float(np.mean([row["position_share"] for row in texts])) if texts else None,
    )  # fmt: skip


def _head(row: Mapping[str, Any]) -> str:
    return f"{row['layer']}.{row['head']}"


def _prior_is_scaled(found: Found) -> bool:
    return any(layer["scales_prior"] for layer in found["layers"])


def _figures(found: Found, results: Results) -> dict[str, list[dict[str, Any]]]:
    drawings = {
        "curves": (drawn.prior_curves(results["prior"], found["title"]), "Log-prior of each head against distance"),
        "terms": (drawn.prior_terms(results["prior_term"], found["title"]), "Terms of each head's log-prior"),
        "thetas": (drawn.thetas(results), "Shape β against θα of every Generalized Gaussian head"),
        "scales": (drawn.logit_scales(results), "Histogram of the heads' logit scales s"),
        "text": (layer_maps(found), "Maps of layers and heads: prior's share and weights on a text"),
    }
    shown = {kind: [embedded_figure(png(figure), f"{alt}.")] for kind, (figure, alt) in drawings.items() if figure}
    figures: dict[str, list[dict[str, Any]]] = defaultdict(list, shown)
    called = {_head(row): f"head {_head(row)}, {row['role']}" for row in found["priors"]}
    weights = {_head(row): percent(row["needle"]) for row in found["passkey"].get("heads", ())}
    for one in found["passkey"].get("maps", ()):
        name = called[_head(one)]
        alt = f"Attention map of {name}, on the passkey prompt: the question's last token gives "
        alt += f"{weights[_head(one)]} % of its weight to the pass key."
        figures["maps"].append(embedded_figure(png(attention_map(found["passkey"], one, name)), alt))
    return figures


# ---- tables


def inspection_tables(found: Found) -> dict[str, Table]:
    """Return every table with data, by name."""
    made = [_heads(found), _reach(found), _additive(found), _layers(found)]
    return {table.name: table for table in made if table.lines}


def _heads(found: Found) -> Table:
    """Return the table of heads: role, parameters, and attention on the texts."""
    asked = [{key: row[key] for key in ("layer", "head", "needle")} for row in found["passkey"].get("heads", ())]
    columns = ["layer", "head", "role", "prior", "parameters", "reach_at_length"]
    heads = pd.DataFrame(found["priors"], columns=columns).set_index(["layer", "head"])
    for rows in (found["text"].get("heads"), asked, found["logit_scales"]):
        heads = heads.join(pd.DataFrame(rows).set_index(["layer", "head"])) if rows else heads
    shown: dict[str, Any] = {"head": [f"{layer}.{head}" for layer, head in heads.index], "role": heads.role}
    if heads.prior.nunique() > 1:
        shown["prior"] = heads.prior.str.replace("_", " ")
    words = len(shown)
    # Put the most important columns first, because wide tables are cut off on the right.
    shown |= {heading: heads[name].map(percent) for heading, name in _FIRST.items() if name in heads}
    shown["90 % within, tokens"] = [str(reach[1]) for reach in heads.reach_at_length]
    for name in _parameters(heads.parameters):
        summand, _, parameter = name.rpartition(".")
        heading = f"{summand.replace('_', ' ')} {_HEADINGS.get(parameter, parameter)}".lstrip()
        shown[heading] = [quantity(own.get(name)) for own in heads.parameters]
    last = _LAST if "s" in heads else {heading: name for heading, name in _LAST.items() if heading != "γ"}
    shown |= {heading: heads[name].astype(float).map(quantity) for heading, name in last.items() if name in heads}
    shown |= {"first token, %": heads["first"].map(percent)} if "first" in heads else {}
    if "nothing" in heads and heads["nothing"].any():
        shown["null key, %"] = heads["nothing"].map(percent)
    if "forgotten" in heads and heads["forgotten"].notna().any():
        shown["forgets with a token, nats"] = heads["forgotten"].astype(float).map(quantity)
    about = wording("inspected_heads", found=found, scaled=_prior_is_scaled(found))
    return Table("heads", about, [*shown], [[*line] for line in zip(*shown.values(), strict=True)], words)


def _parameters(rows: Any) -> Iterator[str]:
    """Return the names of all parameters, without redundant ones of a Generalized Gaussian."""
    names = dict.fromkeys(name for own in rows for name in own)
    leads = [name.removesuffix("theta_alpha") for name in names if name.endswith("theta_alpha")]
    same = {lead + other for lead in leads for other in ("alpha",)}
    return (name for name in names if name not in same)


def _reach(found: Found) -> Table:
    """Return the table of each head's reach, by text length."""
    sizes = [*found["priors"][0]["reach"]]
    lines = [
        [_head(row), row["role"], *(" · ".join(map(str, row["reach"][size])) for size in sizes)]
        for row in found["priors"]
    ]
    about = wording("inspected_reach", found=found, scaled=_prior_is_scaled(found))
    header = ["head", "role", *(f"{int(size):,}" for size in sizes)]
    return Table("reach", about, header, lines, words=2)


def _additive(found: Found) -> Table:
    """Return the table of the logit terms of additive positions; without lines if there are none."""
    linear, lines, header = "threshold" in found["additive"], [], ["head", *_SUMMANDS.values()]
    for row in found["additive"].get("heads", ()):
        audit = [row["case"], quantity(row["slope"]), percent(row["skewed"]), percent(row["drowned"])] if linear else []
        lines.append([str(row["head"]), *(quantity(row[name]) for name in _SUMMANDS), *audit])
    header += ["case", "slope, nats per token", "skewed, %", "drowned, %"] if linear else []
    about = wording("inspected_additive", found=found, linear=linear) if lines else ""
    return Table("additive", about, header, lines)


def _layers(found: Found) -> Table:
    """Return the table of the modules that compute attention."""
    lines = []
    for number, layer in enumerate(found["layers"]):
        sees = "preceding tokens" if layer["causal"] else "all tokens"
        sees += ", within the model's own mask" if layer["own_mask"] else ""
        prior = "yes" if layer["has_prior"] else "uniform"
        beside = ", ".join(layer["beside"]) or "–"
        lines.append([str(number), layer["name"], sees, prior, beside, str(layer["heads"])])
    header = ["layer", "module", "sees", "prior", "also applied", "heads"]
    return Table("layers", wording("inspected_layers"), header, lines, words=5)
