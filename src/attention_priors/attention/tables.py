"""What priors are made of, kept where it is asked for again and again: tables of stationary ones, lanes of keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from attention_priors.attention.geometry import Geometry
from attention_priors.priors import Lanes, Prior

GROWTH = 1024
"""Distances or positions by which what is kept grows at least: decoding needs one more with every token."""
SPAN = 4
"""Distances in a table that serves earlier requests too, at most, per distance of the largest of them: it must not
reach from one to another that is far away."""
FARTHEST = 4
"""Positions per key, at most, up to which lanes are kept: with gaps, most would be of positions where no key is."""


class _State(NamedTuple):
    """What a prior's numbers come from, but for its class."""

    tensors: list[Tensor]
    """Parameters and buffers."""
    settings: dict[str, Any]
    """Attributes that are plain."""

    @classmethod
    def of(cls, prior: Prior) -> _State:
        return cls([x.detach().clone() for x in _tensors(prior)], _settings(prior))

    def is_of(self, prior: Prior) -> bool:
        # By value: whoever writes to `parameter.data` leaves no other trace. They are a few numbers per head.
        tensors = list(_tensors(prior))
        return (
            len(tensors) == len(self.tensors)
            and all(torch.equal(old, new) for old, new in zip(self.tensors, tensors, strict=True))
            and self.settings == _settings(prior)
        )


def _tensors(prior: Prior) -> Iterator[Tensor]:
    yield from prior.parameters()
    yield from prior.buffers()


def _settings(prior: Prior) -> dict[str, Any]:
    return {
        f"{path}.{name}": value
        for path, part in prior.named_modules()  # of priors that it is made of, too
        if isinstance(part, Prior)
        for name, value in vars(part).items()
        if _is_plain(value) and name != "training"
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str) or (isinstance(value, tuple) and all(map(_is_plain, value)))


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

    Where no gradient is wanted, each prior's table is kept until the prior changes (parameters, buffers, plain
    attributes), and grows ahead of need.

    Args:
        terms: stationary priors.
        highest: and
        lowest: distances in tokens.
        like: has the dtype and the device that the table is to have.
    """
    total = None
    for term in terms:
        part = _kept_table(term, highest, lowest, like) if _may_keep(term) else None
        if part is None:
            distances = torch.arange(highest, lowest - 1, -1, device=like.device)
            part = term.log_prior_at(distances, like.dtype)
        total = part if total is None else total + part
    return total


def known_range(terms: Sequence[Prior]) -> tuple[float, float] | None:
    """Of the sum of kept tables, just asked for, the distance 0 included; None if one of them is not kept.

    Returns:
        The best log-prior among the query's own place and the one before, in the head where it is worst; and a number
        above which no head has one anywhere.
    """
    kept = [_kept.get(term) if _may_keep(term) else None for term in terms]
    known = [one for one in kept if one is not None]
    if len(known) < len(kept):
        return None
    largest = sum(one.largest for one in known)
    if len(known) == 1:
        return known[0].nearest, largest
    number = min(one.near().shape[1] for one in known)
    return _worst_of_heads(torch.stack([one.near()[:, -number:] for one in known]).sum(0)), largest


def _worst_of_heads(near: Tensor) -> float:
    return float(near.amax(1).min())


def _may_keep(term: Prior) -> bool:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() > 0:
        return False  # what is made now may be made up: a FakeTensor has no numbers
    learns = torch.is_grad_enabled()
    return not any(
        type(parameter) not in (Tensor, Parameter) or (learns and parameter.requires_grad)
        for parameter in term.parameters()
    )


def _kept_table(term: Prior, highest: int, lowest: int, like: Tensor) -> Tensor:
    kept = _kept.get(term)
    if kept is None or not kept.serves(term, highest, lowest, like):
        top, bottom, asked = highest, lowest, highest - lowest + 1
        if kept is not None:
            first, last = max(kept.highest, highest), min(kept.highest - kept.table.shape[1] + 1, lowest)
            if first - last < SPAN * max(asked, kept.asked):
                # It was asked for before: leave room, so that it is not made anew for each token.
                top, bottom = first + (max(GROWTH, asked // 4) if highest > kept.highest else 0), last
                asked = max(asked, kept.asked)
        # What inference mode makes could not be saved for a backward pass later.
        with torch.inference_mode(False), torch.no_grad():
            table = term.log_prior_at(torch.arange(top, bottom - 1, -1, device=like.device), like.dtype)
            kept = _Kept(_State.of(term), table, top, asked)
        _kept[term] = kept
    start = kept.highest - highest
    return kept.table[:, start : start + highest - lowest + 1]


def lanes_of(term: Prior, geometry: Geometry, dtype: torch.dtype) -> Lanes:
    """The lanes of a factored prior for these queries and keys.

    Where no gradient is wanted, those of keys are kept until the prior changes, and grow ahead of need.
    """
    queries, keys = geometry.query_positions, geometry.key_positions
    length = _length_from_0(geometry, keys) if _may_keep(term) else None
    if length is None:
        return term.lanes(queries, keys, dtype=dtype)
    kept, like = _kept_lanes.get(term), torch.empty(0, dtype=dtype, device=keys.device)
    if kept is None or not kept.serves(term, length, like):
        grown = length if kept is None else max(length, length + max(GROWTH, length // 4))
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(grown, device=keys.device)
            features = term.lanes(positions[:1], positions, dtype=dtype).key
            kept = _KeptLanes(_State.of(term), features)
        _kept_lanes[term] = kept
    one_after_another = geometry.given_key_positions is None and geometry.key_documents is None
    of_keys = kept.features[:length].unsqueeze(0) if one_after_another else kept.features[keys]
    return term.lanes(queries, keys[:, :1], dtype=dtype)._replace(key=of_keys)


def _length_from_0(geometry: Geometry, keys: Tensor) -> int | None:
    """How many positions from 0 on hold all keys; None if that is not known, or far more than there are keys."""
    if geometry.given_key_positions is None and geometry.key_documents is None:
        return geometry.num_keys
    if geometry.device.type != "cpu":
        return None  # to look would be to wait for the device
    lowest, highest = (int(end) for end in keys.aminmax())
    return highest + 1 if lowest >= 0 and highest < FARTHEST * geometry.num_keys else None
