"""Tables of stationary priors: one number per distance and head, kept where they are asked for again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attention_priors.priors import Prior

GROWTH = 1024
"""Distances by which a kept table grows at least: decoding needs one more with every token."""


@dataclass
class _Kept:
    """A table whose prior has not changed since."""

    parameters: list[Tensor]
    table: Tensor
    """``(H, N)``; entry 0 is that of the distance ``highest``, and they fall by one."""
    highest: int
    largest: float
    """Of the table's numbers."""

    def serves(self, prior: Prior, highest: int, lowest: int, like: Tensor) -> bool:
        same_kind = self.table.dtype == like.dtype and self.table.device == like.device
        return (
            same_kind
            and highest <= self.highest
            and lowest > self.highest - self.table.shape[1]
            # By value: whoever writes to `parameter.data` leaves no other trace. They are a few numbers per head.
            and all(torch.equal(old, new) for old, new in zip(self.parameters, prior.parameters(), strict=True))
        )


_kept: WeakKeyDictionary[Prior, _Kept] = WeakKeyDictionary()


def consecutive_table(terms: Sequence[Prior], highest: int, lowest: int, like: Tensor) -> Tensor | None:
    """The sum of the priors at ``highest, highest - 1, ..., lowest``, ``(H, N)``; None if there are no terms.

    Where no gradient is wanted, each prior's table is kept until its parameters change, and grows ahead of need.

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


def known_bound(terms: Sequence[Prior]) -> float | None:
    """Above which the sum of kept tables, just asked for, has no number; None if one of them is not kept."""
    total = 0.0
    for term in terms:
        kept = _kept.get(term) if _may_keep(term) else None
        if kept is None:
            return None
        total += kept.largest
    return total


def _may_keep(term: Prior) -> bool:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in term.parameters()))


def _kept_table(term: Prior, highest: int, lowest: int, like: Tensor) -> Tensor:
    kept = _kept.get(term)
    if kept is None or not kept.serves(term, highest, lowest, like):
        top, bottom = highest, lowest
        if kept is not None:
            # It was asked for before: leave room, so that it is not made anew for each token.
            top = max(kept.highest, highest)
            bottom = min(kept.highest - kept.table.shape[1] + 1, lowest)
            top += max(GROWTH, top // 4) if highest > kept.highest else 0
        # What inference mode makes could not be saved for a backward pass later.
        with torch.inference_mode(False), torch.no_grad():
            table = term.log_prior_at(torch.arange(top, bottom - 1, -1, device=like.device), like.dtype)
            kept = _Kept([p.detach().clone() for p in term.parameters()], table, top, float(table.max()))
        _kept[term] = kept
    start = kept.highest - highest
    return kept.table[:, start : start + highest - lowest + 1]
