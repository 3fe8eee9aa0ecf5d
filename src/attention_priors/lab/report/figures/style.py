"""Style of figures: colour, marker and line style of each line, and common settings of all axes."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from attention_priors.lab.report.comparisons import overview
from attention_priors.lab.results import Results

# Okabe and Ito's colour-blind-safe colours, without yellow, which is invisible on white, and three of Paul Tol's.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#999933", "#7F6AB8",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "<", "X", ">", "h", "p")
LINE_STYLES = ("-", "--", "-.", ":")

WIDTH = 6.8
"""Width of a figure in inches; Matplotlib's 10 pt text then stays legible on a phone."""
GREY = "#666666"
_DOTS_PER_INCH = (120, 100, 80)
"""Candidate resolutions; a file uses the highest that keeps it small enough."""
_LARGEST_FILE = 100_000
"""Largest file size in bytes."""
_PALETTES = (128, 48)
"""Candidate numbers of colours; a file has fewer only if it is too large at every resolution."""


class Look(NamedTuple):
    """Style of a line, with Matplotlib's names."""

    color: str
    marker: str
    linestyle: str


def look(index: int) -> Look:
    """Return the look of the line with this index, from 0.

    Ten colours repeat with another line style, and eleven markers repeat independently, so lines of the same colour
    differ in both.
    """
    again, place = divmod(index, len(COLOURS))
    return Look(COLOURS[place], MARKERS[index % len(MARKERS)], LINE_STYLES[again % len(LINE_STYLES)])


def looks(results: Results) -> dict[str, Look]:
    """Return the look of each scheme by display order, with the schemes of the overview first."""
    names = dict.fromkeys([*overview(results), *results.names])
    return {name: look(index) for index, name in enumerate(names)}


def label(name: str) -> str:
    """Escape a name so that Matplotlib shows it literally."""
    # Matplotlib reads $...$ as mathematics and omits names that begin with _ from legends.
    escaped = name.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def blank(height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure of this size in inches, with constrained layout."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    return Figure(figsize=(width, height), facecolor="white", layout=layout)


def start(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Return a figure of this size in inches with one pair of axes."""
    figure = blank(height, width)
    axes = figure.add_subplot()
    tidy(axes)
    return figure, axes


def tidy(axes: Axes) -> None:
    """Keep only two spines and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)


def titled(figure: Figure, title: str) -> Figure:
    """Add a bold title at the left edge of a figure."""
    figure.suptitle(label(title), x=0.01, ha="left", fontweight="bold", fontsize=11)
    return figure


def png(figure: Figure, dots_per_inch: Sequence[int] = _DOTS_PER_INCH) -> bytes:
    """Return a drawing as a PNG file with a palette, if possible of at most 100 kB.

    Args:
        figure: Drawing.
        dots_per_inch: Candidate resolutions, from the finest.
    """
    content = b""
    for colours, resolution in itertools.product(_PALETTES, dots_per_inch):
        drawn, written = io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=resolution)
        palette = Image.open(drawn).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
        palette.save(written, "png", optimize=True)
        content = written.getvalue()
        if len(content) <= _LARGEST_FILE:
            break
    return content
