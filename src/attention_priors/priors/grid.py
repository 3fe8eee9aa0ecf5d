"""Positions on a grid: patches of images by row and column, and tokens outside the grid.

One integer, ``row · 2^24 + column``, encodes a patch's position, so every function that takes positions takes grid
positions. The difference of two positions encodes the differences of rows and of columns. Tokens outside the grid (a
class token, registers) share one position, far from every grid. :func:`at_spacing` evaluates a prior on finer or
coarser grids than its training grid.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_priors.checks import check_above, check_positive_integers
from attention_priors.priors.base import Prior, Structure
from attention_priors.priors.sum import Sum

ROW = 2**24
"""Difference of positions between adjacent rows."""
LARGEST_SIDE = ROW // 4
"""Largest number of rows or columns, so that differences of positions stay unambiguous."""
OUTSIDE = 2**56
"""Distance of the outside position from the grid."""


class Places(NamedTuple):
    """Rows and columns, or differences of them, and a mask of tokens outside the grid; all of one shape."""

    row: Tensor
    column: Tensor
    outside: Tensor
    """True where a token is outside the grid, and ``row`` and ``column`` are meaningless."""


def grid_positions(rows: int, columns: int, *, outside: int = 0, device: torch.device | str | None = None) -> Tensor:
    """Return the positions of a grid in row-major order, as :func:`attend` takes them.

    Pass the result as ``query_positions`` and ``key_positions``.

    Args:
        rows: number of rows, at most 2^22.
        columns: number of columns, at most 2^22.
        outside: number of tokens outside the grid, such as class tokens and registers. They come first.
        device: device of the result.

    Returns:
        int64 positions, ``(outside + rows · columns,)``.

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
    """Return the positions of a grid in row-major order, int64 ``(rows · columns,)``, or their differences from 0."""
    return (torch.arange(rows, device=device).unsqueeze(1) * ROW + torch.arange(columns, device=device)).flatten()


def places_of(positions: Tensor) -> Places:
    """Decode positions, or differences of positions, into rows and columns."""
    outside = positions.abs() >= OUTSIDE // 2
    inside = positions.masked_fill(outside, 0)
    column = (inside + ROW // 2) % ROW - ROW // 2
    return Places((inside - column) // ROW, column, outside)


class OnGrid(Prior):
    """Prior over rows and columns (see :func:`grid_positions`)."""

    over_grid = True
    spacing: tuple[float, float] = (1.0, 1.0)
    """Distance between adjacent rows and between adjacent columns, in the prior's own patches."""

    def spaced(self, rows: float, columns: float) -> OnGrid:
        """Return this prior, with shared parameters, on a grid of another spacing.

        Args:
            rows: distance between adjacent rows in this prior's patches: 1/2 for an image with twice as many rows as in
                training.
            columns: distance between adjacent columns in this prior's patches.

        Raises:
            ValueError: a number is not positive, or this prior is defined at whole patches only.
        """
        check_above(0, rows=rows, columns=columns)
        other = copy.copy(self)
        other.spacing = (float(rows), float(columns))
        return other

    def to_config(self) -> dict[str, Any]:
        """Return the plain description of the prior.

        Raises:
            ValueError: the prior is at another spacing, which a description cannot express.
        """
        if self.spacing != (1.0, 1.0):
            raise ValueError(f"a prior at spacing {self.spacing} has no description; describe the original prior")
        return super().to_config()

    def extra_repr(self) -> str:
        """Return the constructor's arguments, or the spacing if it differs from 1."""
        if self.spacing == (1.0, 1.0):
            return super().extra_repr()
        return f"spacing={self.spacing}"

    def _apart(self, distance: Tensor) -> Places:
        """Return the differences of rows and columns in the prior's patches."""
        apart = places_of(distance)
        if self.spacing == (1.0, 1.0):
            return apart
        return Places(apart.row.double() * self.spacing[0], apart.column.double() * self.spacing[1], apart.outside)

    def _stands(self, positions: Tensor) -> Places:
        """Return the rows and columns of positions; 0 for tokens outside the grid.

        Patches of any size cover one image, so the image's corner is the fixed point, not the middle of the first
        patch.
        """
        stands = places_of(positions)
        if self.spacing == (1.0, 1.0):
            return stands
        places = ((stands.row, self.spacing[0]), (stands.column, self.spacing[1]))
        row, column = (((place.double() + 0.5) * step - 0.5).masked_fill(stands.outside, 0.0) for place, step in places)
        return Places(row, column, stands.outside)


class PatchArea(OnGrid):
    """Weight of a patch by its area: ``K(i, j) = ln(area)`` for keys ``j`` on the grid, and 0 for keys outside.

    Twice as many rows and columns put four patches in the place of one. With a quarter of the area each, the four
    patches share its weight; otherwise their number would outweigh a class token.

    Args:
        num_heads: number of heads, ``H``.
        area: area of a patch; 1 is the area of a training patch.
    """

    name = "patch_area"
    structure = Structure.OF_KEYS

    def __init__(self, num_heads: int, area: float) -> None:
        super().__init__(num_heads)
        check_above(0, area=area)
        self.area = float(area)

    def log_prior_of_key(self, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``ln(area)`` on the grid and 0 outside, ``(H, *key_positions.shape)``."""
        inside = (~places_of(key_positions).outside).to(dtype) * math.log(self.area)
        return inside.expand(self.num_heads, *inside.shape)


def at_spacing(prior: Prior | None, num_heads: int, rows: float, columns: float) -> Prior:
    """Return a prior for another resolution than in training.

    Distances stay in patches of training, and patches are weighted by their area. Attention over patches then
    approximates the mean over the image that the model learned, sampled at more or fewer places. With a logit scale
    this does not hold, because the scale multiplies the areas too.

    Args:
        prior: a sum of priors over grids, or None.
        num_heads: number of heads, ``H``.
        rows: distance between adjacent rows, in patches of training.
        columns: distance between adjacent columns, in patches of training.

    Raises:
        ValueError: as :meth:`OnGrid.spaced`; or ``prior`` is over a line, or already at another spacing.
    """
    terms: list[Prior] = []
    for term in () if prior is None else prior.terms():
        if isinstance(term, PatchArea) or (isinstance(term, OnGrid) and term.spacing != (1.0, 1.0)):
            raise ValueError(f"prior must be at its own spacing, got {term!r}; pass the original prior")
        if isinstance(term, OnGrid):
            terms.append(term.spaced(rows, columns))
        elif term.over_grid is None:
            terms.append(term)
        else:
            raise ValueError(f"prior must be over a grid, got {term.name!r}")
    return Sum([*terms, PatchArea(num_heads, rows * columns)])
