"""Certified pruning: which blocks of keys a block of queries need not look at.

Softmax gives a set of keys the share ``Σ_set e^z / Σ_all e^z`` of a query's weight. Both sums can be bounded without
computing logits. For a block ``J`` of keys with mean ``k̄`` and radius ``r`` (:class:`Balls`), query ``i``, content
scale ``s`` (logit scale included) and log-prior ``b``,

    ``ln Σ_{j∈J} e^{z_ij}  ≤  s <q_i, k̄> + |s| ‖q_i‖ r + max_{j∈J} b_ij + ln |J|``     (Cauchy-Schwarz)
    ``ln Σ_{j∈J} e^{z_ij}  ≥  s <q_i, k̄> + mean_{j∈J} b_ij + ln |J|``                (Jensen)

the second for blocks that the query sees all of; near the peak of the prior the sum is computed as it is. The largest
set of blocks whose bounds add up to at most the tolerance is dropped: no query loses more of its weight than
that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import Geometry, block_length
from attention_priors.attention.pruning.bounds import BLOCK, ROUNDING, Balls
from attention_priors.attention.tiles.block_problem import BlockProblem, Content, all_of
from attention_priors.attention.tiles.tiling import Tile

BAND_ROWS = 256
"""Queries per tile near the peak."""
BAND = 64
"""Distances to either side of the prior's peak where the sum over keys is computed and not bounded."""
BAND_OF_ONE_QUERY = 256
"""The same for a single query, which has no other lower bound: means of the log-prior are not worth their time."""
COARSE_BLOCKS = 64
"""Number of coarse blocks that the keys are cut into first, about."""
TOGETHER = 16
"""Blocks of queries whose fine bounds are computed together."""
NUMBERS = 2**20
"""Numbers per working buffer."""
WORTH_PRUNING = 0.8
"""A head that would keep a larger share of its blocks keeps them all: large tiles are then faster."""
LOWEST_MEAN = -1e6
"""Log-priors below it, in nats, are not averaged."""
UNKNOWN = 1e30
"""Nats: in place of an infinity."""


class Pruned(NamedTuple):
    """What is kept, and what the rest weighs."""

    kept: Tensor
    """``(B, H, ⌈Lq / 256⌉, ⌈Lk / 256⌉)``, boolean: which blocks of keys each block of queries looks at."""
    dropped: Tensor
    """``(B, H, ⌈Lq / 256⌉)``, float64: the share of weight that any query of the block loses, at most."""


def prune(content: Content, problem: BlockProblem, tolerance: float, balls: Balls | None) -> Pruned:
    """Choose the blocks to keep so that no query loses more than ``tolerance`` of its weight.

    Positions with gaps and dense masks are not pruned, nor are heads with little to gain: everything is kept.

    Args:
        content: queries and keys.
        problem: the rest.
        tolerance: in (0, 1).
        balls: around the blocks of the keys; None to make them.
    """
    geometry = problem.geometry
    everything = keep_everything(geometry)
    if not may_prune(geometry) or geometry.offset is None or problem.distances.listed is not None:
        return everything
    if problem.inside is not None and not bool(problem.inside.any()):
        return everything
    if geometry.causal and geometry.offset + geometry.num_queries <= 0:
        return everything  # all keys are in the future of all queries
    search = _Search(content, problem, balls)
    pruned = search.run(tolerance)
    if geometry.num_queries == 1:
        return pruned
    visible = search.visible_blocks()
    share = pruned.kept.sum((0, 2, 3)) / visible.expand_as(pruned.kept).sum((0, 2, 3)).clamp(min=1)
    whole = (share > WORTH_PRUNING).view(1, -1, 1, 1)
    return Pruned(pruned.kept | whole, pruned.dropped.masked_fill(whole[..., 0], 0.0))


