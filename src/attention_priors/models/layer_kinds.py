"""Per-layer settings: a repeating pattern of layer kinds, and a description of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def check_layer_kinds(pattern: Any, kinds: Any, parts: Sequence[str], share_prior: bool) -> None:
    """Raise a ValueError unless both are None, or the pattern names every kind and each kind describes known parts.

    Args:
        pattern: ``layer_pattern``, a list of kind names.
        kinds: ``layer_kinds``, the description of each kind by name.
        parts: names that a description may contain.
        share_prior: whether all layers share one prior, so that a kind must not describe its own.
    """
    if (pattern is None) != (kinds is None):
        raise ValueError(
            f"layer_pattern and layer_kinds must be set together; got layer_pattern={pattern!r} and "
            f"layer_kinds={kinds!r}"
        )
    if pattern is None:
        return
    if not isinstance(pattern, list | tuple) or not pattern or not isinstance(kinds, Mapping):
        raise ValueError(f"layer_pattern must be a list, layer_kinds a mapping, got {pattern!r} and {kinds!r}")
    if {*pattern} != {*kinds}:
        raise ValueError(f"layer_pattern must name exactly the kinds in layer_kinds, {[*kinds]}; got {pattern!r}")
    for name, kind in kinds.items():
        if not isinstance(kind, Mapping) or not {*kind} <= {*parts}:
            raise ValueError(f"layer_kinds[{name!r}] may describe {', '.join(parts)}; got {kind!r}")
        if share_prior and "prior" in kind:
            raise ValueError("share_prior=True, but layer_kinds describes further priors; remove one of them")


def kind_of_layer(
    pattern: Sequence[str] | None, kinds: Mapping[str, Mapping[str, Any]] | None, index: int
) -> Mapping[str, Any]:
    """Return the description of one layer's kind. The pattern repeats from the first layer on."""
    return {} if pattern is None or kinds is None else kinds[pattern[index % len(pattern)]]
