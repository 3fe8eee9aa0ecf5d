"""Which schemes stand together: those that differ along one axis alone, and those of a recipe's panels."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attention_priors.lab.results import Results

_SWEPT = "scheme"
"""The axis that names the scheme that a sweep varied, or the model that was extended."""


@dataclass(frozen=True)
class Comparison:
    """Schemes that are compared with each other.

    Attributes:
        axis: The axis along which they differ, or the title of a panel.
        values: What each scheme is called here; numbers rise, other values are in display order.
        elsewhere: Where the schemes stand on the axes on which other comparisons of this axis stand elsewhere.
        base: The scheme around which a sweep varied one axis at a time, if it is among them.
    """

    axis: str
    values: Mapping[str, str]
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    base: str | None = None

    @property
    def title(self) -> str:
        """``init``, or ``init (size=64)``."""
        stands = ", ".join(f"{axis}={value}" for axis, value in self.elsewhere.items())
        return f"{self.axis} ({stands})" if stands else self.axis


def comparisons(results: Results, axis: str | None = None) -> list[Comparison]:
    """Return every comparison of two schemes or more, along one axis or along all."""
    entries = [entry for entry in results.schemes if entry.get("axes")]
    axes = dict.fromkeys(name for entry in entries for name in entry["axes"] if axis in (None, name))
    return [one for name in axes for one in _along(entries, name)]


def _along(entries: list[Mapping[str, Any]], axis: str) -> list[Comparison]:
    groups: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for entry in entries:
        if axis in entry["axes"]:
            groups[_others(entry, axis)].append(entry)
    compared = {others: group for others, group in groups.items() if len(group) > 1}
    shared = set.intersection(*(set(others) for others in compared)) if compared else set()
    found = []
    for others, group in compared.items():
        values = {entry["scheme"]: entry["axes"][axis] for entry in group}
        if all(isinstance(value, (int, float)) for value in values.values()):
            values = dict(sorted(values.items(), key=lambda item: item[1]))
        bases = [entry["scheme"] for entry in group if axis not in (_SWEPT, "extension") and _is_base(entry)]
        base = bases[0] if bases else None
        named = {name: f"{value} (base)" if name == base else str(value) for name, value in values.items()}
        stands = {other: str(value) for other, value in others if (other, value) not in shared}
        found.append(Comparison(axis, named, stands, base))
    return found


def panels(results: Results) -> list[Comparison]:
    """Return the panels of a recipe, which names schemes by patterns.

    Where all extended models of a panel were one scheme before, they are called by the way of their extension.
    """
    entries = {entry["scheme"]: entry for entry in results.schemes}
    found = []
    for title, patterns in results.study["recipe"].get("panels", {}).items():
        shown = dict.fromkeys(name for pattern in patterns for name in fnmatch.filter(entries, pattern))
        origins = {name: entries[name].get("extended_from") for name in shown}
        by_way = len({*origins.values()} - {None}) == 1
        called = {
            name: str(entries[name]["axes"]["extension"]) if origin and by_way else name
            for name, origin in origins.items()
        }
        found += [Comparison(title, called)] if called else []
    return found


def overview(results: Results) -> list[str]:
    """Return the schemes that no sweep made, and those around which a sweep varied one axis at a time.

    The others are shown where they are compared: one figure of a whole sweep could not be read.
    """
    return [e["scheme"] for e in results.schemes if _SWEPT not in e.get("axes", {}) or _is_base(e)]


def _others(entry: Mapping[str, Any], axis: str) -> tuple[Any, ...]:
    # Before its extension, a model is as comparable as one that will not be extended.
    stands = entry["axes"].items() - {("extension", "before")}
    return tuple(sorted((other, value) for other, value in stands if other != axis))


def _is_base(entry: Mapping[str, Any]) -> bool:
    # Axes that a recipe's author wrote have no such scheme, and no base.
    return _SWEPT in entry["axes"] and entry["axes"][_SWEPT] in (entry["scheme"], entry.get("extended_from"))
