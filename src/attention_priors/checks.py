"""Checks of constructor arguments. Each error names the argument, its value and the expected value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def check_positive_integers(**values: Any) -> None:
    """Raise a ValueError unless every value is an integer of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_above(bound: float, **values: Any) -> None:
    """Raise a ValueError unless every value is a finite number above ``bound``.

    Strings are rejected too: YAML reads ``1e4`` as a string.
    """
    for name, value in values.items():
        if not _is_finite(value) or not value > bound:
            raise ValueError(f"{name} must be a finite number above {bound:g}, got {value!r}")


def check_at_least(bound: float, **values: Any) -> None:
    """Raise a ValueError unless every value is a finite number of at least ``bound``."""
    for name, value in values.items():
        if not _is_finite(value) or not value >= bound:
            raise ValueError(f"{name} must be a finite number of at least {bound:g}, got {value!r}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_share(**values: Any) -> None:
    """Raise a ValueError unless every value is a number in [0, 1)."""
    for name, value in values.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def check_booleans(**values: Any) -> None:
    """Raise a ValueError unless every value is True or False. A quoted ``"no"`` from YAML is a string."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise a ValueError unless ``value`` is one of the allowed names."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
