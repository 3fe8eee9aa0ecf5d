"""Bias of a tile: log-prior, logit scale, masks.

A stationary bias is a Toeplitz matrix: one number per distance and head. With the queries of a tile in reverse order,
entry ``(i', j')`` of the bias is entry ``i' + j' + x0`` of the table. Both strides are +1, so ``table.as_strided`` is
the whole bias, without memory of its own.
"""

from __future__ import annotations

import math
import threading
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import Geometry
from attention_priors.attention.grids import Grids
from attention_priors.attention.tiles.arithmetic import causal_diagonals, diagonals, write_affine
from attention_priors.attention.tiles.grid_table import GridTable
from attention_priors.attention.tiles.tiling import Tile, Tiling
from attention_priors.precision import NEAR
from attention_priors.priors.base import LOG_PRIOR_FLOOR

if TYPE_CHECKING:
    from attention_priors.attention.tiles.block_problem import BlockProblem

KEPT_NUMBERS = 2**20
"""Largest working buffer that a thread keeps, in numbers: 4 MiB in float32."""
FEW_ROWS = 32
"""Largest number of rows whose log-sum-exps Python compares before PyTorch has started an operation."""

_kept = threading.local()


class Scratch:
    """Working buffer that is reused, because writing to new memory costs more than the arithmetic.

    On CPUs, a thread keeps a buffer from call to call, up to the size ``KEPT_NUMBERS``.

    Args:
        name: purpose of the buffer. A thread uses one buffer of a name at a time.
        dtype: dtype of the numbers.
        device: device of the buffer.
    """

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        self._place = (name, dtype, device)
        self._numbers = vars(_kept).get("numbers", {}).get(self._place)
        if self._numbers is None:
            self._numbers = torch.empty(0, dtype=dtype, device=device)

    def of(self, *shape: int) -> Tensor:
        """Return a contiguous tensor of this shape, with arbitrary content."""
        size = math.prod(shape)
        if size > len(self._numbers):
            # An inference tensor could not be written to later, where gradients are needed.
            with torch.inference_mode(False):
                # The buffer doubles if it will be kept, because causal tiles grow step by step. Free the smaller first.
                enough, (_, dtype, device) = max(size, min(2 * len(self._numbers), KEPT_NUMBERS)), self._place
                vars(_kept).get("numbers", {}).pop(self._place, None)
                del self._numbers
                self._numbers = torch.empty(enough, dtype=dtype, device=device)
            if self._numbers.device.type == "cpu" and len(self._numbers) <= KEPT_NUMBERS:
                vars(_kept).setdefault("numbers", {})[self._place] = self._numbers
        return self._numbers[:size].view(shape)


def is_far(lse: Tensor) -> Tensor:
    """Return which rows are NaN or beyond ``NEAR``, except rows that see no key."""
    return ~(lse.abs() <= NEAR) & ~torch.isneginf(lse)


def far_rows(lse: Tensor) -> Tensor | None:
    """Return the rows of :func:`is_far`; None for no row."""
    # Usually, the two extremes suffice. They are not worth an operation in a decoding step.
    ends = lse.flatten().tolist() if lse.numel() <= FEW_ROWS else map(float, lse.detach().aminmax())
    if all(-NEAR <= end <= NEAR for end in ends):
        return None
    far = is_far(lse)
    return far if bool(far.any()) else None


