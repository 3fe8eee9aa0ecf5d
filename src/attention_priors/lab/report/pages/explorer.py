"""The prior explorer: one page on which people drag the parameters of priors, without a network or a server."""

from __future__ import annotations

from pathlib import Path

from plotly.offline import get_plotlyjs

from attention_priors._io import write_bytes
from attention_priors.lab.inspect.priors import REACH_LENGTHS
from attention_priors.lab.report.pages import render


def write_explorer(path: Path) -> None:
    """Write the explorer as one HTML file, of about 5 MB: nearly all of it is plotly's code, which draws.

    Args:
        path: the file; its folder is made if it is not there.
    """
    page = render("explorer.html", lengths=REACH_LENGTHS, plotly=get_plotlyjs())
    write_bytes(Path(path), page.encode())
