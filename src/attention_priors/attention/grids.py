"""Queries and keys that stand on grids: their distances, and tiles of a table of them without an index per pair.

A grid of ``R`` rows and ``W`` columns has ``(2R - 1)(2W - 1)`` distances, and in their order they are a matrix: a row
for each difference of rows, in it one for each difference of columns. With queries in reverse order and the
table read from its end, the pair of query ``(r', c')`` and key ``(r, c)`` stands at the entry ``(r' + r, c' + c)``: all
strides are positive, and a tile is one strided copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_priors.attention.geometry import Geometry
from attention_priors.attention.tiles import Tile
from attention_priors.priors.grid import ROW, places_of, raster


@dataclass(frozen=True)
class Raster:
    """Positions of a grid, row by row, after some that stand outside."""

    outside: int
    row: int
    """The first one."""
    column: int
    rows: int
    columns: int

    @classmethod
    def of(cls, positions: Tensor) -> Raster | None:
        """What positions ``(L,)`` are; None if they are no whole grid."""
        stands = places_of(positions)
        outside = int(stands.outside.sum())
        if bool(stands.outside[outside:].any()) or outside == len(positions):
            return None
        row, column = int(stands.row[outside]), int(stands.column[outside])
        columns = int(stands.column[-1]) - column + 1
        if columns < 1 or (len(positions) - outside) % columns:
            return None
        rows = (len(positions) - outside) // columns
        if not torch.equal(positions[outside:], positions[outside] + raster(rows, columns, positions.device)):
            return None
        return cls(outside, row, column, rows, columns)


@dataclass(frozen=True)
class Grids:
    """Those of queries and keys."""

    queries: Raster
    keys: Raster

    @classmethod
    def of(cls, geometry: Geometry) -> Grids | None:
        """None if positions are no grids, or differ between the texts of the batch."""
        if geometry.given_query_positions is None or geometry.given_key_positions is None:
            return None
        if geometry.key_documents is not None:
            return None
        found = []
        for positions in (geometry.given_query_positions, geometry.given_key_positions):
            if len(positions) > 1 and not bool((positions == positions[:1]).all()):
                return None
            found.append(Raster.of(positions[0]))
        queries, keys = found
        return None if queries is None or keys is None else cls(queries, keys)

    @property
    def shape(self) -> tuple[int, int]:
        """How many differences of rows and of columns there are."""
        return self.queries.rows + self.keys.rows - 1, self.queries.columns + self.keys.columns - 1

    @property
    def lowest(self) -> int:
        """The first of the distances on the grid."""
        rows = self.queries.row - (self.keys.row + self.keys.rows - 1)
        columns = self.queries.column - (self.keys.column + self.keys.columns - 1)
        return rows * ROW + columns

    def distances(self, geometry: Geometry) -> Tensor:
        """All that occur, rising."""
        inner = raster(*self.shape, geometry.device) + self.lowest
        queries, keys = geometry.query_positions[0], geometry.key_positions[0]
        outer = [
            (queries[: self.queries.outside, None] - keys).flatten(),
            (queries[:, None] - keys[: self.keys.outside]).flatten(),
        ]
        return torch.cat([inner, *outer]).unique()

    def start_in(self, listed: Tensor) -> int | None:
        """Where the distances on the grid stand among all that are ``listed``, rising; None if not one after another.

        Two tokens outside are at distance 0, which may lie amid those on the grid without being one of them.
        """
        start, number = int(torch.searchsorted(listed, self.lowest)), self.shape[0] * self.shape[1]
        inner = raster(*self.shape, listed.device) + self.lowest
        return start if torch.equal(listed[start : start + number], inner) else None


class GridTable:
    """Reads tiles of a table over the distances of grids, and adds to them.

    Args:
        grids: of queries and keys.
        start: the table's entry of the lowest distance on the grid.
        index: gives the entry of every pair of a tile, ``(1, n, e)``: for what stands outside.
    """

    def __init__(self, grids: Grids, start: int, index: Callable[[Tile], Tensor]) -> None:
        self.grids, self.start, self.index = grids, start, index

    def read(self, table: Tensor, tile: Tile) -> Tensor:
        """A tile's part of a table ``(h, N)``: ``(1, h, n, e)``, its queries in reverse order."""
        out = table.new_empty(len(table), *tile.shape)
        inner, strips = self._parts(tile)
        if inner is not None:
            cover = _Cover(self.grids, inner)
            rows, columns = self.grids.shape
            flipped = table[:, self.start : self.start + rows * columns].flip(-1)
            strides = (flipped.stride(0), columns, 1, columns, 1)
            view = flipped.as_strided((len(table), *cover.shape), strides, cover.place)
            whole = view.reshape(len(table), cover.shape[0] * cover.shape[1], -1)
            _cut(out, tile, inner)[:] = whole[:, cover.cut_rows, cover.cut_keys]
        for strip in strips:
            _cut(out, tile, strip)[:] = table[:, self.index(strip)[0]]
        return out.unsqueeze(0)

    def add(self, table: Tensor, tile: Tile, numbers: Tensor) -> None:
        """Add a tile's ``numbers (h, n, e)`` to their entries of ``table (h, N)``: the transpose of :meth:`read`."""
        inner, strips = self._parts(tile)
        if inner is not None:
            self._add_inner(table, inner, _cut(numbers, tile, inner))
        for strip in strips:
            table.index_add_(1, self.index(strip)[0].flatten(), _cut(numbers, tile, strip).flatten(1))

    def _add_inner(self, table: Tensor, inner: Tile, numbers: Tensor) -> None:
        cover = _Cover(self.grids, inner)
        r, w, q, v = cover.shape
        heads = len(table)
        if inner.shape != (r * w, q * v):
            whole = numbers.new_zeros(heads, r * w, q * v)
            whole[:, cover.cut_rows, cover.cut_keys] = numbers
            numbers = whole
        numbers = numbers.unflatten(2, (q, v)).unflatten(1, (r, w))
        by_rows = numbers.new_zeros(heads, w, r + q - 1, v)
        for row in range(r):
            by_rows[:, :, row : row + q] += numbers[:, row]
        both = numbers.new_zeros(heads, r + q - 1, w + v - 1)
        for column in range(w):
            both[:, :, column : column + v] += by_rows[:, column]
        rows, columns = self.grids.shape
        into = table[:, self.start : self.start + rows * columns].unflatten(1, (rows, columns))
        first = cover.place // columns
        # The table rises where the view of it falls.
        into[:, rows - first - (r + q - 1) : rows - first] += both.flip((1, 2))

    def _parts(self, tile: Tile) -> tuple[Tile | None, list[Tile]]:
        """The part of a tile that lies on the grid, if any, and the rest: queries, and keys, that stand outside."""
        start, first = max(tile.start, self.grids.queries.outside), max(tile.first, self.grids.keys.outside)
        if start >= tile.stop or first >= tile.last:
            return None, [tile]
        strips = [tile._replace(stop=start), tile._replace(start=start, last=first)]
        return tile._replace(start=start, first=first), [strip for strip in strips if 0 not in strip.shape]


def _cut(numbers: Tensor, tile: Tile, part: Tile) -> Tensor:
    """What belongs to a part of a tile, whose queries are in reverse order."""
    rows = slice(tile.stop - part.stop, tile.stop - part.start)
    return numbers[:, rows, part.first - tile.first : part.last - tile.first]


class _Cover:
    """Whole rows of the grids that hold a tile."""

    def __init__(self, grids: Grids, tile: Tile) -> None:
        queries, keys = grids.queries, grids.keys
        start, stop = tile.start - queries.outside, tile.stop - queries.outside
        first, last = tile.first - keys.outside, tile.last - keys.outside
        row, end = start // queries.columns, -(-stop // queries.columns)
        key_row, key_end = first // keys.columns, -(-last // keys.columns)
        self.shape = (end - row, queries.columns, key_end - key_row, keys.columns)
        """Rows and columns of queries, rows and columns of keys."""
        self.place = (queries.rows - end + key_row) * grids.shape[1]
        """The entry of the last query and the first key."""
        behind = end * queries.columns - stop
        self.cut_rows = slice(behind, behind + stop - start)
        before = first - key_row * keys.columns
        self.cut_keys = slice(before, before + last - first)
