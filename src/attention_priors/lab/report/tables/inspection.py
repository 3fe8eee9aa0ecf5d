"""Tables of what the heads of one model do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attention_priors.lab.report.numbers import percent, quantity
from attention_priors.lab.report.selections.heads import head_name
from attention_priors.lab.report.selections.results import Row
from attention_priors.lab.report.tables.grid import Grid

_SUMMANDS = {
    "content_content": "content · content",
    "content_position": "content · position",
    "position_content": "position · content",
    "position_position": "position · position",
    "bias": "bias",
}


def prior_is_scaled(found: Mapping[str, Any]) -> bool:
    """Whether a logit scale multiplies the prior of a layer."""
    return any(layer["scales_prior"] for layer in found["layers"])


def inspection_head_grid(found: Mapping[str, Any]) -> Grid:
    """Each head: in words, in parameters, and by what it does on the texts."""
    scales = {head_name(row): row["s"] for row in found["logit_scales"]}
    texts = {head_name(row): row for row in found["text"].get("heads", ())}
    asked = {head_name(row): row for row in found["passkey"].get("heads", ())}
    parameters: list[str] = list(dict.fromkeys(name for row in found["priors"] for name in row["parameters"]))
    # The others say the same of a Generalized Gaussian in other words.
    same = {
        name.removesuffix("theta_alpha") + other
        for name in parameters
        if name.endswith("theta_alpha")
        for other in ("alpha", "amplitude", "theta_beta")
    }
    parameters = [name for name in parameters if name not in same]
    columns: dict[str, Callable[[Row], str]] = {
        "head": head_name,
        "in words": lambda row: row["role"],
    }
    if len({row["prior"] for row in found["priors"]}) > 1:
        columns["prior"] = lambda row: row["prior"].replace("_", " ")
    words = len(columns)
    # What says most stands first: wide tables are cut off on the right.
    if asked:
        columns["pass key, %"] = lambda row: percent(asked[head_name(row)]["needle"])
    if texts:
        columns["prior's share, %"] = lambda row: percent(texts[head_name(row)]["position_share"])
    columns["90 % within, tokens"] = lambda row: str(row["reach_at_length"][1])
    for parameter in parameters:
        columns[_heading(parameter)] = lambda row, key=parameter: quantity(row["parameters"].get(key))
    if scales:
        columns["s"] = lambda row: quantity(scales.get(head_name(row)))
    if texts and scales:
        columns["γ"] = lambda row: quantity(texts[head_name(row)]["inverse_temperature"])
    if texts:
        columns["agreement, nats"] = lambda row: quantity(texts[head_name(row)]["agreement"])
        columns["mean distance, tokens"] = lambda row: quantity(texts[head_name(row)]["distance"])
        columns["first token, %"] = lambda row: percent(texts[head_name(row)]["first"])
    return Grid(
        stem="heads",
        caption=(
            "Heads are named layer.head, both from 0. In words, and 90 % within: of the prior alone"
            + (", multiplied by the logit scale as in attention" if prior_is_scaled(found) else "")
            + f", for the last query of {found['length']} tokens."
            + (
                f" {'γ, share' if scales else 'Share'}, agreement, distance and first token: on "
                f"{found['text']['tokens']} tokens."
                if texts
                else ""
            )
            + (
                " Pass key: weight that the last token of the question gives to the sentence with the key."
                if asked
                else ""
            )
            + _of_own_masks(found)
        ),
        header=list(columns),
        groups=_by_layer(found["priors"], lambda row: [write(row) for write in columns.values()]),
        words=words,
    )


def _of_own_masks(found: Mapping[str, Any]) -> str:
    """What words and reach, which are of priors alone, do not know of."""
    # Inspections of before this was looked at do not say.
    masked = sum(layer.get("own_mask", False) for layer in found["layers"])
    if not masked:
        return ""
    return (
        f" In {masked} of {len(found['layers'])} layers a mask of the model's own may hide more than this says: which "
        "they are is said with the layers."
    )


_HEADINGS: dict[str, str] = {
    "beta": "β",
    "mu": "μ",
    "theta_alpha": "θα",
}


def _heading(parameter: str) -> str:
    """A parameter's; of a sum's, with the summand's name."""
    summand, _, name = parameter.rpartition(".")
    return f"{summand.replace('_', ' ')} {_HEADINGS.get(name, name)}".lstrip()


def reach_grid(found: Mapping[str, Any]) -> Grid:
    """How far each head looks back, by the length of the text."""
    sizes = list(found["priors"][0]["reach"])
    return Grid(
        stem="reach",
        caption=(
            "How far back the last query must look for 50, 90 and 99 % of its prior, in tokens, by the length of the "
            "text. A reach that does not grow is a window; one that grows with the text is none."
            + (
                " Priors are multiplied by the logit scale, which depends on the length too."
                if prior_is_scaled(found)
                else ""
            )
            + _of_own_masks(found)
        ),
        header=["head", "in words", *(f"{int(size):,}".replace(",", " ") for size in sizes)],
        groups=_by_layer(
            found["priors"],
            lambda row: [head_name(row), row["role"], *(" · ".join(map(str, row["reach"][size])) for size in sizes)],
        ),
        words=2,
    )


def additive_grid(found: Mapping[str, Any]) -> Grid | None:
    """The summands of the logits of additive positions; None where there are none."""
    rows = found["additive"].get("heads")
    if rows is None:
        return None
    columns: dict[str, Callable[[Row], str]] = {
        words: lambda row, key=name: quantity(row[key]) for name, words in _SUMMANDS.items()
    }
    linear = "threshold" in found["additive"]
    if linear:
        columns |= {
            "case": lambda row: row["case"],
            "slope, nats per token": lambda row: quantity(row["slope"]),
            "skewed, %": lambda row: percent(row["skewed"]),
            "drowned, %": lambda row: percent(row["drowned"]),
        }
    return Grid(
        stem="additive",
        caption=(
            "How much each summand of the first layer's logits varies over the keys that a query sees: standard "
            f"deviation, in nats, mean over the queries of {found['additive']['tokens']} tokens. A summand that varies "
            "little has little to say in a softmax."
            + (" What the case, the slope, skewed and drowned mean is said below." if linear else "")
        ),
        header=["head", *columns],
        groups=[[[str(row["head"]), *(write(row) for write in columns.values())] for row in rows]],
        words=1,
    )


def layer_grid(found: Mapping[str, Any]) -> Grid:
    """The modules that compute attention."""
    return Grid(
        stem="layers",
        caption="The modules that compute attention, in the order in which they do.",
        header=["layer", "module", "sees", "prior", "heads"],
        groups=[
            [
                [
                    str(number),
                    layer["name"],
                    ("what precedes" if layer["causal"] else "everything")
                    + (", within a mask of the model's own" if layer.get("own_mask") else ""),
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
