"""The numbers of priors, one for each distance or key, kept where they are asked for again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from numbers import Number
from types import NoneType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from attention_priors.attention.geometry import Geometry
from attention_priors.precision import can_be_read, is_traced
from attention_priors.priors import Prior, Structure
from attention_priors.priors.base import ScaledDistance, checked_log_prior

GROWTH = 1024
"""Distances or positions by which what is kept grows at least: decoding needs one more with every token."""
SPAN = 4
"""Distances in a table that serves earlier requests too, at most, per distance of the largest of them: it must not
reach from one to another that is far away."""
FARTHEST = 4
"""Positions per key, at most, up to which numbers of keys are kept: with gaps, most would be of no key."""
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has: none but parameters and buffers changes a prior."""
UNCHANGING = (Number, str, bytes, NoneType, Enum, range, torch.dtype, torch.device)
"""Types of values that cannot change in place."""


class _NotComparableError(Exception):
    """An attribute whose later change no comparison would show."""


class _Part(NamedTuple):
    """Copies of the attributes, parameters and buffers of one module of a prior."""

    kind: type
    size: int
    """Number of attributes, PyTorch's own among them."""
    attributes: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _Part:
        own = vars(module)
        attributes = {name: _copy(value) for name, value in own.items() if name not in OWN_ATTRIBUTES}
        # Parameters may require gradients: `_may_keep` looks whether they are wanted.
        tensors = ({name: _copy_tensor(x) for name, x in own[kind].items()} for kind in ("_parameters", "_buffers"))
        return cls(type(module), len(own), attributes, *tensors)

    def is_of(self, module: nn.Module) -> bool:
        own = vars(module)
        if type(module) is not self.kind or len(own) != self.size:
            return False
        for old, new in (
            (self.parameters, own["_parameters"]),
            (self.buffers, own["_buffers"]),
            (self.attributes, own),
        ):
            if new is not own and len(old) != len(new):
                return False
            for name, value in old.items():
                now = new.get(name, _NotComparableError)
                if now is not value and not _is_same(value, now):
                    return False
        return True


class _State(NamedTuple):
    """Copies of everything that a prior's numbers come from, one part per module.

    Comparison is by value, because writing to ``parameter.data`` or to a list leaves no other trace. The values are a
    few numbers per head.
    """

    parts: list[_Part]

    @classmethod
    def of(cls, prior: Prior) -> _State | None:
        """A copy; None for a prior with an attribute that cannot be compared."""
        try:
            return cls([_Part.of(module) for module in _modules(prior)])
        except _NotComparableError:
            return None

    def is_of(self, prior: Prior) -> bool:
        modules = _modules(prior)
        return len(modules) == len(self.parts) and all(map(_Part.is_of, self.parts, modules))


def _modules(prior: Prior) -> list[nn.Module]:
    # Most have none within.
    return list(prior.modules()) if prior._modules else [prior]


def _copy(value: Any) -> Any:
    """Return a copy that later changes of the value do not reach.

    Raises:
        _NotComparableError: for a value that :func:`_is_same` could not tell from a changed one.
    """
    if isinstance(value, UNCHANGING):
        return value
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_copy, value))
    if type(value) is dict:
        return {_copy(key): _copy(entry) for key, entry in value.items()}
    if isinstance(value, Tensor) and not value.requires_grad:
        return _copy_tensor(value)
    raise _NotComparableError


