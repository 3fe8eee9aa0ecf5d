"""Rendering of self-contained HTML pages."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from attention_priors._io import write_bytes
from attention_priors.lab.inspect.priors import REACH_LENGTHS
from attention_priors.lab.report.wording import duration, moment, quantity


def render(template: str, **content: Any) -> str:
    """Render a template.

    Raises:
        jinja2.UndefinedError: the template uses a name that ``content`` lacks.
    """
    loader = PackageLoader("attention_priors.lab.report.pages")
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=loader, autoescape=True, **options)
    environment.filters |= {"duration": duration, "moment": moment, "quantity": quantity}
    return environment.get_template(template).render(**content)


def write_explorer(path: Path) -> None:
    """Write an interactive page for exploring priors as one HTML file that needs no network or server.

    The file has about 5 MB, almost all of which is plotly's code.

    Args:
        path: Target file; its folder is created if missing.
    """
    from plotly.offline import get_plotlyjs  # slow import that no other page needs

    page = render("explorer.html", lengths=REACH_LENGTHS, plotly=get_plotlyjs())
    write_bytes(Path(path), page.encode())


def embedded_figure(drawing: bytes, alt: str) -> dict[str, Any]:
    """Return an embedded PNG file with its alternative text, for the macro ``picture``."""
    return {"source": f"data:image/png;base64,{base64.b64encode(drawing).decode()}", "alt": alt}
