"""Pages that hold everything they show, and pages that someone writes about results."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from attention_priors._io import write_bytes
from attention_priors.lab.inspect.priors import REACH_LENGTHS
from attention_priors.lab.report.wording import duration, moment, quantity


def render(template: str, **content: Any) -> str:
    """Fill one of the templates.

    Raises:
        jinja2.UndefinedError: The template names something that ``content`` lacks.
    """
    loader = PackageLoader("attention_priors.lab.report.pages")
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=loader, autoescape=True, **options)
    environment.filters |= {"duration": duration, "moment": moment, "quantity": quantity}
    return environment.get_template(template).render(**content)


def write_explorer(path: Path) -> None:
    """Write the page on which people drag the parameters of priors as one HTML file without a network or a server.

    It has about 5 MB: nearly all of them are plotly's code, which draws.

    Args:
        path: The file; its folder is made if it is not there.
    """
    from plotly.offline import get_plotlyjs  # takes long to import, and no other page needs it

    page = render("explorer.html", lengths=REACH_LENGTHS, plotly=get_plotlyjs())
    write_bytes(Path(path), page.encode())


def embedded_figure(drawing: bytes, alt: str) -> dict[str, Any]:
    """Return a PNG file for the macro ``picture``: as data, and in words."""
    return {"source": f"data:image/png;base64,{base64.b64encode(drawing).decode()}", "alt": alt}