def _copy_tensor(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    if type(tensor) not in (Tensor, Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise _NotComparableError
    copy = tensor.detach().clone()
    copy.requires_grad = tensor.requires_grad
    return copy


def _is_same(old: Any, new: Any) -> bool:
    """Whether a value equals the one that was copied to ``old``."""
    if new is old:
        return True
    if isinstance(old, Tensor):
        return (
            isinstance(new, Tensor)
            and (new.dtype, new.device, new.requires_grad) == (old.dtype, old.device, old.requires_grad)
            and torch.equal(old, new)
        )
    if type(new) is not type(old):
        return False
    if isinstance(old, list | tuple):
        return len(old) == len(new) and all(map(_is_same, old, new))
    if isinstance(old, dict):
        # The order of entries may matter to the prior.
        return len(old) == len(new) and all(map(_is_same, old, new)) and all(map(_is_same, old.values(), new.values()))
    return old == new


@dataclass
class _Kept:
    """A table whose prior has not changed since."""

    state: _State
    table: Tensor
    """``(H, N)``; entry 0 is that of the distance ``highest``, and they fall by one."""
    highest: int
    asked: int
    """How many distances the largest request was for."""

    @cached_property
    def lowest(self) -> int:
        """The distance of the last entry."""
        return self.highest - self.table.shape[1] + 1

    @cached_property
    def rounded(self) -> Tensor:
        """The table in float32."""
        return self.table.float()

    def serves(self, prior: Prior, highest: int, lowest: int, device: torch.device) -> bool:
        return (
            self.table.device == device
            and highest <= self.highest
            and lowest >= self.lowest
            and self.state.is_of(prior)
        )


_kept: WeakKeyDictionary[Prior, _Kept] = WeakKeyDictionary()


def consecutive_table(
    terms: Sequence[Prior], highest: int, lowest: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor | None:
    """The sum of the priors at ``highest, highest - 1, ..., lowest``, ``(H, N)``; None if there are none.

    Where no gradient is wanted, each prior's table is kept until the prior changes, and grows ahead of need. A prior
    with an attribute that cannot be compared gets a new table in every call.

    Args:
        terms: stationary priors, whose table is over distances; or priors that depend on the key alone, whose table is
            over positions with the sign turned.
        highest: and
        lowest: in tokens.
        device: of the table.
        dtype: float64, or float32.
    """
    total = None
    for term in terms:
        part = _kept_table(term, highest, lowest, device, dtype) if _may_keep(term, device) else None
        if part is None:
            part = _table(term, highest, lowest, device).to(dtype)
        total = part if total is None else total + part
    return total


def table_at(terms: Sequence[Prior], at: Tensor) -> Tensor | None:
    """The sum of the priors at these distances (or positions, of such as depend on the key), ``(H, *at.shape)``."""
    parts = [checked_log_prior(term, at, torch.float64) for term in terms]
    return sum(parts[1:], parts[0]) if parts else None


def table_of_network(network: ScaledDistance) -> Tensor | None:
    """Return a network's log-prior at its distances, ``(H, N)``, if all queries scale them alike.

    FIRE's do up to its threshold. None if they do not, and where numbers cannot be read.
    """
    row = network.row.flatten()
    if not can_be_read(row.detach()) or bool((row != row[0]).any()):
        return None
    return network._replace(row=row[:1]).log_prior().squeeze(1)


def table_of_keys(terms: Sequence[Prior], geometry: Geometry, key_bias: Tensor | None = None) -> Tensor | None:
    """The sum of priors that depend on the key alone and of ``key_bias``, ``(1 or B, H, Lk)`` in float64.

    None if there are neither.
    """
    given = None if key_bias is None else key_bias.double()
    table = _table_of_keys(terms, geometry) if terms else None
    return table if given is None else given if table is None else table + given


def visible_at(terms: Sequence[Prior], highest: int, number: int, device: torch.device) -> Tensor | None:
    """Which of the distances that fall by one from ``highest`` the prior lets a query see; None for all."""
    # A prior that hides keys says so by a method of its own.
    found = None
    for term in terms:
        if type(term).visible_at is not Prior.visible_at:
            seen = term.visible_at(torch.arange(highest, highest - number, -1, device=device))
            if seen is not None:
                found = seen if found is None else found & seen
    return found


def _table_of_keys(terms: Sequence[Prior], geometry: Geometry) -> Tensor:
    keys = geometry.key_positions
    length = _length_from_0(geometry, keys)
    table = table_at(terms, keys) if length is None else consecutive_table(terms, 0, 1 - length, geometry.device)
    assert table is not None
    if length is None:
        return table.transpose(0, 1)
    one_after_another = geometry.given_key_positions is None and geometry.key_documents is None
    return table.unsqueeze(0) if one_after_another else table[:, keys].transpose(0, 1)


def _table(term: Prior, highest: int, lowest: int, device: torch.device) -> Tensor:
    at = torch.arange(highest, lowest - 1, -1, device=device)
    return checked_log_prior(term, at if Structure.STATIONARY in term.structure else -at, torch.float64)


def _may_keep(term: Prior, device: torch.device) -> bool:
    # To compare what is kept, a device would be waited for.
    if device.type in ("meta", "cuda") or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False  # (What is made among FakeTensors has no numbers.)
    if torch._C._are_functorch_transforms_active():
        return False
    learns = torch.is_grad_enabled()
    for module in _modules(term):
        for parameter in module._parameters.values():
            if parameter is not None and (
                type(parameter) not in (Tensor, Parameter) or (learns and parameter.requires_grad)
            ):
                return False
    return True


def _kept_table(term: Prior, highest: int, lowest: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """The prior's part of :func:`consecutive_table`; None for a prior with an attribute that cannot be compared."""
    kept = _kept.get(term)
    if kept is None or not kept.serves(term, highest, lowest, device):
        state = _State.of(term)
        if state is None:
            _kept.pop(term, None)
            return None
        top, bottom, asked = highest, lowest, highest - lowest + 1
        if kept is not None:
            first, last = max(kept.highest, highest), min(kept.lowest, lowest)
            if first - last < SPAN * max(asked, kept.asked):
                # It was asked for before: leave room, so that it is not made anew for each token.
                room = max(GROWTH, asked // 4)
                top, bottom = first + room * (highest > kept.highest), last - room * (lowest < kept.lowest)
                asked = max(asked, kept.asked)
        # What inference mode makes could not be saved for a backward pass later.
        with torch.inference_mode(False), torch.no_grad():
            table = _table(term, top, bottom, device)
        kept = _kept[term] = _Kept(state, table, top, asked)
    start = kept.highest - highest
    table = kept.table if dtype == torch.float64 else kept.rounded
    return table[:, start : start + highest - lowest + 1]


def _length_from_0(geometry: Geometry, keys: Tensor) -> int | None:
    """How many positions from 0 on hold all keys; None if that is not known, or far more than there are keys."""
    if geometry.given_key_positions is None and geometry.key_documents is None:
        return geometry.num_keys
    if geometry.device.type != "cpu" or is_traced() or torch._C._are_functorch_transforms_active():
        return None  # to look would be to wait for the device, or there is nothing to see
    lowest, highest = (int(end) for end in keys.aminmax())
    return highest + 1 if lowest >= 0 and highest < FARTHEST * geometry.num_keys else None
