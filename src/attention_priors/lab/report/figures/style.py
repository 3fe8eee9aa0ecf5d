"""How figures look: one colour, marker and line style for each line, and what all axes have in common."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from attention_priors.lab.report.selections.axes import overview
from attention_priors.lab.report.selections.results import Results, scheme_names

# Okabe and Ito's colour-blind-safe colours, without yellow, which is lost on white; and three of Paul Tol's.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#999933", "#7F6AB8",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "<", "X", ">", "h", "p")
LINE_STYLES = ("-", "--", "-.", ":")

WIDTH = 6.8
"""Inches; matplotlib's 10 pt text is then still legible on a phone."""
FAINT = "#dddddd"
GREY = "#666666"
DOTS_PER_INCH = 160


class Look(NamedTuple):
    """What a scheme is drawn with; the names are matplotlib's."""

    color: str
    marker: str
    linestyle: str


def look(index: int) -> Look:
    """The look of the line at a place, from 0.

    Ten colours come back with another line style, and eleven markers run alongside, so lines that share a
    colour differ in both.
    """
    return Look(
        COLOURS[index % len(COLOURS)],
        MARKERS[index % len(MARKERS)],
        LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)],
    )


def looks(results: Results) -> dict[str, Look]:
    """The look of each scheme, by its place in ``results['schemes']``, those of the overview first."""
    names = dict.fromkeys([*overview(results), *scheme_names(results)])
    return {name: look(index) for index, name in enumerate(names)}


def label(name: str) -> str:
    """A scheme's name as matplotlib must be given it to show it as it is."""
    # Matplotlib reads $...$ as mathematics and leaves names that begin with _ out of legends.
    escaped = name.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def blank(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, in inches, whose parts make room for each other."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    return Figure(figsize=(width, height), facecolor="white", layout=layout)


def tidy(axes: Axes) -> None:
    """Two spines and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)


def png(figure: Figure) -> bytes:
    """A drawing as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()


def thin(ticks: Sequence[float], at_most: int) -> list[float]:
    """Ticks far enough apart on a log axis for ``at_most`` labels; the first always stays."""
    apart = math.log2(ticks[-1] / ticks[0]) / at_most if len(ticks) > 1 else 0
    kept = [ticks[0]] if ticks else []
    for tick in ticks:
        if math.log2(tick / kept[-1]) > apart:
            kept.append(tick)
    return kept
