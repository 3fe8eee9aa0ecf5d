"""Positions, documents and masks: which query sees which key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attention_priors.precision import is_captured


@dataclass(frozen=True)
class Geometry:
    """Checked positions and masks of one attention problem.

    ``B`` is the batch size, ``H`` the number of query heads, ``Lq`` of queries, and ``Lk`` of keys. A *slot* is an
    index into queries or keys. Tensors of positions have a leading dimension of 1 or ``B``.
    """

    batch: int
    heads: int
    num_queries: int
    num_keys: int
    device: torch.device
    causal: bool
    given_query_positions: Tensor | None = None
    """Positions from the caller, ``(1 or B, Lq)``. None: the last query is at the last key."""
    given_key_positions: Tensor | None = None
    """Positions from the caller, ``(1 or B, Lk)``. None: positions count from 0 in each document."""
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    """Boolean mask (True = forbidden) or floats added to the scaled logits, ``(B or 1, H or 1, Lq or 1, Lk)``."""

    # ---- positions

    # Not cached: attend() reads these properties outside its operators, where Dynamo cannot trace a cached_property.

    @property
    def key_positions(self) -> Tensor:
        """Position of each key, ``(1 or B, Lk)``."""
        if self.given_key_positions is not None:
            return self.given_key_positions
        if self.key_documents is not None:
            return positions_in_documents(self.key_documents)
        return torch.arange(self.num_keys, device=self.device).unsqueeze(0)

    @property
    def query_positions(self) -> Tensor:
        """Position of each query, ``(1 or B, Lq)``."""
        if self.given_query_positions is not None:
            return self.given_query_positions
        behind = self.num_keys - self.num_queries
        if self.given_key_positions is None and self.key_documents is None:
            return torch.arange(behind, self.num_keys, device=self.device).unsqueeze(0)
        keys = self.key_positions
        if behind >= 0:
            return keys[:, behind:]
        # More queries than keys: the last query is still at the last key, so the first queries lie before all keys.
        return keys[:, -1:] + torch.arange(1 - self.num_queries, 1, device=self.device)

    @property
    def has_given_positions(self) -> bool:
        """Whether the caller gave positions. Otherwise, distances lie between ``1 - Lk`` and ``Lq - 1``."""
        return self.given_query_positions is not None or self.given_key_positions is not None

    @property
    def has_masks(self) -> bool:
        """Whether documents, padding or ``attn_mask`` may hide keys, besides the causal mask."""
        return self.key_documents is not None or self.key_padding_mask is not None or self.attn_mask is not None

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch's own causal flag describes all masks."""
        # Given positions do not count as plain, even if they are equivalent: a check would have to read their values.
        return not self.has_masks and (
            not self.causal or (not self.has_given_positions and self.num_queries in (1, self.num_keys))
        )

    def farthest_and_nearest(self) -> tuple[int, int]:
        """Return the largest and the smallest distance between a query and a key of the same example."""
        queries, keys = self.query_positions, self.key_positions
        ends = torch.stack([(queries.amax(-1) - keys.amin(-1)).max(), (queries.amin(-1) - keys.amax(-1)).min()])
        farthest, nearest = ends.tolist()
        return farthest, nearest

    @cached_property
    def offset(self) -> int | None:
        """Constant in the distance ``i + offset - j`` of query slot ``i`` and key slot ``j``; None if there is none.

        The formula holds for all pairs that may see each other. With an offset, a stationary bias is a view of a table,
        and the keys that a query may see are a range of slots.
        """
        behind = self.num_keys - self.num_queries
        if self.key_documents is None and not self.has_given_positions:
            return behind
        if is_captured():
            return None
        documents = None if self.has_given_positions else self.key_documents
        if documents is not None and bool((documents[:, 1:] >= documents[:, :-1]).all()):
            return behind  # each document is one run of slots, as is usual
        slots = torch.arange(max(self.num_queries, self.num_keys), device=self.device)
        query_shift = self.query_positions - slots[: self.num_queries]
        key_shift = self.key_positions - slots[: self.num_keys]
        if self.key_documents is None:
            offset = query_shift - key_shift[:, :1]
            regular = (offset == offset[:1, :1]).all() & (key_shift == key_shift[:, :1]).all()
            return int(offset[0, 0]) if regular else None
        # Each document must be one run of slots with unit-stride positions, and queries must be the last keys.
        start, _ = document_bounds(self.key_documents)
        in_document = positions_in_documents(self.key_documents)
        contiguous = (in_document == slots[: self.num_keys] - start).all()
        unit_stride = (key_shift == key_shift.expand(len(start), -1).gather(1, start)).all()
        own = (key_shift + slots[: self.num_keys])[:, behind:]
        same = (query_shift + slots[: self.num_queries] == own).all()
        return behind if contiguous & unit_stride & same else None

    # ---- what a query may see

    def visible(self, rows: slice = slice(None), keys: slice = slice(None)) -> Tensor | None:
        """Return which keys each query may see, ``(B or 1, H or 1, n or 1, e)``; None if all keys are visible.

        A visible key is in the same document, not padding, not in the future, and not forbidden by ``attn_mask``. The
        window of a prior hides no key here.
        """
        visible = self.allowed(rows, keys)
        if self.causal:
            past = self.key_positions[:, None, None, keys] <= self.query_positions[:, None, rows, None]
            visible = past if visible is None else visible & past
        return visible

    def allowed(self, rows: slice, keys: slice, batches: slice = slice(None)) -> Tensor | None:
        """Return the result of :meth:`visible` without the causal mask."""
        allowed = None

        def also(mask: Tensor) -> None:
            nonlocal allowed
            allowed = mask if allowed is None else allowed & mask

        if self.query_documents is not None and self.key_documents is not None:
            also(self.query_documents[batches, None, rows, None] == self.key_documents[batches, None, None, keys])
        if self.key_padding_mask is not None:
            also(~self.key_padding_mask[batches, None, None, keys])
        if self.attn_mask is not None:
            mask = self.cut_mask(rows, keys, batches)
            also(~mask if mask.dtype == torch.bool else mask != float("-inf"))
        return allowed

    def cut_mask(self, rows: slice, keys: slice, batches: slice = slice(None)) -> Tensor:
        """Return the part of ``attn_mask`` for some queries and keys."""
        assert self.attn_mask is not None
        mask = self.attn_mask[batches] if self.attn_mask.shape[0] > 1 else self.attn_mask
        return mask[:, :, rows, keys] if mask.shape[2] > 1 else mask[..., keys]

    @cached_property
    def visible_keys(self) -> Tensor:
        """Number of keys ``n_i`` that each query may see, integers ``(B, H or 1, Lq)``."""
        heads = 1 if self.attn_mask is None else self.attn_mask.shape[1]
        shape = (self.batch, heads, self.num_queries)
        if self.causal and not self.has_given_positions and not self.has_masks:
            first = 1 + self.num_keys - self.num_queries
            counts = torch.arange(first, first + self.num_queries, device=self.device)
            return counts.clamp_(0, self.num_keys).expand(shape)
        if self.attn_mask is None and self.offset is not None:
            first, last = self.slot_range
            if self.key_padding_mask is None:
                return (last - first).unsqueeze(1).expand(shape)
            seen = torch.nn.functional.pad((~self.key_padding_mask).cumsum(-1), (1, 0))
            counts = (seen.gather(1, slots.expand(self.batch, -1)) for slots in (last, first))
            return (next(counts) - next(counts)).unsqueeze(1)
        counts = torch.full(shape, self.num_keys, device=self.device)
        step = block_length(self.num_keys * self.batch)
        for start in range(0, self.num_queries, step):
            rows = slice(start, min(start + step, self.num_queries))
            visible = self.visible(rows)
            if visible is not None:
                counts[..., rows] = visible.sum(-1)
        return counts

    @cached_property
    def slot_range(self) -> tuple[Tensor, Tensor]:
        """First and one-past-last key slot that each query may see, ``(B or 1, Lq)``. Requires ``offset``."""
        assert self.offset is not None
        own = torch.arange(self.num_queries, device=self.device).unsqueeze(0) + self.offset
        first = torch.zeros_like(own)
        last = (own + 1).clamp(0, self.num_keys) if self.causal else torch.full_like(own, self.num_keys)
        if self.key_documents is not None:
            start, end = self.document_range
            first, last = torch.maximum(first, start), torch.minimum(last.expand_as(end), end)
        return first, torch.maximum(first, last)

    @cached_property
    def document_range(self) -> tuple[Tensor, Tensor]:
        """First and one-past-last key slot of each query's document, ``(B, Lq)``. Requires ``offset``."""
        assert self.key_documents is not None
        start, end = document_bounds(self.key_documents)
        # With documents, the queries are the last keys.
        behind = self.num_keys - self.num_queries
        return start[:, behind:], end[:, behind:]

    def rows(self, rows: slice) -> Geometry:
        """Return the geometry of some of the queries and all keys."""
        attn_mask = self.attn_mask
        if attn_mask is not None and attn_mask.shape[2] > 1:
            attn_mask = attn_mask[:, :, rows]
        start, stop, _ = rows.indices(self.num_queries)
        return replace(
            self,
            num_queries=stop - start,
            given_query_positions=self.query_positions[:, rows],
            given_key_positions=self.key_positions,
            query_documents=None if self.query_documents is None else self.query_documents[:, rows],
            attn_mask=attn_mask,
        )


def block_length(row_size: int, budget: int = 2**21) -> int:
    """Return how many rows of ``row_size`` numbers fit a buffer of ``budget`` numbers, at least one."""
    return max(1, budget // max(1, row_size))


def document_bounds(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and one-past-last slot of each slot's run of equal ids, both ``(B, L)``."""
    length = documents.shape[-1]
    slots = torch.arange(length, device=documents.device).expand_as(documents)
    changes = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    start = torch.where(changes, slots, 0).cummax(-1).values
    ends = torch.nn.functional.pad(changes[:, 1:], (0, 1), value=True)
    end = torch.where(ends, slots + 1, length).flip(-1).cummin(-1).values.flip(-1)
    return start, end


def positions_in_documents(documents: Tensor) -> Tensor:
    """Return each token's index in its document, ``(B, L)``. Documents need not be contiguous."""
    order = documents.argsort(dim=-1, stable=True)
    start, _ = document_bounds(documents.gather(-1, order))
    rank = torch.arange(documents.shape[-1], device=documents.device) - start
    return torch.empty_like(order).scatter_(-1, order, rank)
