"""Blocks of queries, the keys they can see, and the bias to add to their logits.

A stationary bias is a Toeplitz matrix: one number per distance and head. With the queries of a block in
reverse order, its entry ``(i', j')`` stands at place ``i' + j' + x0`` of the table, both strides are +1, and
``table.as_strided`` is the whole bias without any memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.problem import Problem, block_length
from attention_priors.priors import Prior

BLOCK_ROWS = 256
"""Queries per block where the bias is a view: the fastest of those tried by the benchmarks."""
BIAS_NUMBERS = 2**21
"""Numbers that the bias of one block may take where it must be in memory: 8 MiB in float32."""


class Block(NamedTuple):
    """Queries ``start..stop`` and the range ``first..last`` of keys that any of them can see."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def rows(self) -> slice:
        """The queries."""
        return slice(self.start, self.stop)

    @property
    def keys(self) -> slice:
        """The keys."""
        return slice(self.first, self.last)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        return self.stop - self.start, self.last - self.first


@dataclass(frozen=True)
class Layout:
    """How the blocks of a problem read a table over distances."""

    problem: Problem
    distances: Tensor
    """``(N,)``: the distance of each table entry. Falling by one per entry if the problem has an offset;
    otherwise the distances that occur, rising."""
    inside: Tensor | None
    """``(N,)``: whether the prior lets a query see that distance (a window); None if all."""
    block_rows: int

    @classmethod
    def of(cls, problem: Problem, terms: Sequence[Prior]) -> Layout:
        """Lay out the table that the stationary ``terms`` need."""
        batch, heads, num_queries, _ = problem.query.shape
        num_keys = problem.key.shape[2]
        rows = min(num_queries, BLOCK_ROWS)
        if _is_dense(problem):
            rows = min(rows, block_length(batch * heads * num_keys, BIAS_NUMBERS))
        if problem.offset is None:
            blocks = problem.query_positions.split(rows, dim=-1)
            keys = problem.key_positions.unsqueeze(-2)
            distances = torch.cat([torch.unique(queries.unsqueeze(-1) - keys) for queries in blocks]).unique()
        else:
            highest = num_queries - 1 + problem.offset
            # A causal block looks ahead no farther than its own last query.
            lowest = 1 - rows if problem.causal else problem.offset - (num_keys - 1)
            distances = torch.arange(highest, min(lowest, highest) - 1, -1, device=problem.device)
        inside = None
        for term in terms:
            seen = term.visible_at(distances)
            if seen is not None:
                inside = seen if inside is None else inside & seen
        return cls(problem, distances, inside, rows)

    @property
    def dense(self) -> bool:
        """Whether a block's bias must be in memory; else it is a view of the table."""
        return _is_dense(self.problem)

    def blocks(self) -> Iterator[Block]:
        """All queries, block by block."""
        problem, num_queries = self.problem, self.problem.query.shape[2]
        for start in range(0, num_queries, self.block_rows):
            stop = min(start + self.block_rows, num_queries)
            first, last = 0, problem.key.shape[2]
            if problem.offset is not None:
                earliest, latest = start + problem.offset, stop - 1 + problem.offset
                if problem.causal:
                    last = min(last, latest + 1)
                if self._reach is not None:
                    first, last = (
                        max(first, earliest - self._reach[1]),
                        min(last, latest - self._reach[0] + 1),
                    )
                if self._document_ranges is not None:
                    firsts, lasts = self._document_ranges
                    first, last = max(first, min(firsts[start:stop])), min(last, max(lasts[start:stop]))
            yield Block(start, stop, first, max(first, last))

    @cached_property
    def _reach(self) -> tuple[int, int] | None:
        """Smallest and largest distance that the prior lets a query see; None if all."""
        if self.inside is None:
            return None
        seen = self.distances[self.inside]
        return (int(seen.min()), int(seen.max())) if len(seen) else (0, -1)

    @cached_property
    def _document_ranges(self) -> tuple[list[int], list[int]] | None:
        """First and one-past-last key of each query's document, over the whole batch."""
        if self.problem.key_documents is None:
            return None
        first, last = self.problem.slot_range
        return first.amin(0).tolist(), last.amax(0).tolist()

    def place(self, block: Block) -> int:
        """The table entry of the block's last query and first key; needs an offset."""
        return self.problem.query.shape[2] - block.stop + block.first

    def index(self, block: Block) -> Tensor:
        """The table entry of every pair of a block, ``(B or 1, n, e)``; for problems without an offset."""
        queries = self.problem.query_positions[:, block.rows].flip(-1).unsqueeze(-1)
        return torch.searchsorted(self.distances, queries - self.problem.key_positions[:, None, block.keys])

    def read(self, table: Tensor, block: Block) -> Tensor:
        """A block's part of a table ``(H or 1, N)``: ``(B or 1, H or 1, n, e)``, a view if there is an offset."""
        if self.problem.offset is None:
            return table[:, self.index(block)].transpose(0, 1)
        place = table.storage_offset() + self.place(block) * table.stride(1)
        return table.as_strided((1, table.shape[0], *block.shape), (0, table.stride(0), 1, 1), place)

    def add_by_distance(self, table: Tensor, block: Block, numbers: Tensor, batch: slice, scratch: Scratch) -> None:
        """Add a block's numbers ``(b, H, n, e)``, those of ``batch``, to their entries of ``table (H, N)``.

        The transpose of :meth:`read`, summed over the batch. ``scratch`` is written to.
        """
        if self.problem.offset is None:
            index = self.index(block)
            index = index[batch] if len(index) > 1 else index
            for part, places in zip(numbers if len(index) > 1 else numbers.sum(0, keepdim=True), index, strict=True):
                table.index_add_(1, places.flatten(), part.flatten(1))
            return
        numbers = numbers.sum(0) if len(numbers) > 1 else numbers[0]
        rows, keys = block.shape
        # Row i' starts i' places further to the left when rows are one number shorter than they are: the
        # diagonals become columns.
        padded = scratch.of(len(numbers), rows, rows + keys)
        padded[:, :, :rows], padded[:, :, rows:] = 0, numbers
        width = rows + keys - 1
        diagonals = padded.as_strided((len(numbers), rows, width), (rows * (rows + keys), width, 1), rows)
        table[:, self.place(block) : self.place(block) + width] += diagonals.sum(1)


