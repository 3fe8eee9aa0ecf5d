"""Groups of schemes to compare: schemes that differ along one axis, and the panels of a recipe."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attention_priors.lab.results import Results

_SWEPT = "scheme"
"""Axis of the scheme that a sweep varied, or of the model that was extended."""


@dataclass(frozen=True)
class Comparison:
    """Group of schemes to compare with each other.

    Attributes:
        axis: Axis along which the schemes differ, or title of a panel.
        values: Label of each scheme. Numbers are in rising order, other values in display order.
        elsewhere: Values on other axes, to distinguish comparisons along the same axis. Empty if there is only one.
        base: Scheme around which a sweep varied one axis at a time, if it belongs to the group.
    """

    axis: str
    values: Mapping[str, str]
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    base: str | None = None

    @property
    def title(self) -> str:
        """Title such as ``init`` or ``init (size=64)``."""
        stands = ", ".join(f"{axis}={value}" for axis, value in self.elsewhere.items())
        return f"{self.axis} ({stands})" if stands else self.axis


def comparisons(results: Results, axis: str | None = None) -> list[Comparison]:
    """Return every comparison of at least two schemes, along one axis or along all."""
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
    """Return the panels of a recipe, which selects schemes by patterns.

    Labels leave out what all schemes of the panel share, from a comma or plus on, such as ``"+SSMax"``. Labels of
    extended models name their scheme and their extension, but leave out what all of them share, unless the panel shows
    their scheme too.
    """
    entries = {entry["scheme"]: entry for entry in results.schemes}
    found = []
    for title, patterns in results.study["recipe"].get("panels", {}).items():
        shown = dict.fromkeys(name for pattern in patterns for name in fnmatch.filter(entries, pattern))
        extended = [name for name in shown if "extended_from" in entries[name]]
        origins = [str(entries[name]["extended_from"]) for name in extended]
        ways = [str(entries[name]["axes"]["extension"]) for name in extended]
        if len({*origins}) == 1:
            labels = ways
        elif len({*ways}) == 1 and not {*origins} & {*shown}:
            labels = origins
        else:
            labels = [f"{origin}: {way}" for origin, way in zip(origins, ways, strict=True)]
        ending = _shared_ending([name for name in shown if name not in extended])
        called = {name: name.removesuffix(ending) for name in shown} | dict(zip(extended, labels, strict=True))
        found += [Comparison(title, called)] if called else []
    return found


def _shared_ending(names: list[str]) -> str:
    """Return the longest ending from a comma or plus on that several names share; empty without one."""
    endings = [names[0][at.start() :] for at in re.finditer("[,+]", names[0])] if len(names) > 1 else []
    return next((ending for ending in endings if all(name.endswith(ending) for name in names)), "")


def family(name: str) -> str:
    """Return the beginning of a scheme's name, which its variants share: up to a comma or plus."""
    return re.split("[,+]", name)[0]


def overview(results: Results) -> list[str]:
    """Return the schemes outside sweeps, and the base schemes of sweeps that vary one axis at a time.

    All other schemes appear in comparisons, because a figure of a whole sweep would be unreadable.
    """
    return [e["scheme"] for e in results.schemes if _SWEPT not in e.get("axes", {}) or _is_base(e)]


def trials(results: Results) -> dict[tuple[str, bool], dict[str, str]]:
    """Return the trials of each scheme of a sweep without a base, apart for models without and with a logit scale.

    Returns:
        For each scheme and whether its trials have a logit scale: the settings of each trial, by its name.
    """
    found: dict[tuple[str, bool], dict[str, str]] = defaultdict(dict)
    swept = [entry for entry in results.schemes if _SWEPT in entry.get("axes", {}) and "extended_from" not in entry]
    if not any(map(_is_base, swept)):
        for entry in swept:
            scaled = bool(results.study["recipe"]["schemes"][entry["scheme"]].get("logit_scale"))
            settings = ", ".join(f"{axis}={value}" for axis, value in entry["axes"].items() if axis != _SWEPT)
            found[entry["axes"][_SWEPT], scaled][entry["scheme"]] = settings
    return found


def _others(entry: Mapping[str, Any], axis: str) -> tuple[Any, ...]:
    # A model before its extension is comparable with models that are never extended.
    stands = entry["axes"].items() - {("extension", "before")}
    return tuple(sorted((other, value) for other, value in stands if other != axis))


def _is_base(entry: Mapping[str, Any]) -> bool:
    # Axes written by the author of a recipe have no base.
    return _SWEPT in entry["axes"] and entry["axes"][_SWEPT] in (entry["scheme"], entry.get("extended_from"))
