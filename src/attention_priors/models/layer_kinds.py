"""Layers of several kinds: a pattern of names, and a description of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def check_layer_kinds(pattern: Any, kinds: Any, parts: Sequence[str]) -> None:
    """Raise a ValueError unless both are None, or the pattern names every kind and each describes some of the parts.

    Args:
        pattern: ``layer_pattern``, names of kinds.
        kinds: ``layer_kinds``, the descriptions by name.
        parts: names that a description may contain.
    """
    if (pattern is None) != (kinds is None):
        raise ValueError(
            f"layer_pattern names the kinds that layer_kinds describes; got layer_pattern={pattern!r} and "
            f"layer_kinds={kinds!r}"
        )
    if pattern is None:
        return
    if not isinstance(pattern, list | tuple) or not pattern or not isinstance(kinds, Mapping):
        raise ValueError(f"layer_pattern must be a list, layer_kinds a mapping, got {pattern!r} and {kinds!r}")
    if {*pattern} != {*kinds}:
        raise ValueError(
            f"layer_pattern must name every kind in layer_kinds, {[*kinds]}, and no other, got {pattern!r}"
        )
    for name, kind in kinds.items():
        if not isinstance(kind, Mapping) or not {*kind} <= {*parts}:
            raise ValueError(f"layer_kinds[{name!r}] may describe {', '.join(parts)}; got {kind!r}")


def kind_of_layer(
    pattern: Sequence[str] | None, kinds: Mapping[str, Mapping[str, Any]] | None, index: int
) -> Mapping[str, Any]:
    """Return the description of one layer's kind. The pattern repeats from the first layer on."""
    return {} if pattern is None or kinds is None else kinds[pattern[index % len(pattern)]]
