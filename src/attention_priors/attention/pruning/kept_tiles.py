"""The tiles of a pruned problem: what is left of each head's keys, in as few and as large tiles as it goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.pruning.bounds import BLOCK
from attention_priors.attention.tiles.tiling import Tile, Tiling

SPARE = 1.2
"""Tiles along a diagonal are made of one shape if that makes them larger by no more than this factor."""


class KeptTile(NamedTuple):
    """A tile, and the heads that look at it."""

    heads: slice
    kv_heads: slice
    """Which keys they look at: one head of keys, or one per head of queries."""
    tile: Tile

    def cut(self, numbers: int, keys: int, rows: int | None = None) -> Iterator[KeptTile]:
        """Parts whose biases have about so many numbers, with at most so many ``keys`` and, if given, ``rows``."""
        tall = self.tile.stop - self.tile.start
        rows = tall if rows is None else min(rows, tall)
        keys = max(1, min(keys, self.tile.shape[1], numbers // rows))
        heads = self.heads.stop - self.heads.start
        shared = self.kv_heads.stop - self.kv_heads.start == 1
        together = min(heads, max(1, numbers // (rows * keys)))
        count = max(1, numbers // (rows * keys * together))
        for h in range(0, heads, together):
            number = min(together, heads - h)
            q_heads = slice(self.heads.start + h, self.heads.start + h + number)
            kv = self.kv_heads.start + h
            kv_heads = self.kv_heads if shared else slice(kv, kv + number)
            for c in range(0, self.tile.repeats, count):
                tile = self.tile.moved(c, min(count, self.tile.repeats - c))
                for start in range(tile.start, tile.stop, rows):
                    part = tile._replace(start=start, stop=min(start + rows, tile.stop))
                    for first in range(tile.first, tile.last, keys):
                        last = min(first + keys, tile.last)
                        yield KeptTile(q_heads, kv_heads, part._replace(first=first, last=last))

    def each(self) -> Iterator[KeptTile]:
        """One tile per head and block of queries."""
        shared = self.kv_heads.stop - self.kv_heads.start == 1
        for place, head in enumerate(range(self.heads.start, self.heads.stop)):
            kv = self.kv_heads.start + (0 if shared else place)
            for c in range(self.tile.repeats):
                tile = self.tile.moved(c, 1)
                for start in range(tile.start, tile.stop, BLOCK):
                    rows = tile._replace(start=start, stop=min(start + BLOCK, tile.stop))
                    yield KeptTile(slice(head, head + 1), slice(kv, kv + 1), rows)


def whole_heads(kept: Tensor) -> list[int]:
    """Heads that keep everything."""
    return kept.all(-1).all(-1).all(0).nonzero().flatten().tolist()


def kept_tiles(tiling: Tiling, kept: Tensor, kv_heads: int, join: bool) -> list[KeptTile]:
    """Tiles that hold what heads keep that do not keep everything.

    Args:
        tiling: of the problem.
        kept: ``(B, H, ⌈Lq / 256⌉, ⌈Lk / 256⌉)``, boolean. Some more may be in the tiles, always the same.
        kv_heads: heads of keys.
        join: whether to join blocks of queries that look at the same keys. (Along diagonals, where the bias is the
            same, they are joined wherever no mask tells them apart.)
    """
    group = kept.shape[1] // kv_heads
    whole = set(whole_heads(kept))
    runs = _runs(kept)
    found: list[KeptTile] = []
    for segment in tiling.segments:
        for batch in range(segment.batches.start, segment.batches.stop):
            alone = segment._replace(batches=slice(batch, batch + 1))
            heads_of: dict[tuple[int, ...], tuple[Tile, list[int]]] = {}
            for head in range(kept.shape[1]):
                if head not in whole:
                    for tile in _tiles_of_head(tiling, alone, runs[batch][head], join):
                        heads_of.setdefault(tile[1:], (tile, []))[1].append(head)
            for tile, heads in heads_of.values():
                found += [
                    KeptTile(some, slice(some.start // group, (some.stop - 1) // group + 1), tile)
                    for some in _neighbours(heads, group)
                ]
    return found


def _runs(kept: Tensor) -> list[list[list[list[tuple[int, int]]]]]:
    """Runs of kept blocks, ``[batch][head][block of queries]``: first and one past the last."""
    edges = pad(kept.to(torch.int8), (1, 1)).diff(dim=-1).nonzero().tolist()
    batch, heads, blocks, _ = kept.shape
    runs: list[list[list[list[tuple[int, int]]]]] = [
        [[[] for _ in range(blocks)] for _ in range(heads)] for _ in range(batch)
    ]
    for (b, h, i, start), (*_, stop) in zip(edges[::2], edges[1::2], strict=True):
        runs[b][h][i].append((start, stop))
    return runs


def _tiles_of_head(tiling: Tiling, segment: Tile, runs: list[list[tuple[int, int]]], join: bool) -> Iterator[Tile]:
    """One head's tiles: the last run of each block of queries along a diagonal, the others as they are."""
    pieces: list[Tile] = []
    others: list[list[tuple[int, int]]] = []
    start = segment.start
    while start < segment.stop:
        stop = min((start // BLOCK + 1) * BLOCK, segment.stop)
        low, high = tiling.keys_of(segment, start, stop)
        keys = [(max(f * BLOCK, low), min(e * BLOCK, high)) for f, e in runs[start // BLOCK]]
        keys = [(first, last) for first, last in keys if first < last]
        if keys:
            pieces.append(segment._replace(start=start, stop=stop, first=keys[-1][0], last=keys[-1][1]))
            others.append(keys[:-1])
        start = stop
    diagonals = pieces if tiling.masked else list(_along_diagonals(pieces, segment))
    yield from diagonals
    members = [tile.moved(c, 1) for tile in diagonals for c in range(tile.repeats)]
    columns: dict[tuple[int, int], Tile] = {}
    for piece, runs_before in zip(members, others, strict=True):
        still: dict[tuple[int, int], Tile] = {}
        for first, last in runs_before:
            last = min(last, piece.first)  # a diagonal may have grown into it
            if first >= last:
                continue
            tile = piece._replace(first=first, last=last)
            above = columns.get((first, last))
            if join and above is not None and above.stop == tile.start:
                tile = tile._replace(start=above.start)
            elif above is not None:
                yield above
            still[first, last] = tile
        yield from (tile for keys, tile in columns.items() if keys not in still)
        columns = still
    yield from columns.values()


def _along_diagonals(pieces: Iterable[Tile], bounds: Tile) -> Iterator[Tile]:
    """Join blocks of queries whose keys lie about the same distances away."""
    open_tile: Tile | None = None
    wanted = 0
    for piece in pieces:
        size = piece.last - piece.first
        if open_tile is not None:
            joined = _join(open_tile, piece, bounds)
            if joined is not None and joined.repeats * joined.shape[1] <= SPARE * (wanted + size):
                open_tile, wanted = joined, wanted + size
                continue
            yield open_tile
        open_tile, wanted = piece, size
    if open_tile is not None:
        yield open_tile


def _join(tile: Tile, piece: Tile, bounds: Tile) -> Tile | None:
    rows = tile.stop - tile.start
    step = tile.repeats * rows
    if rows != BLOCK or piece.stop - piece.start != rows or piece.start != tile.start + step:
        return None
    first, last = min(tile.first, piece.first - step), max(tile.last, piece.last - step)
    if first < bounds.first or last + step > bounds.last:
        return None
    return tile._replace(first=first, last=last, repeats=tile.repeats + 1)


def _neighbours(heads: list[int], group: int) -> list[slice]:
    """Runs of heads that have their own keys each, or share them all."""
    runs: list[slice] = []
    for head in heads:
        follows = bool(runs) and runs[-1].stop == head
        if follows and (group == 1 or runs[-1].start // group == head // group):
            runs[-1] = slice(runs[-1].start, head + 1)
        else:
            runs.append(slice(head, head + 1))
    return runs
