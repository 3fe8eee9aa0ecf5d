"""HTML pages that hold everything they show: templates, and figures as data."""

from __future__ import annotations

import base64
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from attention_priors.lab.report.numbers import duration, moment, multiple, percent, quantity


def render(template: str, **content: Any) -> str:
    """A page from one of the templates beside this file.

    Raises:
        jinja2.UndefinedError: the template names something that ``content`` lacks.
    """
    environment = Environment(
        loader=PackageLoader("attention_priors.lab.report.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration,
        "moment": moment,
        "multiple": multiple,
        "percent": percent,
        "quantity": quantity,
    }
    return environment.get_template(template).render(**content)


def embedded_figure(drawing: bytes, alt: str) -> dict[str, Any]:
    """A PNG file for the macro ``picture``: as data, and in words."""
    return {"source": f"data:image/png;base64,{base64.b64encode(drawing).decode()}", "alt": alt}
