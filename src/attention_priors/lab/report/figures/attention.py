"""Attention weights and maps of one model, by layer and head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from attention_priors.lab.report.figures.layout import panel_grid
from attention_priors.lab.report.figures.scales import set_ticks
from attention_priors.lab.report.figures.style import COLOURS, blank, label, start, titled

_MOST_PIXELS = 430
"""Largest side of an attention map in pixels. Each pixel shows the maximum of its weights, so that single columns stay
visible."""

_MOST_LABELS = (22, 32)
"""Largest number of token labels along the side and the bottom of a map."""

_PARTS = {"instruction": "instruction", "needle": "pass key", "filler": "filler", "question": "question"}


def layer_maps(found: Mapping[str, Any]) -> Figure | None:
    """Draw layers against heads: share of the prior, and weight on the first token and on the pass key.

    Args:
        found: Dictionary from :func:`attention_priors.lab.inspect.inspect_model`.
    """
    rows, asked = found["text"].get("heads"), found["passkey"].get("heads")
    if rows is None:
        return None
    panels = [("the prior's share, %", rows, "position_share"), ("first token's weight, %", rows, "first")]
    panels += [("weight on the pass key, %", asked, "needle")] if asked else []
    layers, heads = len(found["layers"]), max(layer["heads"] for layer in found["layers"])
    figure, grid = panel_grid(len(panels), len(panels), 0.16 * max(layers, 6), base=1.3, sharey=True)
    for axes, (title, values, key) in zip(grid, panels, strict=True):
        table = np.full((layers, heads), np.nan)
        for row in values:
            table[row["layer"], row["head"]] = 100 * row[key]
        image = axes.imshow(table, cmap="viridis", vmin=0, vmax=100, aspect="auto", interpolation="nearest")
        axes.set_title(title, loc="left", fontsize=9.5)
        axes.set_xlabel("head", fontsize=9)
        for axis, size in ((axes.xaxis, heads), (axes.yaxis, layers)):
            set_ticks(axis, range(0, size, max(1, math.ceil(size / 8))))
        axes.tick_params(labelsize=8.5)
        figure.colorbar(image, ax=axes, shrink=0.85, location="bottom", pad=0.02).ax.tick_params(labelsize=8)
    grid[0].set_ylabel("layer", fontsize=9)
    return figure


def attention_map(passkey: Mapping[str, Any], shown: Mapping[str, Any], title: str) -> Figure:
    """Draw the weights of one head over the prompt, and from the question to the pass key.

    Args:
        passkey: Passkey part of an inspection.
        shown: One of its maps.
        title: Title of the figure.
    """
    weights = np.asarray(shown["weights"], dtype=np.float32)
    figure = blank(3.9, 8.4)  # wide enough for the pass key's tokens side by side
    closer, whole = figure.subplots(1, 2, width_ratios=(1.35, 1))  # a narrow window shows the left part
    look: dict[str, Any] = {"cmap": "magma", "norm": PowerNorm(0.4, 0, 1), "interpolation": "nearest"}
    pooled, side = _pooled(weights)
    whole.imshow(pooled, extent=(0, side, side, 0), **look)
    for part in _PARTS:
        if begin := passkey[part][0]:
            whole.axvline(begin, color="white", linewidth=0.5, alpha=0.5)
            whole.axhline(begin, color="white", linewidth=0.5, alpha=0.5)
    ticks = [sum(passkey[part]) / 2 for part in ("needle", "filler")] + [float(passkey["question"][0])]
    names = [_PARTS[part] for part in ("needle", "filler", "question")]
    whole.set_xticks(ticks, names, fontsize=7.5)
    whole.set_yticks(ticks, names, fontsize=7.5)
    whole.set_title("whole prompt\n(rows: queries, columns: keys)", loc="left", fontsize=8.5)
    question, needle = slice(*passkey["question"]), slice(*passkey["needle"])
    image = closer.imshow(weights[question, needle], aspect="auto", **look)
    sides = ((closer.yaxis, "question", _MOST_LABELS[0]), (closer.xaxis, "needle", _MOST_LABELS[1]))
    for axis, part, most in sides:
        tokens = passkey[f"{part}_tokens"]
        # If there are many tokens, as with a character tokenizer, only some are labelled.
        named = range(0, len(tokens), math.ceil(len(tokens) / most))
        axis.set_ticks(named, [label(tokens[place]) for place in named], fontsize=7)
    closer.tick_params(axis="x", rotation=90)
    closer.set_title(f"{title}\nattention from the question to the pass key", loc="left", fontsize=8.5)
    bar = figure.colorbar(image, ax=[closer, whole], shrink=0.7, ticks=[0, 0.01, 0.1, 0.3, 1])
    bar.set_label("attention weight", fontsize=8)
    bar.ax.tick_params(labelsize=7.5)
    return figure


def last_weights(passkey: Mapping[str, Any], shown: Mapping[str, Any], title: str) -> Figure:
    """Draw the weights of one head from the last token of the prompt on every token, with the place of the pass key.

    Args:
        passkey: Passkey part of an inspection.
        shown: One of its maps.
        title: Title of the figure.
    """
    weights = np.asarray(shown["weights"], dtype=np.float32)[-1]
    figure, axes = start(3.0)
    begin, end = passkey["needle"]
    axes.axvspan(begin, end, color=COLOURS[4], alpha=0.3, linewidth=0)
    axes.vlines(np.arange(len(weights)), 0, weights, color=COLOURS[0], linewidth=1.5)
    axes.annotate("pass key", (end, 0.9), (6, 0), textcoords="offset points", va="center")
    axes.set(xlim=(0, len(weights)), ylim=(0, 1), xlabel="position in the prompt, tokens", ylabel="attention weight")
    return titled(figure, title)


def _pooled(weights: np.ndarray) -> tuple[np.ndarray, int]:
    """Return a map of displayable size, and the number of tokens along its side."""
    block = math.ceil(len(weights) / _MOST_PIXELS)
    size = math.ceil(len(weights) / block)
    padded = np.zeros((size * block, size * block), np.float32)
    padded[: len(weights), : len(weights)] = weights
    return padded.reshape(size, block, size, block).max((1, 3)), size * block