class Distances:
    """Distances of the entries of a table.

    Args:
        geometry: positions.
        highest: distance of the first entry, if distances fall by one.
        listed: all distances ``(N,)`` in increasing order, if they do not fall by one.
        number: number of entries ``N``.
    """

    def __init__(self, geometry: Geometry, highest: int, listed: Tensor | None, number: int) -> None:
        self.geometry = geometry
        self.highest = highest
        self.listed = listed
        self.number = number
        self.overhang = 0
        """Number of entries beyond a table's end that a tile may read. Their distances are in the future and hidden."""
        if geometry.causal and listed is None:
            self.overhang = 1 if geometry.offset is None else geometry.num_queries - 1

    @cached_property
    def _positions(self) -> tuple[Tensor, Tensor]:
        return self.geometry.query_positions, self.geometry.key_positions

    def values(self) -> Tensor:
        """Return the distance of each entry, ``(N,)``."""
        if self.listed is not None:
            return self.listed
        return torch.arange(self.highest, self.highest - self.number, -1, device=self.geometry.device)

    def place(self, tile: Tile) -> int:
        """Return the table index of the tile's last query and first key. Requires an offset."""
        assert self.geometry.offset is not None
        return self.highest - (tile.stop - 1 + self.geometry.offset - tile.first)

    @cached_property
    def _grid(self) -> GridTable | None:
        """Reader of tiles, if queries and keys are on grids; None if each pair needs an index."""
        if self.geometry.offset is not None or self.listed is None or (grids := Grids.of(self.geometry)) is None:
            return None
        start = grids.start_in(self.listed)
        return None if start is None else GridTable(grids, start, self.index)

    def index(self, tile: Tile) -> Tensor:
        """Return the table index of every pair of a tile, ``(b or 1, n, e)``."""
        queries, keys = self._positions
        queries = (queries[tile.batches] if len(queries) > 1 else queries)[:, tile.rows].flip(-1).unsqueeze(-1)
        keys = (keys[tile.batches] if len(keys) > 1 else keys)[:, None, tile.keys]
        if self.listed is not None:
            return torch.searchsorted(self.listed, queries - keys)
        # Distances beyond the table are hidden by the causal mask, or by documents.
        return (self.highest - (queries - keys)).clamp(0, self.number + self.overhang - 1)

    def read(self, table: Tensor, tile: Tile) -> Tensor:
        """Return a tile's part of a table ``(h, N)`` as ``(b or 1, h, n, e)``, a view if there is an offset."""
        if self.geometry.offset is not None:
            place = table.storage_offset() + self.place(tile)
            shape = (1, table.shape[0], tile.stop - tile.start, tile.last - tile.first)
            return table.as_strided(shape, (0, table.stride(0), 1, 1), place)
        if self._grid is not None:
            out = table.new_empty(1, len(table), *tile.shape)
            self._grid.write(out, table, tile, None, None)
            return out
        return table[:, self.index(tile)].transpose(0, 1)

    def write(self, out: Tensor, table: Tensor, tile: Tile, row: Tensor | None, scale: Tensor | None) -> None:
        """Write a tile's part of a table ``(h, N)`` to ``out (b, h, n, e)``, times ``scale``, plus ``row``."""
        if self._grid is not None:
            self._grid.write(out, table, tile, row, scale)
        else:
            write_affine(self.read(table, tile), row, scale, out)

    def add(self, table: Tensor, tile: Tile, numbers: Tensor) -> None:
        """Add a tile's numbers to their entries of ``table (h, N)``: the transpose of :meth:`read`.

        Args:
            table: table that receives the numbers.
            tile: tile of the numbers.
            numbers: contiguous ``(b, h, n, e)``, 0 where a key is hidden.
        """
        if not numbers.numel():
            return
        if self._grid is not None:
            self._grid.add(table, tile, numbers)
        elif self.geometry.offset is None:
            # Distances beyond the table are hidden: there is nothing to add.
            index = self.index(tile).clamp(max=table.shape[1] - 1)
            for part, places in zip(numbers if len(index) > 1 else numbers.sum(0, keepdim=True), index, strict=True):
                table.index_add_(1, places.flatten(), part.flatten(1))
        else:
            self.diagonals(tile, numbers if len(numbers) == 1 else numbers.sum(0, keepdim=True)).add_to(table[None])

    def diagonals(self, tile: Tile, numbers: Tensor) -> Diagonals:
        """Arrange a tile's numbers by distance. Requires an offset, and numbers as in :meth:`add`."""
        assert self.geometry.offset is not None
        place = self.place(tile)
        if self.geometry.causal and tile.last == tile.stop + self.geometry.offset:
            # The tile ends at the causal diagonal: entries beyond it are 0.
            return Diagonals(place + 1, causal_diagonals(numbers), numbers[:, :, 0, 0])
        rows, keys = tile.shape
        padded = Scratch("padded", numbers.dtype, numbers.device).of(*numbers.shape[:-1], rows + keys)
        padded[..., :rows] = 0
        padded[..., rows:] = numbers
        return Diagonals(place, diagonals(padded), None)


