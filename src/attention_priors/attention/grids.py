"""Queries and keys that stand on grids: their distances, and tiles of a table of them without an index per pair.

A grid of ``R`` rows and ``W`` columns has ``(2R - 1)(2W - 1)`` distances, and in their order they are a matrix: a row
for each difference of rows, in it one for each difference of columns. With queries in reverse order and the
table read from its end, the pair of query ``(r', c')`` and key ``(r, c)`` stands at the entry ``(r' + r, c' + c)``: all
strides are positive, and whole rows of queries and keys are one strided copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.geometry import Geometry
from attention_priors.attention.tiles import Tile
from attention_priors.priors.grid import ROW, places_of, raster


class Rectangle(NamedTuple):
    """Positions ``start..stop`` of a sequence that are rows and columns of a grid, counted from its first ones."""

    start: int
    stop: int
    row: int
    column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Raster:
    """Positions of a grid, row by row, after some that stand outside."""

    outside: int
    row: int
    """The first one."""
    column: int
    rows: int
    columns: int

    def rectangles(self, start: int, stop: int) -> Iterator[Rectangle]:
        """Of the positions ``start..stop`` those on the grid: a part of a row, whole rows, a part of a row."""
        start, stop = max(start, self.outside), max(stop, self.outside)
        while start < stop:
            row, column = divmod(start - self.outside, self.columns)
            rows = (stop - start) // self.columns if column == 0 else 0
            size = rows * self.columns if rows else min(stop - start, self.columns - column)
            yield Rectangle(start, start + size, row, column, max(rows, 1), size // max(rows, 1))
            start += size

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

    def write(self, out: Tensor, table: Tensor, tile: Tile, row: Tensor | None, scale: Tensor | None) -> None:
        """Write a tile's part of a table ``(h, N)`` to ``out (b, h, n, e)``, its queries in reverse order.

        ``row`` and ``scale`` as for :func:`write_affine`.
        """
        rows, columns = self.grids.shape
        flipped = table[:, self.start : self.start + rows * columns].flip(-1)
        strides = (flipped.stride(0), columns, 1, columns, 1)
        for block in self._blocks(tile):
            part = flipped.as_strided((len(table), *block.shape), strides, flipped.storage_offset() + block.place)
            write_affine(part, block.of(row), block.of(scale), block.view(out))
        for strip in self._strips(tile):
            entries = table[:, self.index(strip)[0]]
            cut = _Cut(tile, strip)
            write_affine(entries, cut.of(row), cut.of(scale), cut.of_all(out))

    def add(self, table: Tensor, tile: Tile, numbers: Tensor) -> None:
        """Add a tile's ``numbers (b, h, n, e)`` to their entries of ``table (h, N)``: the transpose of reading them."""
        rows, columns = self.grids.shape
        # The table rises where the view of it falls.
        into = table[:, self.start : self.start + rows * columns].unflatten(1, (rows, columns))
        for block in self._blocks(tile):
            both = _sum_by_distance(block.view(numbers)).flip((1, 2))
            row, column = divmod(block.place, columns)
            bottom, right = rows - row, columns - column
            into[:, bottom - both.shape[1] : bottom, right - both.shape[2] : right] += both
        for strip in self._strips(tile):
            part = _Cut(tile, strip).of_all(numbers).sum(0)
            table.index_add_(1, self.index(strip)[0].flatten(), part.flatten(1))

    def _blocks(self, tile: Tile) -> Iterator[_Block]:
        """The part of a tile that lies on the grids, in rectangles of queries times rectangles of keys."""
        queries, keys = self.grids.queries, self.grids.keys
        for some in queries.rectangles(tile.start, tile.stop):
            for others in keys.rectangles(tile.first, tile.last):
                # The entry of the last query and the first key.
                place = (queries.rows - 1 - (some.row + some.rows - 1) + others.row) * self.grids.shape[1]
                place += queries.columns - 1 - (some.column + some.columns - 1) + others.column
                part = tile._replace(start=some.start, stop=some.stop, first=others.start, last=others.stop)
                yield _Block(tile, part, (some.rows, some.columns, others.rows, others.columns), place)

    def _strips(self, tile: Tile) -> Iterator[Tile]:
        """The rest of a tile: queries, and keys, that stand outside."""
        start, first = max(tile.start, self.grids.queries.outside), max(tile.first, self.grids.keys.outside)
        inside = min(start, tile.stop)
        strips = tile._replace(stop=inside), tile._replace(start=inside, last=min(first, tile.last))
        return (strip for strip in strips if 0 not in strip.shape)


