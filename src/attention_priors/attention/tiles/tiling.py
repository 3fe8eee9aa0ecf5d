"""Tiling of queries and keys: tiles are ranges of queries times ranges of keys.

If documents and padding leave every query one run of keys, a tile holds only visible keys and keys that distance alone
hides. Its bias is then a view of a table. Otherwise, tiles need masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.geometry import Geometry

SHORTEST_SEGMENT = 64
"""Mean number of queries per segment below which masks are cheaper than many small calls."""
FEW_PAIRS = 2**15
"""Query-key pairs up to which one tile of all pairs is faster than several tiles, which skip hidden keys."""
FEW_NUMBERS = 2**20
"""Logits, over all heads and rows of the batch, up to which one tile is faster. More do not fit in a core's cache."""


class Tile(NamedTuple):
    """Queries ``start..stop`` and keys ``first..last`` of some rows of the batch."""

    batches: slice
    start: int
    stop: int
    first: int
    last: int

    @property
    def rows(self) -> slice:
        """Slice of the queries."""
        return slice(self.start, self.stop)

    @property
    def keys(self) -> slice:
        """Slice of the keys."""
        return slice(self.first, self.last)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and number of keys."""
        return self.stop - self.start, self.last - self.first

    @property
    def number(self) -> int:
        """Number of rows of the batch."""
        return self.batches.stop - self.batches.start

    def texts(self) -> list[Tile]:
        """Return one tile for each row of the batch."""
        return [self._replace(batches=slice(b, b + 1)) for b in range(self.batches.start, self.batches.stop)]

    def cut_rows(self, tensor: Tensor, heads: slice) -> Tensor:
        """Return the tile's queries of ``(B, H, Lq, ...)``, in order: a view ``(number, h, n, ...)``."""
        return tensor[self.batches, heads, self.rows]

    def cut_keys(self, tensor: Tensor, heads: slice) -> Tensor:
        """Return the tile's keys of ``(B, Hkv, Lk, D)``: a view ``(number, h, e, D)``."""
        return tensor[self.batches, heads, self.keys]


class RowBlock(NamedTuple):
    """Queries that are computed together, and the tiles of all keys that they see."""

    whole: Tile
    """Queries of the block, and all keys that any of them sees."""
    strips: list[list[Tile]]
    """Disjoint ranges of the keys, each as tiles that divide the queries of the block, in order."""


class Part(NamedTuple):
    """Rows of the batch and heads that are computed together: heads of one key head, or all heads of several."""

    batches: slice
    heads: slice
    kv_heads: slice

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Return the part's rows and key heads of ``(B, Hkv, ...)``."""
        return tensor[self.batches, self.kv_heads]

    def within(self, batches: slice) -> slice:
        """Return rows of the batch, counted from the part's first row."""
        return slice(batches.start - self.batches.start, batches.stop - self.batches.start)