class Diagonals(NamedTuple):
    """Numbers of a tile, with one column for each distance. Columns outside a query's keys are 0."""

    start: int
    """Table index of the first column."""
    columns: Tensor
    """Numbers ``(b, h, n, w)``, one row for each query."""
    corner: Tensor | None
    """Number of the last query and first key, ``(b, h)``, if that is missing. Its table index is ``start - 1``."""

    def add_to(self, table: Tensor, scale: Tensor | None = None) -> None:
        """Add the numbers, times a factor of each query ``(b, h, n, 1)``, to their entries of ``table (b, h, N)``."""
        sums = self.columns.sum(2) if scale is None else (scale.mT @ self.columns).squeeze(2)
        here = table[..., self.start : self.start + sums.shape[-1]]
        here += sums[..., : here.shape[-1]]
        if self.corner is not None:
            table[..., self.start - 1] += self.corner if scale is None else self.corner * scale[:, :, 0, 0]

    def dot(self, table: Tensor) -> Tensor:
        """Return the sum of each query's numbers times their entries of ``table (h, N)``, as ``(b, h, n)``."""
        # With the matrix on the left, the product takes three times as long.
        entries = table[:, None, self.start : self.start + self.columns.shape[-1]]
        sums = (entries @ self.columns.mT).squeeze(-2)
        if self.corner is not None:
            sums[..., 0] += self.corner * table[:, self.start - 1]
        return sums


