"""Tiles of a table over grid distances, without an index per pair.

Queries are in reverse order, and the table is read from its end. The pair of query ``(r', c')`` and key ``(r, c)`` is
then entry ``(r' + r, c' + c)`` of a matrix (:mod:`~attention_priors.attention.grids`). All strides are positive, and
whole rows of queries and keys are one strided copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from attention_priors.attention.grids import Grids
from attention_priors.attention.tiles.arithmetic import diagonals, write_affine
from attention_priors.attention.tiles.tiling import Tile


class GridTable:
    """Access to tiles of a table over grid distances: reading, and adding.

    Args:
        grids: grids of queries and keys.
        start: table index of the lowest grid distance.
        index: returns the table index of every pair of a tile, ``(1, n, e)``, for tokens outside the grids.
    """

    def __init__(self, grids: Grids, start: int, index: Callable[[Tile], Tensor]) -> None:
        self.grids, self.start, self.index = grids, start, index

    def write(self, out: Tensor, table: Tensor, tile: Tile, row: Tensor | None, scale: Tensor | None) -> None:
        """Write a tile's part of a table ``(h, N)`` to ``out (b, h, n, e)``, its queries in reverse order.

        ``row`` and ``scale`` are arguments of :func:`write_affine`.
        """
        rows, columns = self.grids.shape
        flipped = table[:, self.start : self.start + rows * columns].flip(-1)
        strides = (flipped.stride(0), columns, 1, columns, 1)
        parts: list[tuple[_Part, Tensor]] = []
        for block in self._blocks(tile):
            parts.append((block, flipped.as_strided((len(table), *block.shape), strides, block.place)))
        for strip in self._strips(tile):
            parts.append((_Part(tile, strip), table[:, self.index(strip)[0]]))
        for part, entries in parts:
            added, factor = (None if x is None else part.of(x) for x in (row, scale))
            write_affine(entries, added, factor, part.of(out))

    def add(self, table: Tensor, tile: Tile, numbers: Tensor) -> None:
        """Add a tile's ``numbers (b, h, n, e)`` to their entries of ``table (h, N)``: the transpose of reading them."""
        rows, columns = self.grids.shape
        # The table rises, while the view in write() falls.
        into = table[:, self.start : self.start + rows * columns].unflatten(1, (rows, columns))
        for block in self._blocks(tile):
            both = _sum_by_distance(block.of(numbers)).flip((1, 2))
            row, column = divmod(block.place, columns)
            bottom, right = rows - row, columns - column
            into[:, bottom - both.shape[1] : bottom, right - both.shape[2] : right] += both
        for strip in self._strips(tile):
            part = _Part(tile, strip).of(numbers).sum(0)
            table.index_add_(1, self.index(strip)[0].flatten(), part.flatten(1))

    def _blocks(self, tile: Tile) -> Iterator[_Block]:
        """Yield the part of a tile on the grids, as rectangles of queries times rectangles of keys."""
        queries, keys = self.grids.queries, self.grids.keys
        for some in queries.rectangles(tile.start, tile.stop):
            for others in keys.rectangles(tile.first, tile.last):
                # Entry of the last query and the first key.
                row = queries.rows - (some.row + some.rows) + others.row
                column = queries.columns - (some.column + some.columns) + others.column
                part = tile._replace(start=some.start, stop=some.stop, first=others.start, last=others.stop)
                shape = (some.rows, some.columns, others.rows, others.columns)
                yield _Block(tile, part, shape, row * self.grids.shape[1] + column)

    def _strips(self, tile: Tile) -> Iterator[Tile]:
        """Return the rest of a tile: queries and keys outside the grids."""
        inside = min(max(tile.start, self.grids.queries.outside), tile.stop)
        last = min(max(tile.first, self.grids.keys.outside), tile.last)
        strips = tile._replace(stop=inside), tile._replace(start=inside, last=last)
        return (strip for strip in strips if 0 not in strip.shape)


class _Part:
    """Part of a tile, with queries in reverse order."""

    def __init__(self, tile: Tile, part: Tile) -> None:
        self.rows = slice(tile.stop - part.stop, tile.stop - part.start)
        self.keys = slice(part.first - tile.first, part.last - tile.first)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that broadcasts to the tile's ``(b, h, n, e)``. Sizes of 1 stay."""
        every = slice(None)
        return tensor[..., self.rows if tensor.shape[-2] > 1 else every, self.keys if tensor.shape[-1] > 1 else every]


class _Block(_Part):
    """Part that is a rectangle of queries times a rectangle of keys, ``(b, h, r, w, q, v)``.

    Args:
        tile: whole tile.
        part: part of the tile.
        shape: rows and columns of queries, then of keys.
        place: entry of the last query and first key, counted from the table's end.
    """

    def __init__(self, tile: Tile, part: Tile, shape: tuple[int, int, int, int], place: int) -> None:
        super().__init__(tile, part)
        self.shape, self.place = shape, place

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part, with separate dimensions for rows and columns."""
        cut = super().of(tensor)
        r, w, q, v = self.shape
        cut = cut.unflatten(-1, (q, v) if cut.shape[-1] == q * v else (1, 1))
        return cut.unflatten(-3, (r, w) if cut.shape[-3] == r * w else (1, 1))


def _sum_by_distance(numbers: Tensor) -> Tensor:
    """Sum ``(b, h, r, w, q, v)`` over pairs of equal row sum and column sum: ``(h, r + q - 1, w + v - 1)``."""
    _, heads, r, w, q, v = numbers.shape
    padded = numbers.new_zeros(heads, r + q - 1, w, w + v)
    by_rows = padded[..., w:]
    for text in numbers:
        for row in range(r):
            by_rows[:, row : row + q] += text[:, row].transpose(1, 2)
    return diagonals(padded).sum(2)
