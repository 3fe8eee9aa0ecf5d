"""Which schemes differ along one axis alone, as a sweep makes them."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from attention_priors.lab.report.selections.results import Results

_SWEPT = "scheme"
"""The axis that says which scheme a sweep multiplied, or which model was extended."""
_NEVER_BASE = (_SWEPT, "extension")


@dataclass(frozen=True)
class Comparison:
    """Schemes that differ in their value on one axis, and on no other.

    Attributes:
        axis: The axis.
        values: What the value of each scheme is called; numbers rise, other values are in display order.
        elsewhere: Where the schemes stand on the axes on which other comparisons of this axis stand elsewhere.
        base: The scheme around which a sweep varied one axis at a time, if it is one of these.
    """

    axis: str
    values: dict[str, str]
    elsewhere: dict[str, str]
    base: str | None = None

    @property
    def title(self) -> str:
        """``init``, or ``init (size=64)``."""
        stands = ", ".join(f"{axis}={value}" for axis, value in self.elsewhere.items())
        return f"{self.axis} ({stands})" if stands else self.axis


def comparisons(results: Results) -> list[Comparison]:
    """Every comparison of two schemes or more, axis by axis."""
    entries = [entry for entry in results["schemes"] if entry.get("axes")]
    axes = list(dict.fromkeys(axis for entry in entries for axis in entry["axes"]))
    found = []
    for axis in axes:
        groups: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        for entry in entries:
            if axis in entry["axes"]:
                groups[_others(entry, axis)].append(entry)
        compared = {others: group for others, group in groups.items() if len(group) > 1}
        shared = set.intersection(*(set(others) for others in compared)) if compared else set()
        for others in compared:
            values = {entry["name"]: entry["axes"][axis] for entry in compared[others]}
            if all(isinstance(value, (int, float)) for value in values.values()):
                values = dict(sorted(values.items(), key=lambda item: item[1]))
            bases = (entry["name"] for entry in compared[others] if axis not in _NEVER_BASE and _is_base(entry))
            base = next(bases, None)
            found.append(
                Comparison(
                    axis,
                    {name: f"{value} (base)" if name == base else f"{value}" for name, value in values.items()},
                    {other: str(value) for other, value in others if (other, value) not in shared},
                    base,
                )
            )
    return found


def panels(results: Results) -> list[Comparison]:
    """What the recipe wants to be shown together: schemes by patterns of their names, a comparison for each panel.

    Where all that were extended in a panel were one scheme before, they are called by the ways alone.
    """
    entries = {entry["name"]: entry for entry in results["schemes"]}
    found = []
    for title, patterns in results["recipe"].get("panels", {}).items():
        shown = dict.fromkeys(name for pattern in patterns for name in fnmatch.filter(entries, pattern))
        if shown:
            origins = {entries[name]["extended_from"] for name in shown if entries[name].get("extended_from")}
            found.append(Comparison(title, {name: _called(entries[name], len(origins) == 1) for name in shown}, {}))
    return found


def _called(entry: dict[str, Any], by_its_way: bool) -> str:
    return str(entry["axes"]["extension"]) if by_its_way and entry.get("extended_from") else entry["name"]


def overview(results: Results) -> list[str]:
    """The schemes that no sweep has made, and those that a sweep varied one axis at a time.

    The others are shown where they are compared: all of a sweep in one figure could not be read.
    """
    return [entry["name"] for entry in results["schemes"] if _SWEPT not in entry.get("axes", {}) or _is_base(entry)]


def _others(entry: dict[str, Any], axis: str) -> tuple[Any, ...]:
    # Before its extension, a model is as comparable as one that will not be extended.
    stands = {other: value for other, value in entry["axes"].items() if (other, value) != ("extension", "before")}
    return tuple(sorted((other, value) for other, value in stands.items() if other != axis))


def _is_base(entry: dict[str, Any]) -> bool:
    """Whether a sweep varied one axis at a time around this scheme: it keeps the scheme's own name."""
    # Axes that a recipe's author wrote have no such scheme, and no base.
    return _SWEPT in entry["axes"] and entry["axes"][_SWEPT] in (entry["name"], entry.get("extended_from"))
