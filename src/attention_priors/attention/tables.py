"""Tables of priors, with one number for each distance or key, cached between calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from numbers import Number
from operator import is_
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
"""Smallest growth of a cached table, in distances or positions. Decoding needs one more with every token."""
SPAN = 4
"""Largest size of a table that also serves earlier requests, in multiples of the largest request. A table must not
span requests that are far apart."""
FARTHEST = 4
"""Largest range of positions, per key, for a cached table of keys. With wider gaps, most entries would have no key."""
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module. Apart from parameters and buffers, they do not affect a prior."""
UNCHANGING = (Number, str, bytes, NoneType, Enum, range, torch.dtype, torch.device)
"""Types of values that cannot change in place."""


class _NotComparableError(Exception):
    """Error for an attribute whose later change no comparison would detect."""


class _Part(NamedTuple):
    """Copies of the attributes, parameters and buffers of one module of a prior."""

    kind: type
    size: int
    """Number of attributes, including PyTorch's own."""
    attributes: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _Part:
        own = vars(module)
        attributes = {name: _copy(value) for name, value in own.items() if name not in OWN_ATTRIBUTES}
        # Parameters may require gradients: `_may_keep` checks whether the caller needs gradients.
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
    """Copies of everything that a prior's numbers depend on, one part per module.

    States compare by value, because writing to ``parameter.data`` or to a list leaves no other trace. The values are a
    few numbers per head.
    """

    parts: list[_Part]

    @classmethod
    def of(cls, prior: Prior) -> _State | None:
        """Copy the state of a prior; return None if it has an attribute that cannot be compared."""
        try:
            return cls([_Part.of(module) for module in _modules(prior)])
        except _NotComparableError:
            return None

    def is_of(self, prior: Prior) -> bool:
        modules = _modules(prior)
        return len(modules) == len(self.parts) and all(map(_Part.is_of, self.parts, modules))


def _modules(prior: Prior) -> list[nn.Module]:
    # Most priors have no submodules.
    return list(prior.modules()) if prior._modules else [prior]


def _copy(value: Any) -> Any:
    """Return a copy that later changes of the value do not affect.

    Raises:
        _NotComparableError: :func:`_is_same` could not detect a change of the value.
    """
    if isinstance(value, UNCHANGING):
        return value
    if type(value) in (list, tuple, set, frozenset):
        copied = type(value)(map(_copy, value))
        # A tuple of unchanging values is its own copy, and then comparisons end at its identity.
        return value if type(value) is tuple and all(map(is_, copied, value)) else copied
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
    """Return whether a value equals the copy ``old``."""
    if new is old:
        return True
    if isinstance(old, Tensor):
        return (
            isinstance(new, Tensor)
            and new.dtype is old.dtype
            and new.requires_grad is old.requires_grad
            and new.device == old.device
            and torch.equal(old, new)
        )
    if type(new) is not type(old):
        return False
    if isinstance(old, list | tuple):
        return len(old) == len(new) and _are_same(old, new)
    if isinstance(old, dict):
        # The order of entries may matter to the prior.
        return len(old) == len(new) and _are_same(old, new) and _are_same(old.values(), new.values())
    return old == new


def _are_same(old: Collection[Any], new: Collection[Any]) -> bool:
    # Most entries are the very same objects, and this runs once per layer and token.
    return all(map(is_, old, new)) or all(map(_is_same, old, new))


@dataclass
class _Kept:
    """Cached table of a prior, valid while the prior does not change."""

    state: _State
    table: Tensor
    """Log-prior ``(1, H, 1, N)``. Entry 0 is at the distance ``highest``, and distances fall by one."""
    highest: int
    asked: int
    """Number of distances in the largest request."""

    @cached_property
    def lowest(self) -> int:
        """Distance of the last entry."""
        return self.highest - self.table.shape[-1] + 1

    @cached_property
    def rounded(self) -> Tensor:
        """Table in float32."""
        return self.table.float()

    def serves(self, prior: Prior, highest: int, lowest: int, device: torch.device) -> bool:
        return (
            self.table.device == device
            and highest <= self.highest
            and lowest >= self.lowest
            and self.state.is_of(prior)
        )

    def between(self, highest: int, lowest: int, dtype: torch.dtype) -> Tensor:
        """Return the entries for ``highest, highest - 1, ..., lowest``."""
        table = self.table if dtype == torch.float64 else self.rounded
        return table.narrow(-1, self.highest - highest, highest - lowest + 1)


