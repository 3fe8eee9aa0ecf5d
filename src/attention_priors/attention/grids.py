"""Queries and keys on grids, and their distances.

A grid of ``R`` rows and ``W`` columns has ``(2R - 1)(2W - 1)`` distances. In increasing order, they form a matrix: one
row for each difference of rows, one column for each difference of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.geometry import Geometry
from attention_priors.priors.grid import ROW, places_of, raster


class Rectangle(NamedTuple):
    """Positions ``start..stop`` that form a rectangle of a grid. ``row`` and ``column`` count from its corner."""

    start: int
    stop: int
    row: int
    column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Raster:
    """Positions of a grid, row by row, after some positions outside the grid."""

    outside: int
    """Number of positions outside the grid, all at the start."""
    row: int
    """First row."""
    column: int
    """First column."""
    rows: int
    columns: int

    def rectangles(self, start: int, stop: int) -> Iterator[Rectangle]:
        """Yield the grid positions in ``start..stop`` as rectangles: a part of a row, whole rows, a part of a row."""
        start, stop = max(start, self.outside), max(stop, self.outside)
        while start < stop:
            row, column = divmod(start - self.outside, self.columns)
            rows, columns = 1, min(stop - start, self.columns - column)
            if columns == self.columns:
                rows = (stop - start) // columns
            end = start + rows * columns
            yield Rectangle(start, end, row, column, rows, columns)
            start = end

    @classmethod
    def of(cls, positions: Tensor) -> Raster | None:
        """Return the grid of positions ``(L,)``; None if they are not a whole grid."""
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
    """Grids of the queries and of the keys."""

    queries: Raster
    keys: Raster

    @classmethod
    def of(cls, geometry: Geometry) -> Grids | None:
        """Return the grids of a geometry; None if positions are not grids, or differ between rows of the batch."""
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
        """Number of row differences and number of column differences."""
        return self.queries.rows + self.keys.rows - 1, self.queries.columns + self.keys.columns - 1

    @property
    def lowest(self) -> int:
        """Lowest distance on the grid."""
        rows = self.queries.row - (self.keys.row + self.keys.rows - 1)
        columns = self.queries.column - (self.keys.column + self.keys.columns - 1)
        return rows * ROW + columns

    def distances(self, geometry: Geometry) -> Tensor:
        """Return all distances that occur, in increasing order."""
        inner = raster(*self.shape, geometry.device) + self.lowest
        queries, keys = geometry.query_positions[0], geometry.key_positions[0]
        outer = [
            (queries[: self.queries.outside, None] - keys).flatten(),
            (queries[:, None] - keys[: self.keys.outside]).flatten(),
        ]
        return torch.cat([inner, *outer]).unique()

    def start_in(self, listed: Tensor) -> int | None:
        """Return the index of the grid's lowest distance in ``listed``; None if grid distances are not contiguous.

        Two tokens outside the grid are at distance 0, which may lie between two grid distances.

        Args:
            listed: all distances, in increasing order.
        """
        start, number = int(torch.searchsorted(listed, self.lowest)), self.shape[0] * self.shape[1]
        inner = raster(*self.shape, listed.device) + self.lowest
        return start if torch.equal(listed[start : start + number], inner) else None
