"""Catalogue of prior classes by name: the library's (``families.py``), registered ones and installed packages' own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import torch

from attention_priors.config import build
from attention_priors.priors import families
from attention_priors.priors.base import Prior, unset_after_reset
from attention_priors.priors.sum import Sum

ENTRY_POINTS = "attention_priors.priors"
"""Entry point group of an installed package's priors. An entry point maps the prior's name to its class."""

HOW_TO_REGISTER = (
    "a custom prior is registered when the module that calls register_prior is imported: by an import, by "
    "attention-priors --plugin MODULE, by plugins: [MODULE] in a recipe, or by installing a package with an entry "
    f"point {ENTRY_POINTS!r}"
)

AnyPrior = TypeVar("AnyPrior", bound=Prior)


class Catalogue(Mapping[str, type[Prior]]):
    """Mapping from names to prior classes: the library's, registered ones, and those of installed packages.

    An installed package declares its priors as entry points. Its module is imported when the prior is looked up.
    """

    def __init__(self, classes: Iterable[type[Prior]]) -> None:
        self.registered = {prior.name: prior for prior in classes}

    def __getitem__(self, name: str) -> type[Prior]:
        if name not in self.registered:
            _register_installed(name)
        return self.registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.registered, *sorted(entry_points(group=ENTRY_POINTS).names)]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


CATALOGUE = Catalogue(getattr(families, name) for name in families.__all__)


def register_prior(prior: type[AnyPrior]) -> type[AnyPrior]:
    """Register a prior class by its ``name`` for configs, recipes, saved models and commands. Use it as a decorator.

    Every process that reads the name must first import the module: by ``attention-priors --plugin MODULE``, by
    ``plugins:`` in a recipe, or by an installed package. A package declares an entry point of group
    ``attention_priors.priors`` with the prior's name.

    Args:
        prior: a subclass of :class:`Prior` with a ``name`` of its own. Its constructor takes ``num_heads`` first and
            keeps every argument as an attribute, so that :meth:`Prior.to_config` can describe the prior. A class with
            parameters defines ``reset_parameters``; a class that requires more arguments than ``num_heads`` defines
            ``examples``.

    Returns:
        The class. Registering a class again replaces the former class, for notebook cells that run twice.

    Raises:
        ValueError: the class does not meet a requirement. The message says which.
    """
    if not (isinstance(prior, type) and issubclass(prior, Prior)):
        raise ValueError(f"register_prior takes a subclass of Prior, got {prior!r}")
    for problem in _problems(prior):
        raise ValueError(f"{prior.__name__} cannot be registered: {problem}")
    CATALOGUE.registered[prior.name] = prior
    return prior


def _problems(prior: type[Prior]) -> Iterator[str]:
    """Yield reasons why a class cannot be rebuilt from its description. Later checks rely on earlier ones."""
    name = vars(prior).get("name")
    if not isinstance(name, str) or not name.isidentifier():
        yield f"it needs its own name, a class attribute such as name = 'my_prior'; got {name!r}"
    known = CATALOGUE.registered.get(str(name), Sum if name == Sum.name else prior)
    if (known.__module__, known.__qualname__) != (prior.__module__, prior.__qualname__):
        yield f"the name {name!r} is taken by {known.__module__}.{known.__qualname__}"
    if not hasattr(prior, "structure"):
        yield "it needs a structure, such as structure = Structure.STATIONARY"
    arguments = list(inspect.signature(prior.__init__).parameters.values())[1:]
    if not arguments or arguments[0].name != "num_heads":
        yield f"its constructor must take num_heads first, got {[each.name for each in arguments]}"
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in arguments):
        yield "its constructor must not have *args or **kwargs: name every argument"
    needed = [each.name for each in arguments[1:] if each.default is each.empty]
    if needed and prior.examples.__func__ is Prior.examples.__func__:  # pyright: ignore[reportFunctionMemberAccess]
        yield f"its constructor also needs {', '.join(needed)}: define the classmethod examples(num_heads)"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for example in prior.examples(2):
            for each in arguments:
                if not hasattr(example, each.name):
                    yield f"it must keep the argument {each.name!r} as the attribute {each.name!r}"
            config = example.to_config()
            try:
                plain = json.loads(json.dumps(config))
            except TypeError as error:
                yield f"its arguments must be plain data (numbers, strings, lists, dictionaries), got {config}: {error}"
                return
            again = build("prior", {prior.name: prior}, plain).to_config()
            if json.loads(json.dumps(again)) != plain:
                yield f"the prior built from its description {plain} has another description, {again}"
            if unset := unset_after_reset(example):
                yield f"reset_parameters() must set every parameter and buffer; it does not set {unset}"


def _register_installed(name: str) -> None:
    """Register the prior of this name from an installed package, if any.

    Raises:
        ValueError: the class cannot be imported or registered, has another name, or two packages declare the name.
    """
    found = [*entry_points(group=ENTRY_POINTS, name=name)]
    if not found:
        return
    place = " and ".join(sorted(map(_place, found)))
    if len(found) > 1:
        raise ValueError(f"two packages have a prior {name!r}: {place}; uninstall one")
    try:
        prior = found[0].load()
    except Exception as error:
        raise ValueError(f"the prior {name!r} cannot be imported from {place}: {error}") from error
    if getattr(prior, "name", None) != name:
        raise ValueError(f"{place} is {prior!r}, not a prior named {name!r}: name the entry point as the prior")
    register_prior(prior)


def _place(entry: EntryPoint) -> str:
    return f"{entry.value} (package {entry.dist.name if entry.dist else 'unknown'})"


def prior_from_config(
    config: Mapping[str, Any] | Sequence[Mapping[str, Any] | str] | str, num_heads: int | None = None
) -> Prior:
    """Build a prior from its description.

    Args:
        config: ``{"name": ..., <constructor arguments>}`` as :meth:`Prior.to_config` returns it, a bare name, or a list
            of descriptions for their sum.
        num_heads: number of heads if ``config`` does not state it. Where ``config`` states it, both must agree.

    Raises:
        ValueError: unknown name or argument, or invalid value. The message lists the valid ones.
    """
    if isinstance(config, Sequence) and not isinstance(config, str):
        return Sum([prior_from_config(part, num_heads) for part in config])
    if isinstance(config, Mapping) and config.get("name") == Sum.name:
        if set(config) != {"name", "priors"}:
            raise ValueError(f"the description of a sum must have the keys 'name' and 'priors', got {sorted(config)}")
        if not isinstance(config["priors"], Sequence) or isinstance(config["priors"], str):
            raise ValueError(f"priors must be a list of descriptions, got {config['priors']!r}")
        return Sum([prior_from_config(part, num_heads) for part in config["priors"]])
    known = {} if num_heads is None else {"num_heads": num_heads}
    return build("prior", CATALOGUE, config, cure=HOW_TO_REGISTER, **known)