_kept: WeakKeyDictionary[Prior, _Kept] = WeakKeyDictionary()


def consecutive_table(
    terms: Sequence[Prior], highest: int, lowest: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor | None:
    """Return the sum of the priors at ``highest, highest - 1, ..., lowest``, ``(H, N)``; None without priors.

    If no gradient is needed, each prior's table is cached until the prior changes. A cached table grows ahead of need.
    A prior with an attribute that cannot be compared gets a new table in every call.

    Args:
        terms: stationary priors, for a table over distances. Or priors that depend only on the key, for a table over
            negative positions.
        highest: first distance in tokens.
        lowest: last distance in tokens.
        device: device of the table.
        dtype: float64 or float32.
    """
    total = None
    for term in terms:
        part = _kept_table(term, highest, lowest, device, dtype) if _may_keep(term, device) else None
        if part is None:
            part = _table(term, highest, lowest, device).to(dtype)
        total = part if total is None else total + part
    return total


def cached_row(prior: Prior, number: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Return a prior at the distances ``number - 1, ..., 0`` if :func:`consecutive_table` has cached them.

    The result is the bias of one query, ``(1, H, 1, N)``. It is None for any other prior, and for one that hides keys
    or is over a grid. The caller needs no gradient.
    """
    kept = _kept.get(prior)
    if kept is None or prior.over_grid or type(prior).visible_at is not Prior.visible_at:
        return None
    return kept.between(number - 1, 0, dtype) if kept.serves(prior, number - 1, 0, device) else None


def table_at(terms: Sequence[Prior], at: Tensor) -> Tensor | None:
    """Return the sum of the priors at ``at``, ``(H, *at.shape)``; None without priors.

    ``at`` holds distances, or positions for priors that depend only on the key.
    """
    parts = [checked_log_prior(term, at, torch.float64) for term in terms]
    return sum(parts[1:], parts[0]) if parts else None


def table_of_network(network: ScaledDistance) -> Tensor | None:
    """Return a network's log-prior at its distances, ``(H, N)``, if all queries have the same scale.

    FIRE's queries do, up to its threshold. The result is None if scales differ or cannot be read.
    """
    row = network.row.flatten()
    if not can_be_read(row.detach()) or bool((row != row[0]).any()):
        return None
    return network._replace(row=row[:1]).log_prior().squeeze(1)


def table_of_keys(terms: Sequence[Prior], geometry: Geometry, key_bias: Tensor | None = None) -> Tensor | None:
    """Return the sum of ``key_bias`` and the priors of the key, ``(1 or B, H, Lk)`` in float64; None without either."""
    given = None if key_bias is None else key_bias.double()
    table = _table_of_keys(terms, geometry) if terms else None
    return table if given is None else given if table is None else table + given


def visible_at(terms: Sequence[Prior], highest: int, number: int, device: torch.device) -> Tensor | None:
    """Return which of ``number`` distances, from ``highest`` down by one, the prior lets a query see; None for all."""
    # A prior that hides keys overrides visible_at().
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
    # Comparing the cached state would synchronize with the device.
    if device.type in ("meta", "cuda") or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False  # (FakeTensors have no numbers.)
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
    """Return the prior's part of :func:`consecutive_table` from the cache; None if its state cannot be compared."""
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
                # A repeated request: leave room, so that the table is not rebuilt for each token.
                room = max(GROWTH, asked // 4)
                top, bottom = first + room * (highest > kept.highest), last - room * (lowest < kept.lowest)
                asked = max(asked, kept.asked)
        # An inference tensor could not be saved for a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            table = _table(term, top, bottom, device)[None, :, None]
        kept = _kept[term] = _Kept(state, table, top, asked)
    return kept.between(highest, lowest, dtype).squeeze((0, 2))


def _length_from_0(geometry: Geometry, keys: Tensor) -> int | None:
    """Return how many positions from 0 on include all keys; None if unknown, or far more than there are keys."""
    if geometry.given_key_positions is None and geometry.key_documents is None:
        return geometry.num_keys
    if geometry.device.type != "cpu" or is_traced() or torch._C._are_functorch_transforms_active():
        return None  # reading positions would synchronize with the device, or there are no values
    lowest, highest = (int(end) for end in keys.aminmax())
    return highest + 1 if lowest >= 0 and highest < FARTHEST * geometry.num_keys else None
