"""Strict reading of YAML files: unknown and duplicate keys are errors."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeGuard, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from attention_priors._io import read_json


class RecipeError(ValueError):
    """Error of an invalid recipe. The message names the key, its value and the allowed values."""


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Prefix the message of a ValueError with the place in the recipe.

    Raises:
        RecipeError: A ValueError was raised in this context.
    """
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"{place}: {error}") from error


class Strict(BaseModel):
    """Model of a file's content that forbids unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def import_plugins(modules: Sequence[str]) -> Sequence[str]:
    """Import a user's modules, which register priors.

    Raises:
        ValueError: A module cannot be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ValueError(
                f"the plugin {module!r} cannot be imported ({type(error).__name__}: {error}); expected the name of a "
                "module, such as my_priors, that is installed or whose folder is on PYTHONPATH"
            ) from error
    return modules


Plugins = Annotated[tuple[str, ...], AfterValidator(import_plugins)]
"""Modules that register the priors of a recipe; imported before the other keys are read."""


def check_one_of(settings: BaseModel, *names: str) -> None:
    """Check that exactly one of several settings is set.

    Raises:
        ValueError: None or more than one is set.
    """
    given = [name for name in names if getattr(settings, name) is not None]
    if len(given) != 1:
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        raise ValueError(f"set exactly one of {listed}; got {' and '.join(given) or 'none'}")


Model = TypeVar("Model", bound=BaseModel)
_KINDS = ("constrained-int", "constrained-str", "constrained-float", "int", "float", "str", "bool")
"""Names that pydantic adds to the location of a key that allows several types."""


# PyYAML's wheels have the loader of libyaml, which takes a seventh of the time. A build from source may lack it.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeyLoader(_SafeLoader):
    """YAML loader that raises an error for duplicate keys, which PyYAML would silently drop.

    Keys of a merged mapping (``<<``) may be set again. ruamel.yaml's safe loader is not used, because it accepts
    duplicates in mappings with merged keys.
    """

    def get_single_node(self) -> Any:
        # Here, merged keys are not yet among a mapping's own keys.
        root = super().get_single_node()
        nodes: list[Any] = [root]
        checked = set[int]()
        for node in nodes:
            if id(node) in checked:  # an alias, which may lie in the node of its anchor
                continue
            checked.add(id(node))
            if isinstance(node, yaml.MappingNode):
                self._check_unique_keys(node)
                nodes += [value for _, value in node.value]
            elif isinstance(node, yaml.SequenceNode):
                nodes += node.value
        return root

    def _check_unique_keys(self, node: yaml.MappingNode) -> None:
        names: list[Any] = []
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                name = self.construct_object(key)
                if name in names:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {name!r}", key.start_mark)
                names.append(name)


# As in YAML 1.2. PyYAML reads 1.0e-3 as a number, but 1e-3 as a string.
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_strictly(path: Path, model: type[Model]) -> Model:
    """Read and validate a file.

    Raises:
        RecipeError: The file is not YAML, or a key or value is invalid; the message names the key, its value and the
            allowed values.
        FileNotFoundError: The file does not exist.
    """
    return validated(read_yaml(path), model, str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the keys and values of a file.

    Raises:
        RecipeError: The file is not YAML, has a duplicate key, or is not a mapping.
        FileNotFoundError: The file does not exist.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not a YAML file: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} must hold keys and values, got {type(content).__name__}")
    return content


def validated(content: Any, model: type[Model], place: str | None = None) -> Model:
    """Validate the content of a file, or settings from another place.

    Raises:
        RecipeError: A key or value is invalid; the message names the place, the key, its value and the allowed values.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        text = explain(error, model)
        raise RecipeError(f"{place}: {text}" if place else text) from error


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Describe all mistakes of a recipe, one per line."""
    lines = []
    mistakes = error.errors()
    places = [mistake["loc"] for mistake in mistakes]
    for mistake in mistakes:
        place = mistake["loc"]
        if mistake["type"] == "too_short" and any(p != place and p[: len(place)] == place for p in places):
            continue  # pydantic counts entries after it has dropped invalid entries
        # Names of types in the location are not keys.
        key = ".".join(str(part) for part in place if part not in _KINDS)
        if mistake["type"] == "extra_forbidden":
            allowed = ", ".join(_fields_at(model, mistake["loc"][:-1]))
            lines.append(f"{key}: unknown key (value {mistake['input']!r}); allowed here are {allowed}")
        elif mistake["type"] == "missing":
            lines.append(f"{key}: missing")
        elif mistake["type"] == "value_error":
            message = mistake["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {message}" if key else message)
        else:
            lines.append(f"{key}: {mistake['msg']}, got {mistake['input']!r}")
    return "\n".join(lines)


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are allowed at a place of a recipe."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue  # an index of a list; `_section` has already unwrapped the list
        # In a mapping, the part is the user's name for an entry, such as a scheme.
        current = _section(current.model_fields[part].annotation if _is_model(current) else get_args(current)[-1])
    return list(current.model_fields)


def _section(annotation: Any) -> Any:
    """Return the part of an annotation that is a model or a mapping; None if there is none."""
    if _is_model(annotation) or get_origin(annotation) is dict:
        return annotation
    found = (_section(part) for part in get_args(annotation))
    return next((part for part in found if part is not None), None)


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def differences(found: Any, wanted: Any, key: str = "") -> list[str]:
    """List the differences of two plain descriptions, one line per key; None equals a missing key."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = [*found, *(name for name in wanted if name not in found)]
        return [
            line for name in keys for line in differences(found.get(name), wanted.get(name), f"{key}.{name}".strip("."))
        ]
    same = found == wanted or (_says_nothing(found) and _says_nothing(wanted))
    return [] if same else [f"{key} (there {found!r}, here {wanted!r})"]


def _says_nothing(value: Any) -> bool:
    """Return whether a value is None or a mapping without set values."""
    return value is None or (isinstance(value, dict) and all(map(_says_nothing, value.values())))


def check_same_recipe(path: Path, wanted: dict[str, Any]) -> None:
    """Check that a folder is new, or belongs to an equal recipe.

    Args:
        path: File in the folder that describes its recipe.
        wanted: Description of the current recipe, in plain JSON.

    Raises:
        RecipeError: The folder belongs to another recipe; the message lists the differences.
    """
    differing = differences(read_json(path), wanted) if path.exists() else []
    if differing:
        raise RecipeError(
            f"{path.parent} holds a run of another recipe; it differs in {'; '.join(differing)}. Use another output "
            "folder, or delete this folder"
        )
