"""Plain descriptions: how a prior, an encoding or a logit scale goes into a config and comes back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

Part = TypeVar("Part", bound="Described")

FORMAT = 2
"""Version of the format of configs and adapters. In format 1 layers could not differ, and configs had no number."""


def check_format(found: Any, place: str | Path) -> None:
    """Raise a ValueError unless ``found`` is the number of a format that this version reads.

    Args:
        found: number in a file, 1 for a config without a number.
        place: file or object that holds the number, for the error message.
    """
    is_number = isinstance(found, int) and not isinstance(found, bool)
    if not is_number or not 1 <= found <= FORMAT:
        newer = is_number and found > FORMAT
        cure = "; a newer version wrote it: pip install --upgrade attention-priors" if newer else ""
        raise ValueError(
            f"{place} has format {found!r}; this version of attention-priors reads formats 1 to {FORMAT}{cure}"
        )


class Described:
    """Something whose constructor arguments, kept under their own names, say all there is to build it anew."""

    name: str
    """Name in configs and recipes."""

    def to_config(self) -> dict[str, Any]:
        """A plain (JSON-ready) description: ``{"name": ..., <constructor arguments>}``.

        It holds what the constructor was given, not what has been learned since.
        """
        # Of __init__, and not of the class: FSDP2 puts a class with a __new__ of its own in front of it.
        arguments = list(inspect.signature(type(self).__init__).parameters)[1:]
        return {"name": self.name} | {argument: _plain(getattr(self, argument)) for argument in arguments}

    def extra_repr(self) -> str:
        """The constructor's arguments, as :class:`torch.nn.Module` prints them."""
        return ", ".join(f"{key}={value!r}" for key, value in self.to_config().items() if key != "name")


def check_can_be_built(kind: str, catalogue: Mapping[str, type[Part]], part: Part, *, cure: str) -> None:
    """Raise a ValueError unless :func:`build` makes a part of the same class from its description.

    Args:
        kind: what it is, for the error message: "prior", "encoding", ...
        catalogue: the classes by name.
        part: to be described, as in a saved model's config.
        cure: what makes a class known, for the error message.
    """
    # FSDP2 puts a class of torch's in front of the part's own.
    own = next(cls for cls in type(part).__mro__ if not cls.__module__.startswith("torch."))
    known = catalogue.get(part.name)
    if known is not own:
        holds = f"names {known.__name__} {part.name!r}" if known else f"has no {part.name!r}"
        raise ValueError(
            f"the {kind} {own.__name__} cannot be saved: loading makes it from its name, and the catalogue of {kind}s "
            f"{holds}. Give the class a name of its own and {cure}, where it is saved and where it is loaded"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def build(
    kind: str, catalogue: Mapping[str, type[Part]], config: Mapping[str, Any] | str, *, cure: str = "", **known: Any
) -> Part:
    """Build what a description describes.

    Args:
        kind: what it is, for error messages: "prior", "encoding", ...
        catalogue: the classes by name.
        config: ``{"name": ..., <constructor arguments>}``, or a bare name.
        cure: what makes an unknown name known, for the error message.
        known: arguments that follow from the surroundings (``num_heads``, ``head_dim``). They are passed to
            constructors that take them and need not be in ``config``; where they are, they must agree.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """
    article = "an" if kind[0] in "aeiou" else "a"
    if isinstance(config, str):
        config = {"name": config}
    if not isinstance(config, Mapping) or "name" not in config:
        raise ValueError(
            f"the description of {article} {kind} needs a name, one of {', '.join(catalogue)}; got {config!r}"
        )
    arguments = dict(config)
    name = arguments.pop("name")
    if not isinstance(name, str) or name not in catalogue:
        raise ValueError("; ".join(filter(None, [f"unknown {kind} {name!r}; known are {', '.join(catalogue)}", cure])))
    parameters = inspect.signature(catalogue[name]).parameters
    for argument in arguments:
        if argument not in parameters:
            raise ValueError(f"{kind} {name!r} has no argument {argument!r}; it has {', '.join(parameters)}")
    for argument, value in known.items():
        if argument in parameters and arguments.setdefault(argument, value) != value:
            raise ValueError(
                f"{kind} {name!r} states {argument}={arguments[argument]!r}, but it is used with {value!r}"
            )
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in arguments:
            raise ValueError(f"{kind} {name!r} needs the argument {argument!r}")
    try:
        return catalogue[name](**arguments)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r}: {error}, with {arguments!r}") from error
