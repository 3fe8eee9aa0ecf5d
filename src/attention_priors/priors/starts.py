"""Where the parameters of a prior start: a name, or the numbers themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attention_priors.checks import check_choice

Init: TypeAlias = "str | Mapping[str, Any]"


def checked_init(init: Init, names: Sequence[str], **shapes: tuple[int, ...]) -> str | dict[str, Any]:
    """What a constructor keeps of its ``init``: a name, or numbers by parameter, as plain lists.

    Args:
        init: one of the names, or a mapping from some of the parameters to a number for all heads or to what expands to
            its shape.
        names: which ones there are.
        shapes: of the parameters that may be given, ``(H, ...)``.

    Raises:
        ValueError: the name or a parameter is unknown, or a value is no finite number, or does not fit.
    """
    if not isinstance(init, Mapping):
        check_choice("init", init, names)
        return init
    unknown = [*(init.keys() - shapes.keys())]
    if unknown or not init:
        got = ", ".join(map(str, unknown)) or "{}"
        raise ValueError(f"init may give {', '.join(shapes)}, or be one of {', '.join(names)}; got {got}")
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in init.items()}
    for name in plain:
        started(plain, name, shapes[name])
    return plain


def started(init: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    """The start of one parameter, float32 on the CPU; zeros where it is not given.

    Raises:
        ValueError: as :func:`checked_init`.
    """
    given = init.get(name, 0.0)
    try:
        values = torch.as_tensor(given, dtype=torch.float32, device="cpu")
        whole = values.expand(shape).clone()
    except (TypeError, ValueError, RuntimeError):
        whole = None
    if whole is None or not bool(torch.isfinite(whole).all()):
        raise ValueError(f"init[{name!r}] must be finite numbers of shape {shape}, or one for all; got {given!r}")
    return whole
