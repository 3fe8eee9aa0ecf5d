"""Positions on a grid: patches of images by row and column, and tokens that stand outside.

One integer says where a token stands, ``row · 2^24 + column``, so that whatever takes positions takes these, and the
difference of two says how many rows and columns lie between them. Tokens that stand outside (a class token, registers)
are all at one place, far from every grid. Priors on grids can be read on finer and
coarser grids than the one that they were trained on.
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


class OnGrid(Prior):
    """A prior whose positions are rows and columns (:func:`grid_positions`)."""

    over_grid = True
    spacing: tuple[float, float] = (1.0, 1.0)
    """From a row to the next and from a column to the next, in the patches that the prior is stated in."""

    def spaced(self, rows: float, columns: float) -> OnGrid:
        """Return the same prior, with the same parameters, on a grid of another spacing.

        Args:
            rows: from a row to the next, in the patches that this prior is stated in: 1/2 where an image is cut into
                twice as many rows as in training.
            columns: likewise.

        Raises:
            ValueError: a number is not positive, or this prior means nothing between whole patches.
        """
        check_above(0, rows=rows, columns=columns)
        other = copy.copy(self)
        other.spacing = (float(rows), float(columns))
        return other

    def to_config(self) -> dict[str, Any]:
        """Return the plain description of the prior.

        Raises:
            ValueError: this is a prior at another spacing than it is stated in, which no description has.
        """
        if self.spacing != (1.0, 1.0):
            raise ValueError(f"a prior at spacing {self.spacing} has no description: describe the one it was made of")
        return super().to_config()

    def extra_repr(self) -> str:
        """The constructor's arguments, and the spacing if it is another."""
        if self.spacing == (1.0, 1.0):
            return super().extra_repr()
        return f"spacing={self.spacing}"

    def _apart(self, distance: Tensor) -> Places:
        """Rows and columns between places, in the prior's patches."""
        apart = places_of(distance)
        if self.spacing == (1.0, 1.0):
            return apart
        return Places(apart.row.double() * self.spacing[0], apart.column.double() * self.spacing[1], apart.outside)

    def _stands(self, positions: Tensor) -> Places:
        """Rows and columns of places; 0 for what stands outside.

        Patches of any size share the image: its corner stays where it is, and not the first patch's middle.
        """
        stands = places_of(positions)
        if self.spacing == (1.0, 1.0):
            return stands
        places = ((stands.row, self.spacing[0]), (stands.column, self.spacing[1]))
        row, column = (((place.double() + 0.5) * step - 0.5).masked_fill(stands.outside, 0.0) for place, step in places)
        return Places(row, column, stands.outside)


class PatchArea(OnGrid):
    """Weight of a patch by its area: ``K(i, j) = ln(area)`` for keys ``j`` on the grid, and 0 for keys outside of it.

    Twice as many rows and columns put four patches where one was. They share its weight if each has a quarter of it; a
    class token would else be outweighed by their number.

    Args:
        num_heads: ``H``.
        area: of a patch; 1 is that of a patch in training.
    """

    name = "patch_area"
    structure = Structure.OF_KEYS

    def __init__(self, num_heads: int, area: float) -> None:
        super().__init__(num_heads)
        check_above(0, area=area)
        self.area = float(area)

    def log_prior_of_key(self, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``ln(area)`` on the grid, ``(H, *key_positions.shape)``."""
        inside = (~places_of(key_positions).outside).to(dtype) * math.log(self.area)
        return inside.expand(self.num_heads, *inside.shape)


def at_spacing(prior: Prior | None, num_heads: int, rows: float, columns: float) -> Prior:
    """A model's prior at another resolution than in training: distances as before, patches by their area.

    Attention over the patches is then the mean over the image that it was in training, taken at more or fewer places.
    That holds without a logit scale, which would multiply the areas too.

    Args:
        prior: a sum of priors on grids, or None for none.
        num_heads: ``H``.
        rows: from a row to the next, in the patches of training.
        columns: likewise.

    Raises:
        ValueError: as :meth:`OnGrid.spaced`, or ``prior`` is over a line, or at another spacing than it is stated in.
    """
    terms: list[Prior] = []
    for term in () if prior is None else prior.terms():
        if isinstance(term, PatchArea) or (isinstance(term, OnGrid) and term.spacing != (1.0, 1.0)):
            raise ValueError(f"prior must be at the spacing that it is stated in, got {term!r}: give the one it is of")
        if isinstance(term, OnGrid):
            terms.append(term.spaced(rows, columns))
        elif term.over_grid is None:
            terms.append(term)
        else:
            raise ValueError(f"prior must be one on grids, got {term.name}")
    return Sum([*terms, PatchArea(num_heads, rows * columns)])