def divide(batch: int, heads: int, kv_heads: int, count: int, unit: int) -> list[Part]:
    """Divide a batch into about ``count`` equal parts. ``unit`` heads (1, or all that share keys) stay together."""
    group = heads // kv_heads
    texts = max(1, batch // count)
    step = max(unit, heads // max(1, count * texts // batch))
    if step >= group:
        step -= step % group
    while group % step and step < group:
        step -= 1
    texts_of = [slice(b, min(b + texts, batch)) for b in range(0, batch, texts)]
    heads_of = [slice(h, min(h + step, heads)) for h in range(0, heads, step)]
    return [Part(b, h, slice(h.start // group, (h.stop - 1) // group + 1)) for b in texts_of for h in heads_of]


@dataclass(frozen=True)
class Tiling:
    """Segments of one problem. A *segment* is a tile outside of which its queries see no key."""

    geometry: Geometry
    reach: tuple[int, int] | None
    """Smallest and largest distance that the prior lets a query see; None for all distances."""
    segments: list[Tile]
    masked: bool
    """Whether a segment holds keys that documents, padding or ``attn_mask`` hide from some of its queries."""

    @classmethod
    def of(cls, geometry: Geometry, reach: tuple[int, int] | None) -> Tiling:
        """Cut a problem into segments."""
        whole = Tile(slice(0, geometry.batch), 0, geometry.num_queries, 0, geometry.num_keys)
        documents, padding = geometry.key_documents, geometry.key_padding_mask
        hidden = geometry.attn_mask is not None
        is_small = geometry.num_queries * geometry.num_keys <= FEW_PAIRS
        if is_small or geometry.offset is None or (documents is None and padding is None):
            return cls(geometry, reach, [whole], geometry.has_masks)
        first, last, contiguous = _runs(geometry)
        if contiguous and not hidden:
            segments = _segments(first, last)
            rows = sum((s.stop - s.start) * (s.batches.stop - s.batches.start) for s in segments)
            if len(segments) == 1 or rows >= SHORTEST_SEGMENT * len(segments):
                return cls(geometry, reach, segments, False)
        return cls(geometry, reach, _coarse(whole, first.amin(0).tolist(), last.amax(0).tolist()), True)

    def of_texts(self, batches: slice) -> Tiling:
        """Restrict the tiling to some rows of the batch."""
        within = [_overlap(segment.batches, batches) for segment in self.segments]
        segments = [s._replace(batches=b) for s, b in zip(self.segments, within, strict=True) if b.start < b.stop]
        return replace(self, segments=segments)

    def keys_of(self, segment: Tile, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the segment's keys that any of the queries ``start..stop`` can see."""
        first, last = segment.first, segment.last
        offset = self.geometry.offset
        if offset is not None:
            earliest, latest = start + offset, stop - 1 + offset
            if self.geometry.causal:
                last = min(last, latest + 1)
            if self.reach is not None:
                first, last = max(first, earliest - self.reach[1]), min(last, latest - self.reach[0] + 1)
        return (first, last) if first < last else (segment.first, segment.first)

    def row_blocks(self, rows: int, diagonal_rows: int, keys: int | None) -> Iterator[RowBlock]:
        """Yield all queries in blocks of ``rows``, with tiles of at most ``keys`` keys.

        Large tiles hold the keys that all queries of a block see. Small tiles next to the diagonal or at the ends of a
        window, of at least ``diagonal_rows`` queries and about equal size, hold the other keys. So few hidden keys are
        computed.
        """
        if self.reach is not None and self.reach[1] - self.reach[0] < 2 * rows:
            rows = min(rows, diagonal_rows)  # a window that moves past its keys within one block
        for segment in self.segments:
            for start in range(segment.start, segment.stop, rows):
                stop = min(start + rows, segment.stop)
                whole = Tile(segment.batches, start, stop, *self.keys_of(segment, start, stop))
                yield RowBlock(whole, list(self._strips(segment, whole, diagonal_rows, keys)))

    def _strips(self, segment: Tile, block: Tile, diagonal_rows: int, keys: int | None) -> Iterator[list[Tile]]:
        """Yield the strips of a block."""
        (_, start, stop, first, last), offset, causal = block, self.geometry.offset, self.geometry.causal
        far, near, count = first, last, (stop - start) // diagonal_rows
        if offset is not None and stop - start > diagonal_rows:
            # All queries see the keys from `far` to `near`. Each query also sees a key of each edge.
            low, high = self.reach or (None, None)
            low = max(0, low or 0) if causal else low
            far = first if high is None else max(first, stop + offset - high)
            near = last if low is None else min(last, start + offset - low)
            if near - far <= 2 * diagonal_rows:
                far, near = first, first if causal else last
        for edge in (slice(near, last), slice(first, far)):
            if edge.start < edge.stop:
                parts = pairwise(start + i * (stop - start) // count for i in range(count + 1))
                seen = [(a, b, *self.keys_of(segment, a, b)) for a, b in parts]
                cut = [(a, b, max(c, edge.start), min(d, edge.stop)) for a, b, c, d in seen]
                yield [Tile(segment.batches, a, b, c, max(c, d)) for a, b, c, d in cut]
        for part in ranges_of(far, near, keys):
            yield [Tile(segment.batches, start, stop, *part)]
        if first == last:
            yield [block]

    def blocks(self, rows: int) -> Iterator[Tile]:
        """Yield all queries in tiles of at most ``rows`` queries, with all keys (maybe 0) that any of them can see."""
        for segment in self.segments:
            start = segment.start
            while start < segment.stop:
                # Stop at a multiple of `rows`, where the blocks of pruning begin.
                stop = min((start // rows + 1) * rows, segment.stop)
                first, last = self.keys_of(segment, start, stop)
                yield segment._replace(start=start, stop=stop, first=first, last=last)
                start = stop


def _overlap(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def ranges_of(first: int, last: int, size: int | None) -> list[tuple[int, int]]:
    """Split ``first..last`` into ranges of at most ``size``; None for one range."""
    step = max(1, last - first) if size is None else size
    return [(start, min(start + step, last)) for start in range(first, last, step)]


def _runs(geometry: Geometry) -> tuple[Tensor, Tensor, bool]:
    """Return the first and one-past-last key that documents and padding leave each query, ``(B, Lq)``.

    The third result says whether every query sees all keys between the two.
    """
    shape = (geometry.batch, geometry.num_queries)
    if geometry.key_documents is not None:
        first, last = geometry.document_range
    else:
        first = torch.zeros(shape, dtype=torch.int64, device=geometry.device)
        last = torch.full(shape, geometry.num_keys, device=geometry.device)
    padding = geometry.key_padding_mask
    if padding is None:
        return first, last, True
    slots = torch.arange(geometry.num_keys, device=geometry.device).expand_as(padding)
    number = geometry.num_keys
    # For each slot, the next key that is not padding, and one past the last such key before the slot.
    following = torch.nn.functional.pad(slots.masked_fill(padding, number), (0, 1), value=number)
    following = following.flip(-1).cummin(-1).values.flip(-1)
    before = torch.nn.functional.pad((slots + 1).masked_fill(padding, 0), (1, 0)).cummax(-1).values
    count = torch.nn.functional.pad((~padding).cumsum(-1), (1, 0))
    seen = count.gather(1, last) - count.gather(1, first)
    first, last = following.gather(1, first), before.gather(1, last)
    last = torch.maximum(first, last)
    first = torch.where(seen == 0, last, first)
    return first, last, bool((last - first == seen).all())


def _segments(first: Tensor, last: Tensor) -> list[Tile]:
    """Return one segment for each run of queries with equal keys, for the whole batch if its rows are alike."""
    batch, length = first.shape
    alike = bool((first == first[:1]).all() & (last == last[:1]).all())
    segments = []
    for b in range(1 if alike else batch):
        change = (first[b, 1:] != first[b, :-1]) | (last[b, 1:] != last[b, :-1])
        starts = [0, *(change.nonzero().flatten() + 1).tolist()]
        ranges = zip(first[b, starts].tolist(), last[b, starts].tolist(), strict=True)
        batches = slice(0, batch) if alike else slice(b, b + 1)
        for start, stop, (k, m) in zip(starts, [*starts[1:], length], ranges, strict=True):
            segments.append(Tile(batches, start, stop, k, m))
    return segments


def _coarse(whole: Tile, first: list[int], last: list[int]) -> list[Tile]:
    """Return pieces of the queries, with all keys that any query of the piece may see."""
    pieces = []
    for start in range(0, whole.stop, 2 * SHORTEST_SEGMENT):
        stop = min(start + 2 * SHORTEST_SEGMENT, whole.stop)
        low, high = min(first[start:stop]), max(last[start:stop])
        pieces.append(whole._replace(start=start, stop=stop, first=low, last=max(low, high)))
    return pieces