def keep_everything(geometry: Geometry) -> Pruned:
    """Nothing is dropped."""
    size = (geometry.batch, geometry.heads, -(-geometry.num_queries // BLOCK), -(-geometry.num_keys // BLOCK))
    return Pruned(
        torch.ones(size, dtype=torch.bool, device=geometry.device),
        torch.zeros(size[:3], dtype=torch.float64, device=geometry.device),
    )


def may_prune(geometry: Geometry) -> bool:
    """Whether there are blocks to tell apart: more than two, and no dense mask."""
    return geometry.attn_mask is None and geometry.num_keys > 2 * BLOCK


class BlockPriors:
    """Extremes and means of the log-prior over pairs of blocks, which depend on how far apart these are.

    The log-prior is read in the order of falling distances, in runs of 256: as keys follow each other, and not a
    number is moved. Of hidden distances (a window's, the future's) none is read.

    Args:
        problem: whose prior, offset and causal mask; some distance must be visible.
        num_query_blocks: of 256 queries.
        num_key_blocks: of 256 keys.
    """

    def __init__(self, problem: BlockProblem, num_query_blocks: int, num_key_blocks: int) -> None:
        geometry, distances, table = problem.geometry, problem.distances, problem.table
        assert geometry.offset is not None
        self.num_query_blocks, self.num_key_blocks = num_query_blocks, num_key_blocks
        self.rows = min(BLOCK, geometry.num_queries)
        self.highest = geometry.offset + (num_query_blocks - 1) * BLOCK + self.rows - 1
        """The distance of the last query of the last block and the first key."""
        runs = num_query_blocks + num_key_blocks if self.rows > 1 else num_key_blocks
        # Visible distances are one range: of those in the table, and within the prior's reach.
        top, bottom = distances.highest, distances.highest - distances.number + 1
        reach = problem.tiling.reach
        if reach is not None:
            top, bottom = min(top, reach[1]), max(bottom, reach[0])
        if geometry.causal:
            bottom = max(bottom, 0)
        top, bottom = min(top, self.highest), max(bottom, self.highest - runs * BLOCK + 1)
        self.visible = (bottom, top)
        cut = slice(distances.highest - top, distances.highest - bottom + 1)
        if table is None:
            values = torch.zeros(1, top - bottom + 1, dtype=problem.dtype, device=geometry.device)
        else:
            values = table.detach()[:, cut].to(problem.dtype)
        # What lies beyond repeats the last number, so that it is never an extreme of its own.
        beyond = (self.highest - top, runs * BLOCK - (self.highest - bottom + 1))
        self.values = pad(values.unsqueeze(0), beyond, mode="replicate")[0] if max(beyond) > 0 else values
        """The log-prior at falling distances, ``(H or 1, 256 runs)``."""
        starts = self.highest - torch.arange(runs, device=geometry.device) * BLOCK
        self._none = (starts < bottom) | (starts - BLOCK + 1 > top)
        self._all = (starts <= top) & (starts - BLOCK + 1 >= bottom)

    @property
    def _runs(self) -> Tensor:
        return self.values.unflatten(-1, (-1, BLOCK))

    @cached_property
    def _high(self) -> Tensor:
        return self._runs.amax(-1).masked_fill(self._none, -math.inf)

    @cached_property
    def _low(self) -> Tensor:
        return self._runs.amin(-1).masked_fill(self._none, math.inf)

    def peaks(self, lowest: Sequence[bool]) -> list[int]:
        """The distance where each head's log-prior is largest, or, where so wished, ``lowest``."""
        heads = len(self.values)
        index = torch.arange(heads, device=self.values.device)
        sign = torch.ones(())
        extremes = self._high
        if any(lowest):
            sign = torch.tensor([-1.0 if low else 1.0 for low in lowest], device=self.values.device).view(-1, 1)
            extremes = torch.where(sign < 0, -self._low, self._high)
        run = extremes.argmax(-1)
        index = index if heads == len(lowest) else torch.zeros_like(run)
        place = run * BLOCK + (self._runs[index, run] * sign).argmax(-1)
        # A repeated number stands for the one it repeats.
        return (self.highest - place).clamp(*self.visible).expand(len(lowest)).tolist()

    def extreme(self, highest: bool, factor: int, first: int, last: int) -> Tensor:
        """Highest or lowest log-prior that any query of a block sees at any key of a block.

        Args:
            highest: or lowest.
            factor: keys per block, in units of 256.
            first: and
            last: range of query blocks.

        Returns:
            ``(H or 1, last - first, blocks of keys)``; ``-inf`` (``inf``, if lowest) where all pairs are hidden.
        """
        # One query finds a block's distances in one run; 256 of them in two.
        width = factor if self.rows == 1 else factor + 1
        run = self._first_run(factor, first, last)
        extra = max(0, int(run[0, -1]) + width - len(self._none))
        if highest:
            return pad(self._high, (0, extra), value=-math.inf).unfold(-1, width, 1).amax(-1)[:, run]
        return pad(self._low, (0, extra), value=math.inf).unfold(-1, width, 1).amin(-1)[:, run]

    def means(self, factor: int) -> tuple[Tensor, Tensor, Tensor]:
        """Smallest and largest of the means over a whole block of keys that queries of a block find.

        Args:
            factor: keys per block, in units of 256.

        Returns:
            Each ``(H or 1, query blocks, blocks of keys)``, and whether there is a mean: not where a key is hidden,
            or so far down that the mean of the others would drown.
        """
        run = self._first_run(factor, 0, self.num_query_blocks)
        seen, low = self._all, self.extreme(False, factor, 0, self.num_query_blocks)
        size = factor * BLOCK
        total = pad(self.values.double().clamp(min=LOWEST_MEAN).cumsum(-1), (1, 0))
        mean = ((total[:, size:-1] - total[:, : -size - 1]) / size).unflatten(-1, (-1, BLOCK))
        whole = seen.unfold(-1, factor + 1, 1).all(-1)
        # The last block of keys may not be whole: it has no mean, and any place will do.
        fits = (run < len(whole)) & whole[run.clamp(max=len(whole) - 1)] & (low >= LOWEST_MEAN)
        run = run.clamp(max=mean.shape[1] - 1)
        return mean.amin(-1)[:, run], mean.amax(-1)[:, run], fits

    def _first_run(self, factor: int, first: int, last: int) -> Tensor:
        """Of the distances of each pair of blocks, ``(last - first, blocks of keys)``; largest at ``[0, -1]``."""
        device = self.values.device
        starts = torch.arange(0, self.num_key_blocks, factor, device=device)
        behind = self.num_query_blocks - 1 - torch.arange(first, last, device=device)
        return behind.unsqueeze(-1) + starts


class _Search:
    """Bounds for all pairs of blocks of one problem.

    Args:
        content: queries and keys.
        problem: the rest.
        balls: around the blocks of the keys; None to make them.
    """

    def __init__(self, content: Content, problem: BlockProblem, balls: Balls | None) -> None:
        geometry, query, key = problem.geometry, content.queries(all_of), content.key
        self.moved = None
        """How far keys may lie from those that the balls were made of, ``(B, H, 1)``; None if they are the same."""
        if balls is None:
            balls = Balls.around(key)
        elif (moved := _moved_by_a_cast(balls, key.dtype)) is not None:
            balls = Balls.of(balls.means.to(problem.dtype), (balls.radii + moved).to(problem.dtype))
            largest = moved.amax(-1).to(problem.dtype)
            self.moved = largest.repeat_interleave(query.shape[1] // key.shape[1], dim=1).unsqueeze(-1)
        self.content, self.query, self.problem, self.geometry = content, query, problem, geometry
        self.num_key_blocks = balls.means.shape[2]
        self.num_query_blocks = -(-geometry.num_queries // BLOCK)
        self.group = query.shape[1] // key.shape[1]
        # A single block of queries, as in decoding, is done with all blocks of keys at once.
        many = self.num_key_blocks if self.num_query_blocks > 1 else 1
        factor = 2 ** max(0, math.ceil(math.log2(many / COARSE_BLOCKS)))
        self.factor = factor
        """Blocks of 256 keys in a coarse one."""
        self.fine = balls
        self.coarse = balls.joined(factor, geometry.num_keys) if factor > 1 else balls
        self.priors = BlockPriors(problem, self.num_query_blocks, self.num_key_blocks)
        self.key_ends = None if problem.key_bias is None else self._ends_of_keys(problem.key_bias)
        """Highest, lowest and mean number of each block of 256 keys and each coarse one, ``(B, H, blocks)``."""
        self.first, self.last = geometry.slot_range
        self.norms = torch.linalg.vector_norm(query, dim=-1, dtype=problem.dtype) * problem.softmax_scale
        self.scale_ends = None
        """Smallest and largest factor of the log-prior in each block of queries, ``(B, H, query blocks)`` each."""
        if problem.row_scale is not None:
            scale = problem.row_scale.detach()
            self.scale_ends = (
                _in_blocks(scale, BLOCK, math.inf).amin(-1),
                _in_blocks(scale, BLOCK, -math.inf).amax(-1),
            )

    def _ends_of_keys(self, key_bias: Tensor) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        dtype, padding = self.problem.dtype, self.geometry.key_padding_mask
        numbers = key_bias.detach().expand(self.geometry.batch, -1, -1)
        high, low = numbers, numbers
        if padding is not None:
            high = numbers.masked_fill(padding.unsqueeze(1), -math.inf)
            low = numbers.masked_fill(padding.unsqueeze(1), math.inf)
        return {
            factor: (
                _in_blocks(high, factor * BLOCK, -math.inf).amax(-1).to(dtype),
                _in_blocks(low, factor * BLOCK, math.inf).amin(-1).to(dtype),
                _in_blocks(numbers, factor * BLOCK, 0.0).mean(-1).to(dtype),
            )
            for factor in {1, self.factor}
        }

    def run(self, tolerance: float) -> Pruned:
        """Choose."""
        lower = self._lower_bound()
        rows = block_length(
            self.geometry.batch * self.geometry.heads * BLOCK * (self.coarse.keys.shape[2] + self.query.shape[-1]),
            NUMBERS,
        )
        parts = [
            self._shares(lower, slice(None), slice(None), first, min(first + rows, self.num_query_blocks), self.coarse)
            for first in range(0, self.num_query_blocks, rows)
        ]
        budget = torch.full((), tolerance, dtype=torch.float64, device=lower.device)
        if self.factor == 1:
            kept, spent = select(torch.cat(parts, dim=2), budget)
        else:
            kept, spent = select(torch.cat(parts, dim=2), budget / 2)
            kept, more = select(self._fine_shares(kept, lower), budget - spent.unsqueeze(-1))
            spent = spent + more
        if self.geometry.key_documents is not None:
            # Other blocks that cannot be seen have weight 0 by distance alone.
            kept &= self.visible_blocks()
        return Pruned(kept, spent)

    def visible_blocks(self) -> Tensor:
        """Which blocks hold a key that the block of queries can see, ``(B or 1, 1, query blocks, key blocks)``."""
        number = self.geometry.num_keys
        seen = self.first < self.last
        first = _in_blocks(self.first.masked_fill(~seen, number), BLOCK, number).amin(-1).unsqueeze(-1)
        last = _in_blocks(self.last.masked_fill(~seen, 0), BLOCK, 0).amax(-1).unsqueeze(-1)
        starts = torch.arange(self.num_key_blocks, device=self.first.device) * BLOCK
        return ((starts < last) & (starts + BLOCK > first)).unsqueeze(1)

    # ---- from below

    def _lower_bound(self) -> Tensor:
        """Of every query's log-sum-exp, ``(B, H, Lq)``; ``-inf`` where nothing is known."""
        lower = self._near_the_peak()
        if self.geometry.num_queries > 1:
            # Not their sum: they may have keys in common.
            far = self._far_away()
            # It was computed with means of keys, which lie no farther from the true ones than the keys do.
            lower = torch.maximum(lower, far if self.moved is None else far - self.norms * self.moved)
        # Dot products in float32 may be wrong by this much, relative to the norms.
        error = (self.query.shape[-1] + 8) * ROUNDING
        largest = self.fine.reach.amax(-1).repeat_interleave(self.group, dim=1).unsqueeze(-1)
        return lower - self.norms * largest * error - (1e-4 + error * lower.abs()).nan_to_num(posinf=0.0)

    def _near_the_peak(self) -> Tensor:
        """Log-sum-exp over the keys near each head's peak, ``(B, H, Lq)``."""
        problem, heads = self.problem, self.geometry.heads
        bias_of = problem.bias()
        # A negative logit scale turns the prior upside down.
        turned = [False] * heads if self.scale_ends is None else (self.scale_ends[0][..., -1].sum(0) < 0).tolist()
        peaks = self.priors.peaks(turned)
        out = torch.full(self.norms.shape, -math.inf, dtype=problem.dtype, device=self.norms.device)
        for q_heads, peak in _runs_of_heads(peaks, self.group):
            kv_heads = slice(q_heads.start // self.group, (q_heads.stop - 1) // self.group + 1)
            for tile in self._band(peak):
                query = tile.cut_rows(self.query, q_heads).flip(2).to(out.dtype) * problem.softmax_scale
                logits = _products(query, tile.cut_keys(self.content.key, kv_heads).to(out.dtype))
                centred, constant = bias_of.centred(tile, q_heads)
                bias = centred(tile, q_heads)
                found = (logits if bias is None else logits.add_(bias)).logsumexp(-1)
                if constant is not None:
                    scale = 1.0 if problem.row_scale is None else tile.cut_rows(problem.row_scale, q_heads).flip(2)
                    found = (found + constant * scale).to(out.dtype)
                tile.cut_rows(out, q_heads).copy_(found.flip(2))
        return out

    def _band(self, peak: int) -> Iterator[Tile]:
        """Tiles of keys about ``peak`` tokens before their queries."""
        tiling, offset = self.problem.tiling, self.geometry.offset
        assert offset is not None
        band = BAND if self.geometry.num_queries > 1 else BAND_OF_ONE_QUERY
        for segment in tiling.segments:
            for start in range(segment.start, segment.stop, BAND_ROWS):
                stop = min(start + BAND_ROWS, segment.stop)
                first, last = tiling.keys_of(segment, start, stop)
                first, last = max(first, start + offset - peak - band), min(last, stop + offset - peak + band)
                if first < last:
                    yield Tile(segment.batches, start, stop, first, last)

    def _far_away(self) -> Tensor:
        """Lower bound of the log-sum-exp over the coarse blocks of which a query's whole block sees every key.

        With ``m_S`` the mean log-prior of block ``S``, and any weights ``w`` that add up to 1, Jensen says once more
        ``ln Σ_S e^{s <q, k̄_S> + m_S} ≥ ln Σ_S e^{m_S} + s <q, Σ_S w_S k̄_S>``, with equality of the first terms for
        ``w_S ∝ e^{m_S}``. So each block of queries needs a single mean key.
        """
        size = self.factor * BLOCK
        low, high, fits = self.priors.means(self.factor)
        if self.key_ends is not None:
            low, high = (numbers + self.key_ends[self.factor][2].unsqueeze(2) for numbers in (low, high))
        bound = low if self.scale_ends is None else _products_with(self.scale_ends, low, high).amin(0)
        starts = torch.arange(self.coarse.means.shape[2], device=low.device) * size
        first = _in_blocks(self.first, BLOCK, 0).amax(-1).unsqueeze(-1)
        last = _in_blocks(self.last, BLOCK, self.geometry.num_keys).amin(-1).unsqueeze(-1)
        fits = fits & ((starts >= first) & (starts + size <= last)).unsqueeze(1)
        if self.geometry.key_padding_mask is not None:
            padded = _in_blocks(self.geometry.key_padding_mask, size, True).any(-1)
            fits = fits & ~padded[:, None, None]
        bound = bound.masked_fill(~fits, -math.inf)
        total = bound.logsumexp(-1, keepdim=True)
        weights = (bound - total.masked_fill(torch.isneginf(total), 0.0)).exp().to(self.norms.dtype)
        weights = weights.expand(*self.norms.shape[:2], -1, -1)
        keys = _products(weights, self.coarse.means.mT.to(weights.dtype))
        scores = torch.empty_like(self.norms)
        whole = self.geometry.num_queries // BLOCK * BLOCK
        for start, stop in ((0, whole), (whole, self.geometry.num_queries)):
            if start < stop:
                blocks = self.query[:, :, start:stop].unflatten(2, (-1, min(BLOCK, stop - start))).to(keys.dtype)
                key = keys[:, :, start // BLOCK : -(-stop // BLOCK)].unsqueeze(-1)
                scores[:, :, start:stop] = (blocks @ key).flatten(2)
        total = total.to(weights.dtype).repeat_interleave(BLOCK, dim=2)[:, :, : self.geometry.num_queries, 0]
        return scores * self.problem.softmax_scale + total + math.log(size)

    # ---- from above

    def _fine_shares(self, kept: Tensor, lower: Tensor) -> Tensor:
        """:meth:`_shares` of blocks of 256 keys within the coarse blocks that are kept; ``-inf`` elsewhere."""
        factor, number = self.factor, self.num_key_blocks
        shares = torch.full((*kept.shape[:3], number), -math.inf, dtype=lower.dtype, device=lower.device)
        for first in range(0, self.num_query_blocks, TOGETHER):
            last = min(first + TOGETHER, self.num_query_blocks)
            wanted = kept[:, :, first:last].any(2)
            for batch, head in wanted.any(-1).nonzero().tolist():
                coarse = wanted[batch, head].repeat_interleave(factor)[:number]
                keys = coarse.nonzero().flatten()
                batches, heads = slice(batch, batch + 1), slice(head, head + 1)
                found = self._shares(lower, batches, heads, first, last, self.fine, keys)[0, 0]
                mine = kept[batch, head, first:last].repeat_interleave(factor, dim=-1)[:, keys]
                shares[batch, head, first:last, keys] = found.masked_fill(~mine, -math.inf)
        return shares

    def _shares(
        self,
        lower: Tensor,
        batches: slice,
        heads: slice,
        first: int,
        last: int,
        balls: Balls,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Log of the share of weight that any query of a block may give to a block of keys.

        Args:
            lower: bound of every query's log-sum-exp, ``(B, H, Lq)``.
            batches: which ones.
            heads: which ones: all, or one.
            first: and
            last: range of query blocks.
            balls: around the blocks of keys: coarse ones, or those of 256.
            keys: which of them, ``(n,)``; None for all.

        Returns:
            ``(b, h, last - first, n)``.
        """
        rows = slice(first * BLOCK, min(last * BLOCK, self.geometry.num_queries))
        kv_heads = heads if heads == slice(None) else slice(heads.start // self.group, heads.start // self.group + 1)
        queries = self._bounded_queries(lower, batches, heads, rows)
        of_keys = balls.keys[batches, kv_heads] if keys is None else balls.keys[batches, kv_heads, keys]
        largest = _products(queries, of_keys).unflatten(2, (-1, min(BLOCK, queries.shape[2]))).amax(-2)
        factor = 1 if balls is self.fine else self.factor
        high = self._bias_extreme(True, factor, first, last, batches, heads, keys)
        hidden = torch.isneginf(high)
        high = high.masked_fill(hidden, 0.0)
        if self.scale_ends is not None:
            low = self._bias_extreme(False, factor, first, last, batches, heads, keys).masked_fill(hidden, 0.0)
            ends = tuple(end[batches, heads, first:last] for end in self.scale_ends)
            high = _products_with(ends, low, high).amax(0)
        error = (self.query.shape[-1] + 8) * ROUNDING
        shares = largest + high + error * high.abs() + math.log(factor * BLOCK)
        # No key, no weight, whatever else is (not) known.
        return shares.masked_fill(hidden, -math.inf)

    def _bias_extreme(
        self, highest: bool, factor: int, first: int, last: int, batches: slice, heads: slice, keys: Tensor | None
    ) -> Tensor:
        extreme = self.priors.extreme(highest, factor, first, last)
        extreme = extreme[heads] if len(extreme) > 1 else extreme
        if self.key_ends is not None:
            extreme = extreme + self.key_ends[factor][0 if highest else 1][batches, heads].unsqueeze(2)
        return extreme if keys is None else extreme[..., keys]

    def _bounded_queries(self, lower: Tensor, batches: slice, heads: slice, rows: slice) -> Tensor:
        """``[s q, |s| ‖q‖, -lower]``, ``(b, h, n, D + 2)``: their products with :attr:`Balls.keys` are bounds.

        There are as many as fill whole blocks; the last ones give no bound.
        """
        query = self.query[batches, heads, rows].to(lower.dtype) * self.problem.softmax_scale
        shift = -lower[batches, heads, rows]
        # Infinities would become nan in a product. Nothing known, nothing dropped; nothing seen, nothing lost.
        shift = shift.nan_to_num(nan=UNKNOWN, posinf=UNKNOWN, neginf=-UNKNOWN)
        some = batches if len(self.first) > 1 else slice(None)
        blind = (self.first[some, rows] == self.last[some, rows]).unsqueeze(1)
        shift = shift.masked_fill(blind, -UNKNOWN)
        parts = [query, self.norms[batches, heads, rows].unsqueeze(-1), shift.unsqueeze(-1)]
        queries = torch.cat(parts, dim=-1)
        extra = -queries.shape[2] % min(BLOCK, self.geometry.num_queries)
        if extra:
            queries = pad(queries, (0, 0, 0, extra))
            queries[:, :, -extra:, -1] = -UNKNOWN
        return queries


def _moved_by_a_cast(balls: Balls, dtype: torch.dtype) -> Tensor | None:
    """How far a key may lie from the one that was put in a ball, if that was cast later on; None if none was.

    Autocast is one who casts. The balls of half-precision keys are in float32, as those of float32 ones are, and do
    not tell which they are: both have room for it.

    Args:
        balls: around the blocks of the keys as they were.
        dtype: of the keys as attention has them.

    Returns:
        ``(B, Hkv, blocks)``.
    """
    if dtype == balls.keys.dtype:
        return None
    coarser = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    # Half a unit in the last place; in float32 means are rounded as well, by as much.
    share = coarser.eps if coarser.dtype == "float32" else coarser.eps / 2
    # Numbers close to 0 have a last place of their own.
    smallest = math.sqrt(balls.means.shape[-1]) * coarser.smallest_normal * coarser.eps
    return share * balls.reach + smallest


def select(shares: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
    """Drop as many blocks as the budget allows: those with the smallest shares.

    Args:
        shares: logs of what each block may weigh, ``(..., n)``.
        budget: what they may weigh together, ``(..., 1)`` or a number.

    Returns:
        What is kept, ``(..., n)``, and what the others weigh at most, ``(...)``.
    """
    ascending, order = shares.double().exp().sort(-1)
    total = ascending.cumsum(-1)
    drop = total <= budget
    kept = torch.empty_like(drop).scatter_(-1, order, ~drop)
    return kept, torch.where(drop, total, 0.0).amax(-1)


def _products(query: Tensor, key: Tensor) -> Tensor:
    """``(b, h, n, e)`` for queries ``(b, h, n, D)`` and keys ``(b, hkv, e, D)``."""
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    return (grouped @ key.mT).view(*query.shape[:-1], key.shape[2])


def _products_with(ends: tuple[Tensor, ...], low: Tensor, high: Tensor) -> Tensor:
    """What a factor times a number may be at the ends of both their ranges, ``(4, b, h, query blocks, n)``.

    Args:
        ends: of the factor, ``(b, h, query blocks)`` each.
        low: and
        high: ends of the number, ``(h or 1, query blocks, n)``.
    """
    return torch.stack([end.unsqueeze(-1) * number for end in ends for number in (low, high)])


def _in_blocks(numbers: Tensor, size: int, nothing: float) -> Tensor:
    """``(..., L)`` as ``(..., ⌈L / size⌉, size)``, the last block filled up with ``nothing``."""
    return pad(numbers, (0, -numbers.shape[-1] % size), value=nothing).unflatten(-1, (-1, size))


def _runs_of_heads(peaks: list[int], group: int) -> list[tuple[slice, int]]:
    """Heads with the same peak that can be worked on together: all, or neighbours, or (of shared keys) one by one."""
    if len(set(peaks)) == 1:
        return [(slice(0, len(peaks)), peaks[0])]
    runs: list[tuple[slice, int]] = []
    for head, peak in enumerate(peaks):
        if runs and group == 1 and runs[-1][1] == peak:
            runs[-1] = (slice(runs[-1][0].start, head + 1), peak)
        else:
            runs.append((slice(head, head + 1), peak))
    return runs