class Bias:
    """Bias of the logits of any tile, with queries in reverse order.

    Far from 0, float32 has few digits for a log-prior. Therefore :meth:`centred` subtracts a constant in float64, which
    leaves small numbers. The rows' log-sum-exps get the constant back, so the result does not change.

    Args:
        problem: prior and masks.
        tiling: tiling of the problem.
        unit: value of one nat in the bias.
    """

    def __init__(self, problem: BlockProblem, tiling: Tiling, unit: float = 1.0) -> None:
        self.problem, self.tiling, self.unit, self.dtype = problem, tiling, unit, problem.dtype
        self.geometry, self.distances = problem.geometry, problem.distances
        self.key_bias = None
        if problem.key_bias is not None:
            padding, self.key_bias = self.geometry.key_padding_mask, problem.key_bias.unsqueeze(-1)
            if padding is not None:
                # Biases of padding are ignored, also in the search for the best.
                self.key_bias = self.key_bias.masked_fill(padding[:, None, :, None], LOG_PRIOR_FLOOR)
            self.key_bias = self.key_bias.expand(self.geometry.batch, -1, -1, -1)
        table, self.network = problem.table, problem.scaled_bias(self.dtype, unit)
        added = sum(part is not None for part in (table, self.key_bias, problem.row_scale)) > 1
        added = added or self.network is not None
        self.in_memory = tiling.masked or added or self.geometry.offset is None
        """Whether a tile's bias must be in memory. Otherwise, it is a view of a table."""
        self._scratch = Scratch("bias", self.dtype, self.geometry.device)
        self._scale = None if problem.row_scale is None else problem.row_scale.flip(-1).unsqueeze(-1)
        self._table_hides = self.geometry.offset is not None and problem.scale_keeps_masks
        """Whether the table holds ``-inf`` for hidden distances. Otherwise, a mask is added to the bias."""
        self._set_table(None if table is None else table.to(self.dtype))
        self._constant: Tensor | None = None
        self._first_head = 0
        self._earliest: int | None = None
        """Query slot ``i`` sees key slots up to ``i + _earliest``; None if more than the causal mask hides keys."""
        if not tiling.masked and problem.inside is None and self.geometry.offset is not None:
            self._earliest = self.geometry.offset if self.geometry.causal else self.geometry.num_keys
        self._mask_of: tuple[Tile, Tensor | None] | None = None

    def _set_table(self, table: Tensor | None) -> None:
        # `_finite` never hides: a logit scale's gradient multiplies it by 0 where a key is hidden.
        self._table = self._finite = table
        if table is not None:
            finite, missing = table if self.unit == 1.0 else table * self.unit, self.distances.overhang
            table, future = finite, 0.0
            if self._table_hides:
                future = float("-inf")
                if self._hides_entries and self.problem.hidden is not None:
                    table = table + self.problem.hidden[:, : self.distances.number]
            self._table = pad(table, (0, missing), value=future) if missing else table
            if self.problem.row_scale is not None:
                self._finite = pad(finite, (0, missing)) if missing else finite

    @property
    def differs_between_heads(self) -> bool:
        """Whether the bias differs between heads."""
        return self._table is not None or self.key_bias is not None or self.network is not None

    def for_thread(self) -> Bias:
        """Copy the bias for another thread, with separate working memory and everything else shared."""
        one = copy(self)
        one._scratch, one._mask_of = Scratch("bias", self.dtype, self.geometry.device), None
        return one

    def centred(self, tile: Tile, heads: slice, far: bool = False) -> tuple[Bias, Tensor | None]:
        """Return the bias of a tile's queries and heads, minus a constant near the best bias that they see.

        Args:
            tile: queries, and all keys that they see.
            heads: heads of the result, which is valid for no others.
            far: whether to also subtract the best of a table.

        Returns:
            The bias, and the constant ``(b, h, 1)`` in nats and float64, before the logit scale; None for 0.
        """
        far = far and self.problem.table is not None and self.geometry.offset is not None
        far = far and tile.shape[1] > 0
        if self.key_bias is None and not far:
            return self, None
        one, constant = copy(self), torch.zeros((), dtype=torch.float64, device=self.geometry.device)
        if self.key_bias is not None:
            keys = tile.cut_keys(self.key_bias, heads)
            one._constant = keys.amax(-2, keepdim=True) if tile.shape[1] else keys.new_zeros(1, 1, 1, 1)
            constant = one._constant.squeeze(-1)
        if far:
            assert self.problem.table is not None
            table, place = self.problem.table[heads], self.distances.place(tile)
            here, inside = slice(place, place + sum(tile.shape) - 1), self.problem.inside
            seen = table[:, here] if inside is None else table[:, here].masked_fill(~inside[here], float("-inf"))
            best = seen.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
            one._set_table((table - best).to(self.dtype))
            one._first_head = heads.start
            constant = constant + best
        return one, constant

    def _table_of(self, table: Tensor, heads: slice) -> Tensor:
        """Return the rows of some heads. A centred table has only the rows of its own heads."""
        return table[heads.start - self._first_head : heads.stop - self._first_head]

    def keys(self, tile: Tile, heads: slice) -> Tensor | None:
        """Return the key biases minus the constant, in units, ``(b, h, 1, e)``; None without key biases."""
        if self.key_bias is None:
            return None
        assert self._constant is not None
        part = (tile.cut_keys(self.key_bias, heads) - self._constant).mT
        return (part if self.unit == 1.0 else part * self.unit).to(self.dtype)

    def in_full(self, tile: Tile, heads: slice) -> Tensor:
        """Return the whole bias in nats and float64, with no constant subtracted, ``(b, h, n, e)``."""
        total = torch.zeros((), dtype=torch.float64, device=self.geometry.device)
        if self.problem.table is not None:
            total = total + self.distances.read(pad(self.problem.table[heads], (0, self.distances.overhang)), tile)
        if self.key_bias is not None:
            total = total + tile.cut_keys(self.key_bias, heads).mT
        exact = self.problem.scaled_bias(torch.float64)
        if exact is not None:
            shape = (tile.number, heads.stop - heads.start, *tile.shape)
            total = exact.write(total.expand(shape).contiguous(), tile, heads, added=True)
        if self.problem.row_scale is not None:
            total = total * self.scale(tile, heads).double()
        mask = self.mask(tile, heads)
        if mask is not None:
            total = total + mask / self.unit
        return total.expand(tile.number, heads.stop - heads.start, *tile.shape)

    @property
    def _hides_entries(self) -> bool:
        """Whether distances of the table itself may be hidden, and not only distances beyond its end."""
        beyond = self.geometry.causal and self.distances.number > self.distances.highest + 1
        return beyond or self.problem.inside is not None

    def __call__(self, tile: Tile, heads: slice) -> Tensor | None:
        """Return the bias ``(b or 1, h or 1, n, e)``, ``-inf`` where hidden; None for no bias.

        The result is valid until the next call, which may overwrite the memory.
        """
        if not self.in_memory and self._table is not None:
            # Inlined from _table_of, because a call for each tile takes noticeable time.
            table = self._table[heads.start - self._first_head : heads.stop - self._first_head]
            return self.distances.read(table, tile)
        keys = self.keys(tile, heads)
        if keys is not None and not self.in_memory and not self._hides_in(tile):
            return keys.expand(-1, -1, tile.shape[0], -1)
        mask = self.mask(tile, heads)
        if not self.differs_between_heads:
            return mask
        wide = keys is not None or self.problem.row_scale is not None or self.geometry.offset is None
        wide = wide or (mask is not None and len(mask) > 1)
        wide = wide or (self.network is not None and not self.network.is_shared)
        out = self._scratch.of(tile.number if wide else 1, heads.stop - heads.start, *tile.shape)
        return self.write(out, tile, heads, None)

    def write(self, out: Tensor, tile: Tile, heads: slice, row: Tensor | None) -> Tensor:
        """Write the bias, plus a number per query ``(b, h, n, 1)``, to ``out (b, h, n, e)``."""
        is_hidden = self._table is not None and self._table_hides and not self.tiling.masked
        mask = None if is_hidden else self.mask(tile, heads)
        # The mask is added after the scaling, because a scale of 0 times -inf would be NaN.
        row, mask = (mask, None) if row is None else (row, mask)
        scale = None if self.problem.row_scale is None else self.scale(tile, heads)
        self._write_log_prior(out, self._table, tile, heads, row, scale)
        return out if mask is None else out.add_(mask)

    def _write_log_prior(
        self, out: Tensor, table: Tensor | None, tile: Tile, heads: slice, row: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        """Write the log-prior minus the constant, in units, times ``scale``, plus ``row``, to ``out (b, h, n, e)``."""
        keys, network = self.keys(tile, heads), self.network
        if table is not None:
            table = self._table_of(table, heads)
        if network is None and table is None and keys is None:
            return out.zero_() if row is None else out.copy_(row.expand_as(out))
        # Several terms are added up before the scaling, which takes a pass of its own.
        alone = network is None and (table is None or keys is None)
        if table is not None:
            self.distances.write(out, table, tile, *((row, scale) if alone else (keys, None)))
        elif keys is not None:
            write_affine(keys, *((row, scale) if alone else (None, None)), out)
        if network is not None:
            network.write(out, tile, heads, added=table is not None or keys is not None)
        return out if alone else write_affine(out, row, scale, out)

    def moments(self, tile: Tile, heads: slice, numbers: Tensor, by_distance: Diagonals | None) -> Tensor:
        """Return the sum of each query's ``numbers (b, h, n, e)`` times :meth:`log_prior`, as ``(b, h, n)``.

        ``by_distance`` holds the numbers by distance, if there is a table with an offset.
        """
        if by_distance is not None and self._finite is not None and self.key_bias is None and self.network is None:
            return by_distance.dot(self._table_of(self._finite, heads))
        return (numbers * self.log_prior(tile, heads)).sum(-1)

    def log_prior(self, tile: Tile, heads: slice) -> Tensor:
        """Return the log-prior minus the constant, without scale and mask, in units, ``(b or 1, h, n or 1, e)``."""
        keys = self.keys(tile, heads)
        if self.network is None and keys is None and self._finite is not None:
            return self.distances.read(self._table_of(self._finite, heads), tile)
        if self.network is None and keys is not None and self._finite is None:
            return keys
        shape = (tile.number, heads.stop - heads.start, *tile.shape)
        out = torch.empty(shape, dtype=self.dtype, device=self.geometry.device)
        return self._write_log_prior(out, self._finite, tile, heads, None, None)

    def scale(self, tile: Tile, heads: slice) -> Tensor:
        """Return the factor of the log-prior for each query, ``(b, h, n, 1)``."""
        assert self._scale is not None
        number = self.geometry.num_queries
        return self._scale[tile.batches, heads, number - tile.stop : number - tile.start]

    def _hides_in(self, tile: Tile) -> bool:
        """Return whether a distance of the tile may be hidden."""
        offset, reach = self.geometry.offset, self.tiling.reach
        if self.problem.hidden is None:
            return False
        if offset is None or self.problem.has_gaps:
            return True
        nearest, farthest = tile.start + offset - (tile.last - 1), tile.stop - 1 + offset - tile.first
        if self.geometry.causal and nearest < 0:
            return True
        return reach is not None and (nearest < reach[0] or farthest > reach[1])

    def mask(self, tile: Tile, heads: slice) -> Tensor | None:
        """Return 0 or ``-inf`` for each pair of the tile, plus a float ``attn_mask``; ``(b or 1, h or 1, n or 1, e)``.

        The mask seldom differs between heads, so it is built once and cached for the next group of heads. Without
        masks, the result is None.
        """
        if self._mask_of is None or self._mask_of[0] != tile:
            self._mask_of = (tile, self._make_mask(tile))
        mask = self._mask_of[1]
        return mask if mask is None or mask.shape[1] == 1 else mask[:, heads]

    def _make_mask(self, tile: Tile) -> Tensor | None:
        geometry = self.geometry
        masks = []
        if self.problem.hidden is not None and self._hides_in(tile):
            masks.append(self.distances.read(self.problem.hidden, tile))
        if self.tiling.masked:
            if geometry.attn_mask is not None and geometry.attn_mask.dtype != torch.bool:
                added = geometry.cut_mask(tile.rows, tile.keys, tile.batches).to(self.dtype)
                masks.append(added.flip(-2) * self.unit)
            allowed = geometry.allowed(tile.rows, tile.keys, tile.batches)
            if allowed is not None:
                zeros = torch.zeros(allowed.shape, dtype=self.dtype, device=geometry.device)
                masks.append(zeros.masked_fill_(~allowed.flip(-2), float("-inf")))
        return sum(masks[1:], masks[0]) if masks else None

    def blind(self, tile: Tile, bias: Tensor) -> Tensor | None:
        """Return which queries of the tile see none of its keys, ``(b or 1, h or 1, n, 1)``; None for no query."""
        if self._earliest is not None and tile.start + self._earliest >= tile.first:
            return None  # each query sees the first key
        # A view hides by distance alone, so one head is enough.
        seen = bias if self.tiling.masked else bias[:, :1]
        blind = seen.amax(-1, keepdim=True) == float("-inf")
        return blind if bool(blind.any()) else None
