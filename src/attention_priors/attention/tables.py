"""What priors are made of, kept where it is asked for again and again: tables of stationary ones, lanes of keys."""

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
from attention_priors.priors import Lanes, Prior
from attention_priors.priors.base import checked_lanes, checked_log_prior

GROWTH = 1024
"""Distances or positions by which what is kept grows at least: decoding needs one more with every token."""
SPAN = 4
"""Distances in a table that serves earlier requests too, at most, per distance of the largest of them: it must not
reach from one to another that is far away."""
FARTHEST = 4
"""Positions per key, at most, up to which lanes are kept: with gaps, most would be of positions where no key is."""
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
        return (
            type(module) is self.kind
            and len(own) == self.size
            and _is_same(self.parameters, own["_parameters"])
            and _is_same(self.buffers, own["_buffers"])
            and all(_is_same(value, own.get(name, _NotComparableError)) for name, value in self.attributes.items())
        )


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
            return cls([_Part.of(module) for module in prior.modules()])
        except _NotComparableError:
            return None

    def is_of(self, prior: Prior) -> bool:
        modules = list(prior.modules())
        return len(modules) == len(self.parts) and all(map(_Part.is_of, self.parts, modules))


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
    def largest(self) -> float:
        """Of the table's numbers."""
        return float(self.table.max())

    @cached_property
    def nearest(self) -> float:
        """The best at the distances 1 and 0, in the head where it is worst."""
        return _worst_of_heads(self.near())

    def near(self) -> Tensor:
        """The part at the distances 1, if there is one, and 0, ``(H, 1 or 2)``."""
        return self.table[:, max(0, self.highest - 1) : self.highest + 1]

    def serves(self, prior: Prior, highest: int, lowest: int, like: Tensor) -> bool:
        same_kind = self.table.dtype == like.dtype and self.table.device == like.device
        return (
            same_kind
            and highest <= self.highest
            and lowest > self.highest - self.table.shape[1]
            and self.state.is_of(prior)
        )


@dataclass
class _KeptLanes:
    """Features of keys' positions, of a prior that has not changed since."""

    state: _State
    features: Tensor
    """``(N, R)``, of the positions from 0 on."""

    def serves(self, prior: Prior, length: int, like: Tensor) -> bool:
        same_kind = self.features.dtype == like.dtype and self.features.device == like.device
        return same_kind and length <= len(self.features) and self.state.is_of(prior)


_kept: WeakKeyDictionary[Prior, _Kept] = WeakKeyDictionary()
_kept_lanes: WeakKeyDictionary[Prior, _KeptLanes] = WeakKeyDictionary()


def consecutive_table(terms: Sequence[Prior], highest: int, lowest: int, like: Tensor) -> Tensor | None:
    """The sum of the priors at ``highest, highest - 1, ..., lowest``, ``(H, N)``; None if there are no terms.

    Where no gradient is wanted, each prior's table is kept until the prior changes, and grows ahead of need. A prior
    with an attribute that cannot be compared gets a new table in every call.

    Args:
        terms: stationary priors.
        highest: and
        lowest: distances in tokens.
        like: has the dtype and the device that the table is to have.
    """
    total = None
    for term in terms:
        part = _kept_table(term, highest, lowest, like) if _may_keep(term, like.device) else None
        if part is None:
            part = checked_log_prior(term, torch.arange(highest, lowest - 1, -1, device=like.device), like.dtype)
        total = part if total is None else total + part
    return total


def known_range(terms: Sequence[Prior]) -> tuple[float, float] | None:
    """Of the sum of kept tables, just asked for, the distance 0 included; None if one of them is not kept.

    Returns:
        The best log-prior among the query's own place and the one before, in the head where it is worst; and a number
        above which no head has one anywhere.
    """
    known = [one for term in terms if (one := _kept.get(term)) is not None and _may_keep(term, one.table.device)]
    if len(known) < len(terms):
        return None
    largest = sum(one.largest for one in known)
    if len(known) == 1:
        return known[0].nearest, largest
    number = min(one.near().shape[1] for one in known)
    return _worst_of_heads(torch.stack([one.near()[:, -number:] for one in known]).sum(0)), largest


def _worst_of_heads(near: Tensor) -> float:
    return float(near.amax(1).min())


def _may_keep(term: Prior, device: torch.device) -> bool:
    if device.type == "meta" or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() > 0:
        return False  # what is made now may be made up: a FakeTensor has no numbers
    learns = torch.is_grad_enabled()
    return not any(
        type(parameter) not in (Tensor, Parameter) or (learns and parameter.requires_grad)
        for parameter in term.parameters()
    )


def _kept_table(term: Prior, highest: int, lowest: int, like: Tensor) -> Tensor | None:
    """The prior's part of :func:`consecutive_table`; None for a prior with an attribute that cannot be compared."""
    kept = _kept.get(term)
    if kept is None or not kept.serves(term, highest, lowest, like):
        state = _State.of(term)
        if state is None:
            _kept.pop(term, None)
            return None
        top, bottom, asked = highest, lowest, highest - lowest + 1
        if kept is not None:
            first, last = max(kept.highest, highest), min(kept.highest - kept.table.shape[1] + 1, lowest)
            if first - last < SPAN * max(asked, kept.asked):
                # It was asked for before: leave room, so that it is not made anew for each token.
                top, bottom = first + (max(GROWTH, asked // 4) if highest > kept.highest else 0), last
                asked = max(asked, kept.asked)
        # What inference mode makes could not be saved for a backward pass later.
        with torch.inference_mode(False), torch.no_grad():
            table = checked_log_prior(term, torch.arange(top, bottom - 1, -1, device=like.device), like.dtype)
        kept = _kept[term] = _Kept(state, table, top, asked)
    start = kept.highest - highest
    return kept.table[:, start : start + highest - lowest + 1]


def lanes_of(term: Prior, geometry: Geometry, dtype: torch.dtype) -> Lanes:
    """The lanes of a factored prior for these queries and keys.

    Where no gradient is wanted, those of keys are kept until the prior changes, and grow ahead of need.
    """
    queries, keys = geometry.query_positions, geometry.key_positions
    length = _length_from_0(geometry, keys) if _may_keep(term, keys.device) else None
    if length is None:
        return checked_lanes(term, queries, keys, dtype)
    kept, like = _kept_lanes.get(term), torch.empty(0, dtype=dtype, device=keys.device)
    if kept is None or not kept.serves(term, length, like):
        state = _State.of(term)
        if state is None:
            _kept_lanes.pop(term, None)
            return checked_lanes(term, queries, keys, dtype)
        grown = length if kept is None else max(length, length + max(GROWTH, length // 4))
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(grown, device=keys.device)
            features = checked_lanes(term, positions[:1], positions, dtype).key
        kept = _kept_lanes[term] = _KeptLanes(state, features)
    one_after_another = geometry.given_key_positions is None and geometry.key_documents is None
    of_keys = kept.features[:length].unsqueeze(0) if one_after_another else kept.features[keys]
    return checked_lanes(term, queries, keys[:, :1], dtype)._replace(key=of_keys)


def _length_from_0(geometry: Geometry, keys: Tensor) -> int | None:
    """How many positions from 0 on hold all keys; None if that is not known, or far more than there are keys."""
    if geometry.given_key_positions is None and geometry.key_documents is None:
        return geometry.num_keys
    if geometry.device.type != "cpu":
        return None  # to look would be to wait for the device
    lowest, highest = (int(end) for end in keys.aminmax())
    return highest + 1 if lowest >= 0 and highest < FARTHEST * geometry.num_keys else None