def write_affine(entries: Tensor, row: Tensor | None, scale: Tensor | None, out: Tensor) -> None:
    """Write ``entries · scale + row`` to ``out`` in one pass; each broadcasts to it, and None changes nothing."""
    if scale is None:
        out.copy_(entries) if row is None else torch.add(entries.expand_as(out), row, out=out)
    elif row is None:
        torch.mul(entries.expand_as(out), scale, out=out)
    else:
        torch.addcmul(row, entries.expand_as(out), scale, out=out)


class _Cut:
    """A part of a tile, whose queries are in reverse order, in tensors that broadcast to ``(b, h, n, e)``."""

    def __init__(self, tile: Tile, part: Tile) -> None:
        self.rows = slice(tile.stop - part.stop, tile.stop - part.start)
        self.keys = slice(part.first - tile.first, part.last - tile.first)

    def of_all(self, tensor: Tensor) -> Tensor:
        """Of one that has an entry for each pair."""
        return tensor[..., self.rows, self.keys]

    def of(self, tensor: Tensor | None) -> Tensor | None:
        """Of one that may have one entry for all queries, or for all keys."""
        if tensor is None:
            return None
        every = slice(None)
        return tensor[..., self.rows if tensor.shape[-2] > 1 else every, self.keys if tensor.shape[-1] > 1 else every]


class _Block(_Cut):
    """A part that is a rectangle of queries times one of keys: tensors are cut as ``(b, h, r, w, q, v)``.

    Args:
        tile: the whole.
        part: of it.
        shape: rows and columns of queries, rows and columns of keys.
        place: the table's entry, read from its end, of the last query and the first key.
    """

    def __init__(self, tile: Tile, part: Tile, shape: tuple[int, int, int, int], place: int) -> None:
        super().__init__(tile, part)
        self.shape, self.place = shape, place

    def view(self, tensor: Tensor) -> Tensor:
        """Of a tensor that has an entry for each pair."""
        r, w, q, v = self.shape
        return self.of_all(tensor).unflatten(-1, (q, v)).unflatten(-3, (r, w))

    def of(self, tensor: Tensor | None) -> Tensor | None:
        """Of one that may have one entry for all queries, or for all keys."""
        cut = super().of(tensor)
        if cut is None:
            return None
        r, w, q, v = self.shape
        cut = cut.unflatten(-1, (q, v) if cut.shape[-1] == q * v else (1, 1))
        return cut.unflatten(-3, (r, w) if cut.shape[-3] == r * w else (1, 1))


def _sum_by_distance(numbers: Tensor) -> Tensor:
    """The sums ``(h, r + q - 1, w + v - 1)`` of ``(b, h, r, w, q, v)`` where row and column have the same sums."""
    _, heads, r, w, q, v = numbers.shape
    # After as many columns of zeros as rows of them: a row that starts one place further left makes columns of
    # diagonals.
    padded = numbers.new_zeros(heads, r + q - 1, w, w + v)
    by_rows = padded[..., w:]
    for text in numbers:
        for row in range(r):
            by_rows[:, row : row + q] += text[:, row].transpose(1, 2)
    size = (heads, r + q - 1, w, w + v - 1)
    return padded.as_strided(size, (*padded.stride()[:2], w + v - 1, 1), w).sum(2)
