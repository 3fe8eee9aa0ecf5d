"""Derived schemes: inheritance, and sweeps that multiply schemes over named axes.

Both expand the content of a recipe file before its validation, so only plain schemes are validated and run.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pydantic import Field, ValidationError, field_validator

from attention_priors.lab.strict_yaml import Strict, validated
from attention_priors.lab.train.recipe import PositionSettings

SECTIONS = ("training", "model", "evaluation", "extensions")
"""Sections of a scheme that an axis can change."""

POSITION_FIELDS = set(PositionSettings.model_fields)
"""Settings of a scheme that determine how its models use positions."""

START_FIELDS = {"attach", "rope_parameters"}
"""Settings of a scheme that change a pretrained model."""

WHOLE = POSITION_FIELDS | START_FIELDS
"""Keys whose mappings are inherited whole; all other mappings are inherited key by key."""

NAMED = ("extensions", "plans")
"""Keys of mappings from names, which may equal keys of settings."""

SCHEME_AXIS = "scheme"
"""Axis of the schemes that a sweep multiplies; its values are scheme names."""

EXTENSION_AXIS = "extension"
"""Axis of the context extensions of a model."""

BEFORE = "before"
"""Value on the extension axis of a model before its extensions."""

Content: TypeAlias = dict[str, Any]
Point: TypeAlias = dict[str, "Value"]
"""One value on each axis."""


class Sweep(Strict):
    """Multiplication of schemes over axes: the full product, or one axis at a time around a base."""

    schemes: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the schemes to multiply; all by default."""
    axes: dict[str, dict[str, list[Any] | dict[str, Any]]] = Field(min_length=1)
    """Settings of each axis with their values: a list, or a mapping from labels to values. Several settings of one axis
    change together."""
    base: dict[str, Any] | None = None
    """One value for every axis. With a base, each scheme is made at the base and, one axis at a time, at every other
    value. Without a base, each scheme is made at every combination of values."""

    @field_validator("axes")
    @classmethod
    def _even(cls, axes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, settings in axes.items():
            if name in (SCHEME_AXIS, EXTENSION_AXIS) or not name:
                raise ValueError(f"an axis cannot be called {name!r}")
            counts = {setting: len(values) for setting, values in settings.items()}
            if len(set(counts.values())) != 1 or 0 in counts.values():
                raise ValueError(f"axis {name!r} needs settings with equally many values, at least one, got {counts}")
            labels = [value.label for value in _values(settings)]
            twice = [label for label in labels if labels.count(label) > 1]
            if twice:
                raise ValueError(f"axis {name!r} has the duplicate value {twice[0]!r}")
        return axes


class Value(NamedTuple):
    """One value of an axis."""

    label: str
    """Label of the value."""
    plain: str | int | float
    """Value as shown in results; numbers stay numbers."""
    settings: Mapping[str, Any]
    """Settings that the value changes."""


def label(value: Any) -> str:
    """Return the label of a setting's value: ``laplace``, ``alpha+beta``, ``none``, ``ssmax(include_prior=false)``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "+".join(map(label, value)) or "nothing"
    if isinstance(value, dict):
        arguments = ", ".join(f"{key}={label(part)}" for key, part in value.items() if key != "name")
        name = label(value["name"]) if "name" in value else ""
        return f"{name}({arguments})" if name and arguments else name or arguments or "nothing"
    return str(value)


def expand(content: Content) -> Content:
    """Replace ``extends`` and ``sweep`` with the schemes that they define.

    Malformed content is left unchanged for the validation of the recipe.

    Raises:
        ValueError: a scheme or an axis does not exist, or a setting cannot be changed; the message names it.
    """
    schemes = content.get("schemes")
    if not isinstance(schemes, dict) or not all(isinstance(scheme, dict) for scheme in schemes.values()):
        return content
    schemes = {name: _inherited(schemes, name) for name in schemes}
    if content.get("sweep") is None or not all(_is_well_formed(*item) for item in schemes.items()):
        return content | {"schemes": schemes}
    try:
        sweep = Sweep.model_validate(content["sweep"])
    except ValidationError:
        return content  # validation of the recipe reports the error
    rest = {key: value for key, value in content.items() if key != "sweep"}
    return rest | {"schemes": _multiplied(schemes, sweep)}


def _is_well_formed(name: Any, scheme: Content) -> bool:
    """Whether a sweep can change the scheme."""
    ways = scheme.get("extensions") or {}
    return (
        isinstance(name, str)
        and isinstance(scheme.get("axes", {}), dict)
        and isinstance(ways, dict)
        and all(isinstance(way, dict) for way in ways.values() if way is not None)
    )


# ---- inheritance


def _inherited(schemes: Mapping[str, Content], name: str) -> Content:
    """Return a scheme merged with its ancestors."""
    line = [name]
    while (parent := schemes[line[-1]].get("extends")) is not None:
        if not isinstance(parent, str) or parent not in schemes:
            raise ValueError(
                f"schemes.{line[-1]}.extends: unknown scheme {parent!r}; the recipe has {', '.join(schemes)}"
            )
        if parent in line:
            raise ValueError(f"schemes.{name}.extends: circular inheritance, {' extends '.join([*line, parent])}")
        line.append(parent)
    made: Content = {}
    for ancestor in reversed(line):
        made = overlaid(made, {key: value for key, value in schemes[ancestor].items() if key != "extends"})
    return copy.deepcopy(made)


ALTERNATIVES = (("steps", "tokens"), ("batch_size", "tokens_per_step"))
"""Pairs of settings of which one replaces the other."""


def overlaid(inherited: Any, own: Any, whole: Collection[str] = WHOLE) -> Any:
    """Merge settings with the inherited settings, key by key; an alternative setting replaces its counterpart.

    Args:
        inherited: settings of the parent.
        own: settings that take precedence.
        whole: keys whose values are replaced and not merged.
    """
    if not isinstance(inherited, dict) or not isinstance(own, dict):
        return own
    replaced = {
        other
        for pair in ALTERNATIVES
        for one, other in (pair, pair[::-1])
        if own.get(one) is not None and own.get(other) is None
    }
    kept = {key: value for key, value in inherited.items() if key not in replaced}
    return kept | {
        key: value if key in whole else overlaid(kept.get(key), value, () if key in NAMED else WHOLE)
        for key, value in own.items()
    }


S = TypeVar("S", bound=Strict)


def varied(settings: S, own: Content, place: str) -> S:
    """Return the settings of a recipe with a scheme's changes.

    Args:
        settings: settings of all schemes.
        own: changes of the scheme.
        place: path of ``own`` in the recipe, for messages.

    Raises:
        RecipeError: a key or value is invalid.
    """
    return validated(overlaid(settings.model_dump(), own), type(settings), place) if own else settings


# ---- sweeps


def _multiplied(schemes: Mapping[str, Content], sweep: Sweep) -> dict[str, Content]:
    chosen = sweep.schemes or tuple(schemes)
    for name in chosen:
        if name not in schemes:
            raise ValueError(f"sweep.schemes: unknown scheme {name!r}; the recipe has {', '.join(schemes)}")
    axes = {axis: list(_values(settings)) for axis, settings in sweep.axes.items()}
    base = None if sweep.base is None else _base(sweep.base, axes)
    made: dict[str, Content] = {}
    for name, scheme in schemes.items():
        variants = _variants(name, axes, base) if name in chosen else iter([(name, {})])
        for variant, point in variants:
            if variant in made or (variant != name and variant in schemes):
                raise ValueError(f"sweep: duplicate scheme {variant!r}")
            made[variant] = _at(scheme, name, point) if point else scheme
    return made


def _values(settings: Mapping[str, Any]) -> Iterator[Value]:
    columns = {key: list(values.values()) if isinstance(values, dict) else values for key, values in settings.items()}
    # The first setting provides the labels.
    for index, name in enumerate(next(iter(settings.values()))):
        is_number = isinstance(name, (int, float)) and not isinstance(name, bool)
        changed = {key: column[index] for key, column in columns.items()}
        yield Value(label(name), name if is_number else label(name), changed)


def _base(base: Mapping[str, Any], axes: Mapping[str, list[Value]]) -> Point:
    if set(base) != set(axes):
        raise ValueError(f"sweep.base needs a value for each of the axes {', '.join(axes)}, got {', '.join(base)}")
    point: Point = {}
    for axis, values in axes.items():
        found = [value for value in values if value.label == label(base[axis])]
        if not found:
            known = ", ".join(value.label for value in values)
            raise ValueError(f"sweep.base.{axis}: must be one of {known}, got {label(base[axis])!r}")
        point[axis] = found[0]
    return point


def _variants(name: str, axes: Mapping[str, list[Value]], base: Point | None) -> Iterator[tuple[str, Point]]:
    """Yield the names and points of the schemes that a sweep makes from one scheme."""
    if base is None:
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            yield " · ".join([name, *(f"{axis}={value.label}" for axis, value in point.items())]), point
        return
    yield name, base
    for axis, values in axes.items():
        for value in values:
            if value is not base[axis]:
                yield f"{name} · {axis}={value.label}", base | {axis: value}


def _at(scheme: Content, name: str, point: Point) -> Content:
    """Return a scheme with the settings of a point."""
    made = copy.deepcopy(scheme)
    for axis, value in point.items():
        for setting, content in value.settings.items():
            try:
                _set(made, setting, copy.deepcopy(content))
            except ValueError as error:
                raise ValueError(
                    f"sweep.axes.{axis}: {setting}={label(content)} is impossible for the scheme {name!r}: {error}"
                ) from error
    stands = {axis: value.plain for axis, value in point.items()}
    made["axes"] = {SCHEME_AXIS: name} | made.get("axes", {}) | stands
    return made


def _set(scheme: Content, setting: str, content: Any) -> None:
    first, *rest = setting.split(".")
    target = scheme
    if first == "extensions" and rest[1:2] and rest[1] in POSITION_FIELDS:
        way, first, *rest = rest
        ways = scheme["extensions"] = scheme.get("extensions") or {}
        target = ways[way] = dict(ways.get(way) or {})  # YAML aliases share one mapping
    if first in SECTIONS:
        for key in reversed(rest):
            content = {key: content}
        content = overlaid(target.get(first) or {}, content)
    elif first not in POSITION_FIELDS:
        raise ValueError(f"a setting must begin with one of {', '.join((*PositionSettings.model_fields, *SECTIONS))}")
    elif rest:
        described = target.get(first)
        if isinstance(described, str):
            described = {"name": described}
        if isinstance(described, list):
            raise ValueError(f"its {first} is a list; use complete values of {first} on the axis")
        if not isinstance(described, dict) or len(rest) > 1:
            raise ValueError(f"it has no setting {first}.{'.'.join(rest)}")
        content = described | {rest[0]: content}
    target[first] = content
