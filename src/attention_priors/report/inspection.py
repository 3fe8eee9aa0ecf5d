"""The page of ``attention-priors inspect``: what the heads of one model do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from attention_priors.files import write_bytes
from attention_priors.report.drawing import NothingToShowError
from attention_priors.report.figures import logit_scale_histogram, prior_curves, theta_scatter
from attention_priors.report.grids import Grid
from attention_priors.report.numbers import listing, percent, quantity
from attention_priors.report.prior_parts import prior_terms
from attention_priors.report.rendering import embedded_figure, render
from attention_priors.report.style import blank, label
from attention_priors.results_format import FORMAT, INSPECTION_FORMAT

_MOST_PIXELS = 430
"""Of an attention map's side: the largest of neighbouring weights stands for them, so that single columns stay lit."""
_MOST_HEADS = 48
"""In a table that stands open."""
_SUMMANDS = {
    "content_content": "content · content",
    "content_position": "content · position",
    "position_content": "position · content",
    "position_position": "position · position",
    "bias": "bias",
}

_PARTS = {"instruction": "instruction", "needle": "pass key", "filler": "filler", "question": "question"}

Row = Mapping[str, Any]


def write_inspection(found: Mapping[str, Any], path: Path) -> None:
    """Write what was found in a model as one HTML file that needs no other file and no network.

    Args:
        found: as :func:`attention_priors.inspection.inspect_model` returns it.
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
        heads=_head_grid(found),
        open=len(found["priors"]) <= _MOST_HEADS,
        reach=_reach_grid(found),
        additive=_additive_grid(found),
        layers=_layer_grid(found),
        figures=_figures(found),
    )
    write_bytes(Path(path), page.encode())


def _name(row: Row) -> str:
    return f"{row['layer']}.{row['head']}"


# ---- words


def inspection_summary(found: Mapping[str, Any]) -> str:
    """What was found, in a few sentences."""
    roles = Counter(row["role"] for row in found["priors"])
    kinds = listing([f"{number} {role}" for role, number in roles.most_common()])
    heads, layers = _count(len(found["priors"]), "head"), _count(len(found["layers"]), "layer")
    sentences = [f"{heads} in {layers}: {kinds}, for texts of {found['length']} tokens."]
    text = found["text"]
    if "heads" in text:
        share = float(np.mean([row["position_share"] for row in text["heads"]]))
        sink = max(text["heads"], key=lambda row: row["first"])
        sentences += [
            f"On {text['tokens']} tokens of {text['name']} the prior decides {percent(share)} % of where",
            f"attention lies, the content the rest; head {_name(sink)} gives the first token most,",
            f"{percent(sink['first'])} %.",
        ]
    passkey = found["passkey"]
    if "heads" in passkey:
        best = max(passkey["heads"], key=lambda row: row["needle"])
        digits, (start, stop) = len(passkey["key"]), passkey["filler"]
        sentences += [
            f"Asked for a pass key that stands before {stop - start} tokens of filler,",
            f"it gave {percent(passkey['answered'])} % of its answer's tokens;"
            if digits != len(passkey["answer_tokens"])
            else f"it gave {round(passkey['answered'] * digits)} of {digits} digits;",
            f"head {_name(best)} looked at it most, with {percent(best['needle'])} % of its weight.",
        ]
    return " ".join(sentences)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# ---- tables


def _head_grid(found: Mapping[str, Any]) -> Grid:
    scales = {_name(row): row["s"] for row in found["logit_scales"]}
    texts = {_name(row): row for row in found["text"].get("heads", ())}
    asked = {_name(row): row for row in found["passkey"].get("heads", ())}
    parameters: list[str] = list(dict.fromkeys(name for row in found["priors"] for name in row["parameters"]))
    if "theta_alpha" in parameters:
        # The others say the same of a Generalized Gaussian in other words.
        parameters = [name for name in parameters if name not in ("alpha", "amplitude", "theta_beta")]
    columns: dict[str, Callable[[Row], str]] = {
        "head": _name,
        "in words": lambda row: row["role"],
    }
    if len({row["prior"] for row in found["priors"]}) > 1:
        columns["prior"] = lambda row: row["prior"].replace("_", " ")
    words = len(columns)
    for parameter in parameters:
        columns[_HEADINGS.get(parameter, parameter)] = lambda row, key=parameter: quantity(row["parameters"].get(key))
    if scales:
        columns["s"] = lambda row: quantity(scales.get(_name(row)))
    columns["90 % within, tokens"] = lambda row: str(_reach(row, found["length"]))
    if texts:
        columns["prior's share, %"] = lambda row: percent(texts[_name(row)]["position_share"])
        columns["agreement, nats"] = lambda row: quantity(texts[_name(row)]["agreement"])
        columns["mean distance, tokens"] = lambda row: quantity(texts[_name(row)]["distance"])
        columns["first token, %"] = lambda row: percent(texts[_name(row)]["first"])
    if asked:
        columns["pass key, %"] = lambda row: percent(asked[_name(row)]["needle"])
    return Grid(
        stem="heads",
        caption=(
            "Heads are named layer.head, both from 0. In words, and 90 % within: of the prior alone, for the last "
            f"query of {found['length']} tokens."
            + (f" Share, agreement, distance and first token: on {found['text']['tokens']} tokens." if texts else "")
            + (
                " Pass key: weight that the last token of the question gives to the sentence with the key."
                if asked
                else ""
            )
        ),
        header=list(columns),
        groups=_by_layer(found["priors"], lambda row: [write(row) for write in columns.values()]),
        words=words,
    )


_HEADINGS: dict[str, str] = {
    "beta": "β",
    "mu": "μ",
    "theta_alpha": "θα",
}


def _reach(row: Row, length: int) -> int:
    """Within how many tokens nine tenths of a head's prior lie, at the length nearest to the described one."""
    nearest = min(row["reach"], key=lambda size: abs(math.log(int(size) / length)))
    return row["reach"][nearest][1]


