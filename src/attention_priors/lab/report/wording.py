"""Formatting of numbers, captions and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import DictLoader, Environment, StrictUndefined


def percent(share: float) -> str:
    """Format a share as a whole percentage; 0 and 100 only where exact."""
    if 0 < share < 0.01:
        return "<1"
    return ">99" if 0.99 < share < 1 else f"{100 * share:.0f}"


def multiple(ratio: float) -> str:
    """Format a ratio with two significant digits and no exponent: ``0.4``, ``3.2``, ``51``, ``820``."""
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"


def quantity(value: float | None) -> str:
    """Format a number with three significant digits, or more from 1000 on; None and nan become an en dash.

    Values below 1e-12 become 0, because they are rounding errors in every unit of a report.
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) < 1e-12:
        return "0"
    return (f"{value:.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}").replace("-", "−")


def decimals(value: float, digits: int) -> str:
    """Format a number with a fixed number of decimals and a true minus sign, which 0 never has."""
    written = f"{value:.{digits}f}"
    return (written if float(written) else written.lstrip("-")).replace("-", "−")


def rough(value: float) -> str:
    """Format a large number with at most two significant digits."""
    return f"{float(f'{value:.1e}'):,.0f}" if value < 1e6 else f"{value:.0e}"


def duration(seconds: float | None) -> str:
    """Format a duration with units: ``41 s``, ``6 min 52 s``, ``2 h 5 min``."""
    if seconds is None or math.isnan(seconds):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def moment(timestamp: str) -> str:
    """Format an ISO 8601 time as a date: ``20 November 2026, 14:00 UTC``."""
    time = datetime.fromisoformat(timestamp)
    return f"{time.day} {time:%B %Y, %H:%M %Z}".rstrip()


def listing(items: Iterable[object]) -> str:
    """Join items with commas and "and": ``a``, ``a and b``, ``a, b and c``."""
    *first, last = [*map(str, items)] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 seed``, ``3 seeds``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@cache
def words() -> dict[str, Any]:
    """Return the content of ``wording.yaml``."""
    return yaml.safe_load(Path(__file__).with_name("wording.yaml").read_text(encoding="utf-8"))


def wording(name: str, **values: Any) -> str:
    """Render one of the texts of ``wording.yaml``.

    Raises:
        jinja2.UndefinedError: the text uses a name that ``values`` lacks.
    """
    return " ".join(_templates().get_template(name).render(**values).split())


@cache
def _templates() -> Environment:
    environment = Environment(loader=DictLoader(words()), undefined=StrictUndefined)
    environment.filters |= {"counted": counted, "listing": listing, "multiple": multiple, "percent": percent}
    return environment
