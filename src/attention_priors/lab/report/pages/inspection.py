"""The page of ``attention-priors inspect``: what the heads of one model do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attention_priors._io import write_bytes
from attention_priors.lab.report.figures.attention_maps import attention_map, layer_maps
from attention_priors.lab.report.figures.comparison import logit_scale_histogram, prior_curves, theta_scatter
from attention_priors.lab.report.figures.drawing import NothingToShowError
from attention_priors.lab.report.figures.prior_parts import prior_terms
from attention_priors.lab.report.figures.style import png
from attention_priors.lab.report.numbers import listing, percent
from attention_priors.lab.report.pages.rendering import embedded_figure, render
from attention_priors.lab.report.selections.heads import head_name, keys_ahead
from attention_priors.lab.report.tables.inspection import (
    additive_grid,
    inspection_head_grid,
    layer_grid,
    prior_is_scaled,
    reach_grid,
)
from attention_priors.lab.results_format import FORMAT, INSPECTION_FORMAT

_MOST_HEADS = 48
"""In a table that stands open."""


def write_inspection(found: Mapping[str, Any], path: Path) -> None:
    """Write what was found in a model as one HTML file that needs no other file and no network.

    Args:
        found: as :func:`attention_priors.lab.inspect.inspect_model` returns it.
        path: the file; its folder is made if it is not there.

    Raises:
        ValueError: ``found`` is of an unknown format.
    """
    if found.get("format") != INSPECTION_FORMAT:
        got = found.get("format")
        raise ValueError(f"found['format'] must be {INSPECTION_FORMAT}, the only one this version reads; it is {got!r}")
    page = render(
        "inspection.html",
        found=found,
        summary=inspection_summary(found),
        heads=inspection_head_grid(found),
        open=len(found["priors"]) <= _MOST_HEADS,
        reach=reach_grid(found),
        additive=additive_grid(found),
        layers=layer_grid(found),
        scaled=prior_is_scaled(found),
        linear="threshold" in found["additive"],
        ahead=any(keys_ahead(row) != row["log_prior"] for row in found["priors"]),
        chosen=_chosen(found["passkey"].get("maps", ())),
        figures=_figures(found),
    )
    write_bytes(Path(path), page.encode())


def inspection_summary(found: Mapping[str, Any]) -> str:
    """What was found, in a few sentences."""
    roles = Counter(row["role"] for row in found["priors"])
    kinds = listing([f"{number} {role}" for role, number in roles.most_common()])
    heads, layers = _count(len(found["priors"]), "head"), _count(len(found["layers"]), "layer")
    sentences = [f"{heads} in {layers}: {kinds}, for texts of {found['length']} tokens."]
    text = found["text"]
    if "heads" in text:
        sink = max(text["heads"], key=lambda row: row["first"])
        sentences += [
            f"On {text['tokens']} tokens of {text['name']} {_decided(found)};",
            f"head {head_name(sink)} gives the first token most, {percent(sink['first'])} %.",
        ]
    passkey = found["passkey"]
    if "heads" in passkey:
        best = max(passkey["heads"], key=lambda row: row["needle"])
        digits, (start, stop) = len(passkey["key"]), passkey["filler"]
        sentences += [
            f"Asked for a pass key that stands before {stop - start} tokens of filler,",
            f"it named {percent(passkey['answered'])} % of its answer's tokens,"
            if digits != len(passkey["answer_tokens"])
            else f"it named {round(passkey['answered'] * digits)} of {digits} digits,",
            "each after the right ones before it;",
            f"head {head_name(best)} looked at it most, with {percent(best['needle'])} % of its weight.",
        ]
    return " ".join(sentences)


def _decided(found: Mapping[str, Any]) -> str:
    """What decides where attention lies, on the text."""
    others = "" if found["positions"] == "none" else f" (which knows of places by itself: {found['positions']})"
    if not any(layer["has_prior"] for layer in found["layers"]):
        return f"the content decides where attention lies{others}, as there is no prior"
    share = float(np.mean([row["position_share"] for row in found["text"]["heads"]]))
    return (
        f"the prior decides {percent(share)} % of where attention lies, mean over heads, the content{others} the rest"
    )


def _chosen(maps: Iterable[Mapping[str, Any]]) -> str:
    """Whose maps are shown; nothing of those that were chosen before this was noted."""
    counts = Counter(shown.get("why") for shown in maps)
    words = {
        "named": "of heads that were named",
        "most": "of the heads that look at the pass key most",
        "kind": "of other kinds of heads (of each kind, the one that looks at it most)",
        "least": "of the heads that look at it least",
    }
    groups = [f"{counts[why]} {what}" for why, what in words.items() if counts[why]]
    return f"The maps, in this order: {listing(groups)}." if groups else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _figures(found: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    results = _as_results(found)
    scheme = found["title"]
    figures: dict[str, list[dict[str, Any]]] = {}
    for kind, draw, alt in (
        ("curves", lambda: prior_curves(results, scheme), "Log-prior of each head against distance"),
        ("terms", lambda: prior_terms(results, scheme), "Summands of each head's log-prior"),
        (
            "thetas",
            lambda: theta_scatter(results),
            "Shape β against θα of every Generalized Gaussian head",
        ),
        ("scales", lambda: logit_scale_histogram(results), "Histogram of the heads' logit scales s"),
        ("text", lambda: layer_maps(found), "Maps of layers and heads: what decides where attention lies on the text"),
    ):
        try:
            figures[kind] = [embedded_figure(png(draw()), f"{alt}.")]
        except NothingToShowError:
            figures[kind] = []
    roles = {head_name(row): row["role"] for row in found["priors"]}
    weights = {head_name(row): row["needle"] for row in found["passkey"].get("heads", ())}
    figures["maps"] = [
        embedded_figure(
            png(attention_map(found["passkey"], shown, f"head {name}, {roles[name]}")),
            f"Attention map of head {name}, {roles[name]}, on the passkey prompt: the question's last token gives "
            f"{percent(weights[name])} % of its weight to the pass key.",
        )
        for name, shown in ((head_name(shown), shown) for shown in found["passkey"].get("maps", ()))
    ]
    return figures


def _as_results(found: Mapping[str, Any]) -> dict[str, Any]:
    """As the results of a comparison of one scheme, which the figures of priors are made of."""
    mine = {"scheme": found["title"], "seed": 0}
    return {
        "format": FORMAT,
        "recipe": {"training": {"context_length": found["length"]}},
        "schemes": [{"name": found["title"]}],
        "seeds": [0],
        **{
            section: [{**row, **mine} for row in found[section]]
            for section in ("priors", "prior_terms", "logit_scales")
        },
    }
