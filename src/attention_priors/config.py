"""Configs of priors, encodings and logit scales: plain dictionaries from which the objects can be rebuilt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from attention_priors.precision import can_be_read

Part = TypeVar("Part", bound="Described")

FORMAT = 2
"""Version of the format of configs and adapters, the only one that this version of the library reads."""


def check_format(found: Any, place: str | Path) -> None:
    """Raise a ValueError unless this version of the library reads format ``found``.

    Args:
        found: format number in a file.
        place: file or object that holds the number, for the error message.
    """
    if found != FORMAT:
        newer = isinstance(found, int) and found > FORMAT
        cure = "; a newer version wrote it: pip install --upgrade attention-priors" if newer else ""
        raise ValueError(f"{place} has format {found!r}; this version of attention-priors reads format {FORMAT}{cure}")


COMMON_NAMES = {
    "alibi": "ALiBi is the prior 'laplace'",
    "nope": "NoPE is the prior 'uniform', or no prior (None)",
    "bam": "BAM's prior is 'generalized_gaussian'",
    "goat": "GOAT is a list of two priors, 'spectral' and 'key_sink'",
    "sandwich": "Sandwich is the prior 'spectral' with init='sandwich'",
    "t5": "T5's bias is the prior 'relative_buckets'",
    "shaw": "Shaw's bias is the prior 'clipped_offsets', and Shaw's vectors are the encoding 'shaw'",
    "rope": "RoPE is the encoding 'rotary'",
    "yarn": "YaRN is the encoding 'rotary' with scaling='yarn'",
}
"""Answers to names of the literature that are not names of parts in configs."""

SHOWN_HEADS = 4
"""Number of heads at each end of a long list that a printed object shows."""


class Described:
    """Object that can be rebuilt from its constructor arguments, which it keeps as attributes of the same names."""

    name: str
    """Name in configs and recipes."""

    def to_config(self) -> dict[str, Any]:
        """Return a JSON-ready description: ``{"name": ..., <constructor arguments>}``.

        The description holds the constructor's arguments, not learned weights.
        """
        # The signature of __init__, not of the class: FSDP2 inserts a subclass that has its own __new__.
        arguments = list(inspect.signature(type(self).__init__).parameters)[1:]
        return {"name": self.name} | {argument: _plain(getattr(self, argument)) for argument in arguments}

    def extra_repr(self) -> str:
        """Return the constructor's arguments, and the present parameters with one number per head.

        One number stands for all heads that are equal.
        """
        arguments = (f"{key}={value!r}" for key, value in self.to_config().items() if key != "name")
        # Meta and sharded tensors have no values here.
        heads = {name: value for name, value in self.present_values().items() if value.dim() == 1 and not value.is_meta}
        now = (f"{name}={_brief(value.tolist())}" for name, value in heads.items() if can_be_read(value.cpu()))
        return "; now ".join(filter(None, (", ".join(arguments), ", ".join(now))))

    def present_values(self) -> Mapping[str, Tensor]:
        """Return the present parameters by name, detached; none by default."""
        return {}


def check_can_be_built(kind: str, catalogue: Mapping[str, type[Part]], part: Part, *, cure: str) -> None:
    """Raise a ValueError unless :func:`build` rebuilds a part of the same class from its description.

    Args:
        kind: kind of part. The error message names it: "prior", "encoding", ...
        catalogue: classes by name.
        part: the part that a config will describe.
        cure: how to register a class, for the error message.
    """
    # Skip the subclass that FSDP2 inserts.
    own = next(cls for cls in type(part).__mro__ if not cls.__module__.startswith("torch."))
    known = catalogue.get(part.name)
    if known is not own:
        holds = f"{part.name!r} is {known.__name__}" if known else f"there is no {part.name!r}"
        raise ValueError(
            f"cannot save the {kind} {own.__name__}: loading looks up its name in the catalogue of {kind}s, where "
            f"{holds}. Give the class a unique name and {cure}, both when saving and when loading"
        )


def _brief(numbers: Sequence[float]) -> str:
    words = [f"{each:.3g}" for each in numbers]
    if len({*words}) == 1:
        return words[0]
    if len(words) > 2 * SHOWN_HEADS:
        words[SHOWN_HEADS:-SHOWN_HEADS] = ["..."]
    return f"[{', '.join(words)}]"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def build(
    kind: str, catalogue: Mapping[str, type[Part]], config: Mapping[str, Any] | str, *, cure: str = "", **known: Any
) -> Part:
    """Build a part from its description.

    Args:
        kind: kind of part. Error messages name it: "prior", "encoding", ...
        catalogue: classes by name.
        config: ``{"name": ..., <constructor arguments>}``, or a bare name.
        cure: how to register a class. The error message for an unknown name ends with it.
        known: arguments that the caller knows (``num_heads``, ``head_dim``), for constructors that take them.
            ``config`` may omit them; if ``config`` states them, both values must agree.

    Raises:
        ValueError: unknown name or argument, missing argument, or invalid value. The message names the key, its value
            and the expected values.
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
        message = f"unknown {kind} {name!r}; expected one of {', '.join(catalogue)}"
        raise ValueError("; ".join(filter(None, [message, COMMON_NAMES.get(str(name).lower(), cure)])))
    parameters = inspect.signature(catalogue[name]).parameters
    for argument in arguments:
        if argument not in parameters:
            raise ValueError(f"{kind} {name!r} has no argument {argument!r}; expected one of {', '.join(parameters)}")
    for argument, value in known.items():
        if argument in parameters and arguments.setdefault(argument, value) != value:
            raise ValueError(
                f"{kind} {name!r} has {argument}={arguments[argument]!r}, but the model has {argument}={value!r}"
            )
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in arguments:
            raise ValueError(f"{kind} {name!r} needs the argument {argument!r}")
    try:
        return catalogue[name](**arguments)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r}: {error}, with {arguments!r}") from error
