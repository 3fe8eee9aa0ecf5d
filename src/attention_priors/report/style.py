"""How a scheme looks: one colour, marker and line style, the same in every figure."""

from __future__ import annotations

from typing import NamedTuple

from attention_priors.report.results import Results, scheme_names

# Okabe and Ito's colour-blind-safe colours, without yellow, which is lost on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "<", "X", ">", "h", "p")
LINE_STYLES = ("-", "--", "-.", ":")


class Look(NamedTuple):
    """What a scheme is drawn with; the names are matplotlib's."""

    color: str
    marker: str
    linestyle: str


def looks(results: Results) -> dict[str, Look]:
    """The look of each scheme, by its place in ``results['schemes']``.

    Seven colours come back with another line style, and eleven markers run alongside, so schemes that share
    a colour differ in both.
    """
    return {
        name: Look(
            COLOURS[index % len(COLOURS)],
            MARKERS[index % len(MARKERS)],
            LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)],
        )
        for index, name in enumerate(scheme_names(results))
    }


def label(name: str) -> str:
    """A scheme's name as matplotlib must be given it to show it as it is."""
    # Matplotlib reads $...$ as mathematics and leaves names that begin with _ out of legends.
    escaped = name.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped
