"""Positions on a grid: patches of images by row and column, and tokens that stand outside.

One integer says where a token stands, ``row · 2^24 + column``, so that whatever takes positions takes these, and the
difference of two says how many rows and columns lie between them. Tokens that stand outside (a class token, registers)
are all at one place, far from every grid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.checks import check_positive_integers

ROW = 2**24
"""From one row to the next."""
LARGEST_SIDE = ROW // 4
"""Rows and columns of a grid, at most: differences must tell rows from columns."""
OUTSIDE = 2**56
"""From the place outside to the grid."""


class Places(NamedTuple):
    """Rows and columns, or differences of them, and which stand outside of the grid; all of one shape."""

    row: Tensor
    column: Tensor
    outside: Tensor
    """Where rows and columns mean nothing."""


def grid_positions(rows: int, columns: int, *, outside: int = 0, device: torch.device | str | None = None) -> Tensor:
    """The positions of a grid, row by row, as ``query_positions`` and ``key_positions`` of :func:`attend`.

    Args:
        rows: of the grid; and
        columns: at most 2^22 each.
        outside: how many tokens come first that stand outside of it: class tokens, registers.
        device: of the result.

    Returns:
        int64, ``(outside + rows · columns,)``.

    Raises:
        ValueError: a number is out of range.
    """
    check_positive_integers(rows=rows, columns=columns)
    if max(rows, columns) > LARGEST_SIDE:
        raise ValueError(f"rows and columns must be at most {LARGEST_SIDE}, got {rows} and {columns}")
    if not isinstance(outside, int) or outside < 0:
        raise ValueError(f"outside must be a number of tokens, at least 0, got {outside!r}")
    places = raster(rows, columns, device)
    return torch.cat([places.new_full((outside,), -OUTSIDE), places])


def raster(rows: int, columns: int, device: torch.device | str | None = None) -> Tensor:
    """Rows and columns from 0, row by row, int64 ``(rows · columns,)``; as positions, or as differences of them."""
    return (torch.arange(rows, device=device).unsqueeze(1) * ROW + torch.arange(columns, device=device)).flatten()


def places_of(positions: Tensor) -> Places:
    """Where positions are, or how far apart two are whose difference this is."""
    outside = positions.abs() >= OUTSIDE // 2
    inside = positions.masked_fill(outside, 0)
    column = (inside + ROW // 2) % ROW - ROW // 2
    return Places((inside - column) // ROW, column, outside)
