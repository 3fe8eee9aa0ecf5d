"""Markdown tables of the keys of a recipe, from the pydantic model that validates the recipe."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
LONG = 60
"""Characters of a default value from which it stands behind the meaning, where lines break."""


def recipe_keys(model: type[BaseModel]) -> str:
    """Return one table of keys for the top of a recipe, and one for each section."""
    schema = model.model_json_schema()
    return "\n\n".join(_tables(schema, schema["$defs"], ""))


def _tables(section: Schema, sections: dict[str, Schema], path: str) -> Iterator[str]:
    """Yield the table of a section, then the tables of the sections within it."""
    required = section.get("required", ())
    rows: list[str] = []
    inner: list[tuple[Schema, str]] = []
    for key in sorted(section["properties"], key=lambda key: key not in required):
        value = section["properties"][key]
        words, below = _type(value, sections)
        if below is not None:
            place = f"{path}.{key}".strip(".") + (".NAME" if words.startswith("NAME") else "")
            inner.append((below, place))
            words = re.sub("sections?", rf"[\g<0>](#{place.replace('.', '').lower()})", words)
        default = "required" if key in required else _default(value)
        meaning = _markdown(value["description"]) if "description" in value else _summary(below or {})
        if len(default) > LONG:
            default, meaning = "–", f"{meaning} Default: {default}."
        rows.append(f"| `{key}` | {words} | {default} | {meaning} |")
    top = f"## `{path}`\n\n{_summary(section)}" if path else "## Keys"
    yield "\n".join([top, "", "| key | type | default | meaning |", "|---|---|---|---|", *rows])
    for below, place in inner:
        yield from _tables(below, sections, place)


def _type(value: Schema, sections: dict[str, Schema]) -> tuple[str, Schema | None]:
    """Return the type of a value in words, and the section that the value holds."""
    if "$ref" in value:
        return "section", sections[value["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in value:
        # A section that may be left out need not be said to be null.
        choices = [choice for choice in value["anyOf"] if choice.get("type") != "null" or not _is_section(value)]
        found = [_type(choice, sections) for choice in choices]
        return _either(words for words, _ in found), next((below for _, below in found if below), None)
    if "enum" in value or "const" in value:
        return _either(f"`{choice}`" for choice in value.get("enum", [value.get("const")])), None
    kind = value.get("type", "value")
    if kind == "array":
        if "prefixItems" in value:
            return f"list: {', '.join(_type(item, sections)[0] for item in value['prefixItems'])}", None
        words, below = _type(value["items"], sections)
        return "list of " + re.sub("integer|number|string|mapping|section|value", r"\g<0>s", words), below
    if kind == "object":
        items = value.get("additionalProperties")
        words, below = _type(items, sections) if isinstance(items, dict) else ("", None)
        return f"NAME: {words}" if below else "mapping", below
    bounds = [f"{sign} {_number(value[bound])}" for bound, sign in BOUNDS.items() if bound in value]
    return f"`{kind}`" if kind == "null" else f"{kind} {' and '.join(bounds)}".strip(), None


def _is_section(value: Schema) -> bool:
    return "$ref" in value or any("$ref" in choice for choice in value.get("anyOf", ()))


def _either(choices: Iterable[str]) -> str:
    *others, last = dict.fromkeys(choices)
    return f"{', '.join(others)} or {last}" if others else last


def _number(value: float) -> str:
    return "2³²" if value == 2**32 else f"{value:g}"


def _default(value: Schema) -> str:
    default = value.get("default")
    if "default" not in value or _is_section(value):
        return "–"
    if isinstance(default, float):
        default = float(f"{default:.4g}")
    return f"`{default if isinstance(default, str) and default else json.dumps(default)}`"


def _summary(section: Schema) -> str:
    return _markdown(section.get("description", "").split("\n\n")[0])


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", " ".join(text.split()))
    return re.sub(r"\bNone\b", "`null`", text.replace("``", "`")).replace("|", r"\|")