def _reach_grid(found: Mapping[str, Any]) -> Grid:
    sizes = list(found["priors"][0]["reach"])
    return Grid(
        stem="reach",
        caption=(
            "How far back the last query must look for 50, 90 and 99 % of its prior, in tokens, by the length of the "
            "text. A reach that does not grow is a window; one that grows with the text is none."
        ),
        header=["head", "in words", *(f"{int(size):,}".replace(",", " ") for size in sizes)],
        groups=_by_layer(
            found["priors"],
            lambda row: [_name(row), row["role"], *(" · ".join(map(str, row["reach"][size])) for size in sizes)],
        ),
        words=2,
    )


def _additive_grid(found: Mapping[str, Any]) -> Grid | None:
    rows = found["additive"].get("heads")
    if rows is None:
        return None
    return Grid(
        stem="additive",
        caption=(
            "How much each summand of the first layer's logits varies over the keys that a query sees: standard "
            f"deviation, in nats, mean over the queries of {found['additive']['tokens']} tokens. A summand that varies "
            "little has little to say in a softmax."
        ),
        header=["head", *_SUMMANDS.values()],
        groups=[[[str(row["head"]), *(quantity(row[name]) for name in _SUMMANDS)] for row in rows]],
        words=1,
    )


def _layer_grid(found: Mapping[str, Any]) -> Grid:
    return Grid(
        stem="layers",
        caption="The modules that compute attention, in the order in which they do.",
        header=["layer", "module", "sees", "prior", "heads"],
        groups=[
            [
                [
                    str(number),
                    layer["name"],
                    "what precedes" if layer["causal"] else "everything",
                    "yes" if layer["has_prior"] else "uniform",
                    str(layer["heads"]),
                ]
                for number, layer in enumerate(found["layers"])
            ]
        ],
        words=4,
    )


def _by_layer(rows: Iterable[Row], line: Callable[[Row], list[str]]) -> list[list[list[str]]]:
    groups: dict[int, list[list[str]]] = {}
    for row in rows:
        groups.setdefault(row["layer"], []).append(line(row))
    return [*groups.values()]