class Scratch:
    """Memory that is used again and again: to write to new memory costs more than the arithmetic on it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = torch.empty(0, dtype=dtype, device=device)

    def of(self, *shape: int) -> Tensor:
        """A contiguous tensor of this shape, whose content is whatever was written last."""
        size = math.prod(shape)
        if size > len(self._numbers):
            # Blocks of a causal problem grow a little each time.
            self._numbers = self._numbers.new_empty(max(size, 2 * len(self._numbers)))
        return self._numbers[:size].view(shape)


def total(parts: Sequence[Tensor]) -> Tensor | None:
    """The sum of tensors that broadcast; None if there are none."""
    return sum(parts[1:], parts[0]) if parts else None


def _is_dense(problem: Problem) -> bool:
    masks = (problem.key_documents, problem.key_padding_mask, problem.attn_mask)
    return problem.offset is None or problem.scales_prior or any(mask is not None for mask in masks)


class Bias:
    """The bias of any block, its queries in reverse order.

    Args:
        layout: of the table.
        table: the log-prior of each distance, finite, ``(H, N)``; None for none.
        row_scale: what multiplies it, per query, ``(B or 1, H, Lq)``; None for nothing.
    """

    def __init__(self, layout: Layout, table: Tensor | None, row_scale: Tensor | None) -> None:
        self.layout = layout
        self.table = table
        self.row_scale = row_scale
        self._scratch = Scratch(layout.problem.compute_dtype, layout.problem.device)
        self.hidden_table = self._hide_distances()
        """0, or ``-inf`` at distances that no query sees, ``(1, N)``; None if there are none."""
        self.view_table = None
        """What views are read off, ``(H or 1, N)``: both in one. None if there is neither, or no view."""
        if not layout.dense:
            self.view_table = total([part for part in (table, self.hidden_table) if part is not None])

    def _hide_distances(self) -> Tensor | None:
        problem, layout = self.layout.problem, self.layout
        hidden = None if layout.inside is None else ~layout.inside
        if problem.causal:
            future = layout.distances < 0
            hidden = future if hidden is None else hidden | future
        if hidden is None or not bool(hidden.any()):
            return None
        zeros = torch.zeros(1, len(hidden), dtype=problem.compute_dtype, device=problem.device)
        return zeros.masked_fill(hidden, float("-inf"))

    def log_prior(self, block: Block) -> Tensor:
        """The log-prior itself, neither scaled nor masked, ``(B or 1, H, n, e)``."""
        assert self.table is not None
        return self.layout.read(self.table, block)

    def scale(self, block: Block) -> Tensor:
        """What multiplies it, ``(B or 1, H, n, 1)``."""
        assert self.row_scale is not None
        return self.row_scale[..., block.rows].flip(-1).unsqueeze(-1)

    def __call__(self, block: Block) -> Tensor | None:
        """What to add to the block's logits, ``(B or 1, H or 1, n, e)``, ``-inf`` where hidden; None for nothing.

        It is good until the next call, which writes to the same memory.
        """
        if not self.layout.dense:
            return None if self.view_table is None else self.layout.read(self.view_table, block)
        mask = self._mask(block)
        if self.table is None:
            return mask
        bias = self.log_prior(block)
        if self.row_scale is None:
            return bias if mask is None else torch.add(bias, mask, out=self._memory_for(bias, mask))
        scale = self.scale(block)
        if mask is None:
            return torch.mul(bias, scale, out=self._memory_for(bias, scale))
        # The mask is added, and not set before the scaling: a scale of 0 times -inf would be nan.
        return torch.addcmul(mask, bias, scale, out=self._memory_for(mask, bias, scale))

    def _memory_for(self, *operands: Tensor) -> Tensor:
        return self._scratch.of(*torch.broadcast_shapes(*(operand.shape for operand in operands)))

    def _mask(self, block: Block) -> Tensor | None:
        """0 or ``-inf`` for every pair of the block, plus a float ``attn_mask``; ``(B or 1, H or 1, n, e)``.

        Put together first, since it seldom differs between heads: the bias itself is then one pass over memory.
        """
        problem = self.layout.problem
        masks = [] if self.hidden_table is None else [self.layout.read(self.hidden_table, block)]
        if problem.attn_mask is not None and problem.attn_mask.dtype != torch.bool:
            added = problem.rows(block.rows).attn_mask
            assert added is not None
            masks.append(added[..., block.keys].flip(-2).to(problem.compute_dtype))
        allowed = problem.allowed(block.rows, block.keys)
        if allowed is not None:
            zeros = torch.zeros(allowed.shape, dtype=problem.compute_dtype, device=problem.device)
            masks.append(zeros.masked_fill_(~allowed.flip(-2), float("-inf")))
        return total(masks)

    def blind(self, block: Block, bias: Tensor) -> Tensor | None:
        """Which of the block's queries see no key at all, ``(B or 1, H or 1, n, 1)``; None if every one sees one."""
        layout, problem = self.layout, self.layout.problem
        masked = layout.inside is not None or problem.key_padding_mask is not None or problem.attn_mask is not None
        if not masked and problem.causal and problem.offset is not None and block.start + problem.offset >= 0:
            return None  # every query sees the key in its own place, or all keys
        # A view hides by distance alone: read it off one head, without a pass over all of the bias.
        seen = bias if layout.dense else bias[:, :1]
        blind = seen.amax(-1, keepdim=True) == float("-inf")
        return blind if bool(blind.any()) else None
