"""How numbers are written in tables, figures and text."""

from __future__ import annotations

import math
from datetime import datetime


def percent(share: float) -> str:
    """A share as a whole percentage; 0 and 100 only where they are exact."""
    if 0 < share < 0.01:
        return "<1"
    if 0.99 < share < 1:
        return ">99"
    return f"{100 * share:.0f}"


def multiple(ratio: float) -> str:
    """A ratio with two significant digits, without an exponent: ``0.4``, ``3.2``, ``51``, ``820``."""
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"


def quantity(value: float | None) -> str:
    """A number with three significant digits, more if it is 1000 or larger; an en dash where there is none.

    What is below 1e-12 is a rounding error of something that is 0, in whatever unit.
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) < 1e-12:
        return "0"
    return (f"{value:.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}").replace("-", "−")


def decimals(value: float, digits: int) -> str:
    """A number with so many decimals, by the sign that typesetters have for less than nothing; 0 has none."""
    written = f"{value:.{digits}f}"
    return (written if float(written) else written.lstrip("-")).replace("-", "−")


def duration(seconds: float | None) -> str:
    """A time as people say it: ``41 s``, ``6 min 52 s``, ``2 h 5 min``."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def moment(timestamp: str) -> str:
    """An ISO 8601 time for people: ``20 November 2026, 14:00 UTC``."""
    time = datetime.fromisoformat(timestamp)
    return f"{time.day} {time:%B %Y, %H:%M %Z}".rstrip()


def listing(items: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
