"""How figures look: one colour, marker and line style for each line, and what all axes have in common."""

from __future__ import annotations

import io
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from attention_priors.lab.report.comparisons import overview
from attention_priors.lab.results import Results

# Okabe and Ito's colour-blind-safe colours, without yellow, which is lost on white; and three of Paul Tol's.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#999933", "#7F6AB8",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "<", "X", ">", "h", "p")
LINE_STYLES = ("-", "--", "-.", ":")

WIDTH = 6.8
"""Inches. Matplotlib's 10 pt text is then still legible on a phone."""
GREY = "#666666"
_DOTS_PER_INCH = (120, 100, 80)
"""Resolutions of a file: the highest with which it is small enough."""
_LARGEST_FILE = 100_000
"""Bytes."""
_PALETTE = 256
"""Colours of a file. With more, files grow and look the same."""


class Look(NamedTuple):
    """What a line is drawn with; the names are matplotlib's."""

    color: str
    marker: str
    linestyle: str


def look(index: int) -> Look:
    """Return the look of the line at a place, from 0.

    Ten colours come back with another line style, and eleven markers run alongside, so lines that share a
    colour differ in both.
    """
    again, place = divmod(index, len(COLOURS))
    return Look(COLOURS[place], MARKERS[index % len(MARKERS)], LINE_STYLES[again % len(LINE_STYLES)])


def looks(results: Results) -> dict[str, Look]:
    """Return the look of each scheme, by its place in display order, the schemes of the overview first."""
    names = dict.fromkeys([*overview(results), *results.names])
    return {name: look(index) for index, name in enumerate(names)}


def label(name: str) -> str:
    """Escape a name so that matplotlib shows it as it is."""
    # Matplotlib reads $...$ as mathematics and leaves names that begin with _ out of legends.
    escaped = name.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def blank(height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure, in inches, whose parts make room for each other."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    return Figure(figsize=(width, height), facecolor="white", layout=layout)


def start(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, in inches."""
    figure = blank(height, width)
    axes = figure.add_subplot()
    tidy(axes)
    return figure, axes


def tidy(axes: Axes) -> None:
    """Leave two spines and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)


def titled(figure: Figure, title: str) -> Figure:
    """Write a bold title at the left edge of a figure."""
    figure.suptitle(label(title), x=0.01, ha="left", fontweight="bold", fontsize=11)
    return figure


def png(figure: Figure) -> bytes:
    """Return a drawing as a PNG file with a palette, of at most 100 kB where that can be had."""
    content = b""
    for resolution in _DOTS_PER_INCH:
        drawn, written = io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=resolution)
        palette = Image.open(drawn).convert("RGB").quantize(_PALETTE, dither=Image.Dither.NONE)
        palette.save(written, "png", optimize=True)
        content = written.getvalue()
        if len(content) <= _LARGEST_FILE:
            break
    return content