# ---- figures


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
        ("text", lambda: _layer_maps(found), "Maps of layers and heads: what decides where attention lies on the text"),
    ):
        try:
            figures[kind] = [embedded_figure(draw(), f"{alt}.")]
        except NothingToShowError:
            figures[kind] = []
    roles = {_name(row): row["role"] for row in found["priors"]}
    weights = {_name(row): row["needle"] for row in found["passkey"].get("heads", ())}
    figures["maps"] = [
        embedded_figure(
            _attention_map(found["passkey"], shown, f"head {_name(shown)}, {roles[_name(shown)]}"),
            f"Attention map of head {_name(shown)}, {roles[_name(shown)]}, on the passkey prompt: the question's last "
            f"token gives {percent(weights[_name(shown)])} % of its weight to the pass key.",
        )
        for shown in found["passkey"].get("maps", ())
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


def _layer_maps(found: Mapping[str, Any]) -> Figure:
    rows = found["text"].get("heads")
    if rows is None:
        raise NothingToShowError("found['text'] must hold heads; there are none")
    panels = [
        ("the prior's share, %", {_name(row): 100 * row["position_share"] for row in rows}, (0, 100)),
        ("first token's weight, %", {_name(row): 100 * row["first"] for row in rows}, (0, 100)),
    ]
    asked = found["passkey"].get("heads")
    if asked:
        panels.append(("weight on the pass key, %", {_name(row): 100 * row["needle"] for row in asked}, (0, 100)))
    layers, heads = len(found["layers"]), max(layer["heads"] for layer in found["layers"])
    figure = blank(1.3 + 0.16 * max(layers, 6))
    grid: Any = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, (title, values, (low, high)) in zip(grid.flat, panels, strict=True):
        table = np.full((layers, heads), np.nan)
        for name, value in values.items():
            layer, head = map(int, name.split("."))
            table[layer, head] = value
        image = axes.imshow(table, cmap="viridis", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        axes.set_title(title, loc="left", fontsize=9.5)
        axes.set_xlabel("head", fontsize=9)
        for axis, size in ((axes.xaxis, heads), (axes.yaxis, layers)):
            axis.set_major_locator(FixedLocator(range(0, size, max(1, math.ceil(size / 8)))))
            axis.set_minor_locator(NullLocator())
        axes.tick_params(labelsize=8.5)
        figure.colorbar(image, ax=axes, shrink=0.85, location="bottom", pad=0.02).ax.tick_params(labelsize=8)
    grid[0, 0].set_ylabel("layer", fontsize=9)
    return figure


def _attention_map(passkey: Mapping[str, Any], shown: Mapping[str, Any], title: str) -> Figure:
    """The weights of one head over the prompt, and those that the question gives to the pass key, token by token."""
    weights = np.asarray(shown["weights"], dtype=np.float32)
    figure = blank(3.9)
    whole, closer = figure.subplots(1, 2, width_ratios=(1, 1))
    look: dict[str, Any] = {"cmap": "magma", "norm": PowerNorm(0.4, 0, 1), "interpolation": "nearest"}
    pooled, side = _pooled(weights)
    whole.imshow(pooled, extent=(0, side, side, 0), **look)
    for part in _PARTS:
        start = passkey[part][0]
        if start:
            whole.axvline(start, color="white", linewidth=0.5, alpha=0.5)
            whole.axhline(start, color="white", linewidth=0.5, alpha=0.5)
    ticks = [sum(passkey[part]) / 2 for part in ("needle", "filler")] + [float(passkey["question"][0])]
    names = [_PARTS[part] for part in ("needle", "filler", "question")]
    whole.set_xticks(ticks, names, fontsize=7.5)
    whole.set_yticks(ticks, names, fontsize=7.5)
    whole.set_title(f"{title}\nthe whole prompt: query below, key across", loc="left", fontsize=8.5)
    question, needle = slice(*passkey["question"]), slice(*passkey["needle"])
    image = closer.imshow(weights[question, needle], aspect="auto", **look)
    for axis, tokens in (
        (closer.yaxis, passkey["question_tokens"]),
        (closer.xaxis, passkey["needle_tokens"]),
    ):
        axis.set_ticks(range(len(tokens)), [label(token) for token in tokens], fontsize=6.5)
    closer.tick_params(axis="x", rotation=90)
    closer.set_title("the question's tokens,\nand how they look at the pass key's", loc="left", fontsize=8.5)
    bar = figure.colorbar(image, ax=[whole, closer], shrink=0.7, ticks=[0, 0.01, 0.1, 0.3, 1])
    bar.set_label("attention weight", fontsize=8)
    bar.ax.tick_params(labelsize=7.5)
    return figure


def _pooled(weights: np.ndarray) -> tuple[np.ndarray, int]:
    """A map small enough to be shown, and how many tokens its side stands for."""
    length = len(weights)
    block = math.ceil(length / _MOST_PIXELS)
    size = math.ceil(length / block)
    padded = np.zeros((size * block, size * block), np.float32)
    padded[:length, :length] = weights
    return padded.reshape(size, block, size, block).max((1, 3)), size * block
