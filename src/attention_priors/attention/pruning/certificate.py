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
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import Geometry, block_length
from attention_priors.attention.pruning.bounds import BLOCK, Balls, product_error
from attention_priors.attention.tiles.block_problem import EVERY, BlockProblem, Content, all_of
from attention_priors.attention.tiles.tiling import Part, Tile

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
    if not may_prune(geometry) or geometry.offset is None or problem.distances.listed is not None:
        return keep_everything(geometry)
    lowest, highest = _visible_distances(problem)
    if lowest > highest:
        return keep_everything(geometry)
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


def _visible_distances(problem: BlockProblem) -> tuple[int, int]:
    """Return the lowest and the highest distance between a query and a key that it sees.

    The lowest is above the highest if no query sees a key. All distances between them are in the table and visible.
    """
    geometry, distances, reach = problem.geometry, problem.distances, problem.tiling.reach
    assert geometry.offset is not None
    lowest = max(geometry.offset - geometry.num_keys + 1, distances.highest - distances.number + 1)
    highest = min(geometry.offset + geometry.num_queries - 1, distances.highest)
    if reach is not None:
        lowest, highest = max(lowest, reach[0]), min(highest, reach[1])
    return max(lowest, 0) if geometry.causal else lowest, highest


class BlockPriors:
    """Extremes and means of the log-prior over pairs of blocks, which depend on how far apart these are.

    The log-prior is read in the order of falling distances, in runs of 256: as keys follow each other, and not a
    number is moved. Of hidden distances (a window's, the future's) none is read.

    Args:
        problem: whose prior, offset and causal mask; some distance must be visible.
        num_query_blocks: of 256 queries.
        num_key_blocks: of 256 keys.
        factor: blocks of 256 keys in a coarse block.
    """

    def __init__(self, problem: BlockProblem, num_query_blocks: int, num_key_blocks: int, factor: int) -> None:
        geometry, distances, table = problem.geometry, problem.distances, problem.table
        assert geometry.offset is not None
        self.num_query_blocks, self.num_key_blocks, self.factor = num_query_blocks, num_key_blocks, factor
        self.rows = min(BLOCK, geometry.num_queries)
        self.highest = geometry.offset + (num_query_blocks - 1) * BLOCK + self.rows - 1
        """The distance of the last query of the last block and the first key."""
        bottom, top = self.visible = _visible_distances(problem)
        if table is None:
            values = torch.zeros(1, top - bottom + 1, dtype=problem.dtype, device=geometry.device)
        else:
            cut = slice(distances.highest - top, distances.highest - bottom + 1)
            values = table.detach()[:, cut].to(problem.dtype)
        self.overlap = 0 if self.rows == 1 else 1
        """One query finds the distances of a block in one run, 256 queries in one run more."""
        # The last coarse block has as many runs as the others, though it may have fewer keys.
        runs = num_query_blocks - 1 + -(-num_key_blocks // factor) * factor + self.overlap
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

    def peaks(self, turned: Tensor) -> list[int]:
        """Return the distance where each head's log-prior is largest or, for heads ``turned (H,)``, lowest."""
        turned = turned.unsqueeze(-1)
        extremes = torch.where(turned, -self._low, self._high) if bool(turned.any()) else self._high
        run = extremes.argmax(-1, keepdim=True)
        values = self._runs.take_along_dim(run.unsqueeze(-1), dim=1).squeeze(1)
        place = run.squeeze(-1) * BLOCK + torch.where(turned, -values, values).argmax(-1)
        # A repeated number stands for the one it repeats.
        return (self.highest - place).clamp(*self.visible).tolist()

    def extreme(self, highest: bool, factor: int, blocks: slice) -> Tensor:
        """Return the highest or lowest log-prior that any query of a block sees at any key of a block.

        Args:
            highest: or lowest.
            factor: keys per block, in units of 256.
            blocks: which blocks of queries.

        Returns:
            ``(H or 1, query blocks, blocks of keys)``; ``-inf`` (``inf``, if lowest) where all pairs are hidden.
        """
        width = factor + self.overlap
        found = self._high.unfold(-1, width, 1).amax(-1) if highest else self._low.unfold(-1, width, 1).amin(-1)
        return found[:, self._first_run(factor, blocks)]

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the smallest and largest of the means over a whole coarse block of keys that queries of a block find.

        Returns:
            Each ``(H or 1, query blocks, blocks of keys)``, and whether there is a mean: not where a key is hidden,
            or so far down that the mean of the others would drown.
        """
        run, low = self._first_run(self.factor, EVERY), self.extreme(False, self.factor, EVERY)
        size = self.factor * BLOCK
        total = pad(self.values.double().clamp(min=LOWEST_MEAN).cumsum(-1), (1, 0))
        mean = ((total[:, size:-1] - total[:, : -size - 1]) / size).unflatten(-1, (-1, BLOCK))
        whole = self._all.unfold(-1, self.factor + 1, 1).all(-1)
        return mean.amin(-1)[:, run], mean.amax(-1)[:, run], whole[run] & (low >= LOWEST_MEAN)

    def _first_run(self, factor: int, blocks: slice) -> Tensor:
        """Return the first run with distances of each pair of blocks, ``(query blocks, blocks of keys)``."""
        behind = torch.arange(self.num_query_blocks - 1, -1, -1, device=self.values.device)[blocks]
        return behind.unsqueeze(-1) + torch.arange(0, self.num_key_blocks, factor, device=behind.device)


class _Search:
    """Bounds for all pairs of blocks of one problem.

    Args:
        content: queries and keys.
        problem: the rest.
        balls: around the blocks of the keys; None to make them.
    """

    def __init__(self, content: Content, problem: BlockProblem, balls: Balls | None) -> None:
        geometry, query, key = problem.geometry, content.queries(all_of), content.key
        self.query, self.key, self.problem, self.geometry = query, key, problem, geometry
        self.group = query.shape[1] // key.shape[1]
        self.moved: Tensor | float = 0.0
        """Distance between a key and the key that its ball was made of, at most, ``(B, H, 1)``."""
        if balls is None:
            balls = Balls.around(key)
        elif (moved := _moved_by_a_cast(balls, key.dtype)) is not None:
            balls = Balls.of(balls.means.to(problem.dtype), (balls.radii + moved).to(problem.dtype))
            self.moved = moved.amax(-1).to(problem.dtype).repeat_interleave(self.group, dim=1).unsqueeze(-1)
        self.num_key_blocks = balls.means.shape[2]
        self.num_query_blocks = -(-geometry.num_queries // BLOCK)
        # A single block of queries, as in decoding, is done with all blocks of keys at once.
        many = self.num_key_blocks if self.num_query_blocks > 1 else 1
        self.factor = 2 ** max(0, math.ceil(math.log2(many / COARSE_BLOCKS)))
        """Blocks of 256 keys in a coarse one."""
        sizes = {1, self.factor}
        self.balls = {size: balls.joined(size, geometry.num_keys) if size > 1 else balls for size in sizes}
        """Balls around blocks of 256 keys and around coarse ones, by factor."""
        self.priors = BlockPriors(problem, self.num_query_blocks, self.num_key_blocks, self.factor)
        self.key_ends = None if problem.key_bias is None else {size: self._ends_of_keys(size) for size in sizes}
        """Lowest, highest and mean number of each block of keys, ``(B, H, blocks)`` each, by factor."""
        self.first, self.last = geometry.slot_range
        self.norms = torch.linalg.vector_norm(query, dim=-1, dtype=problem.dtype) * problem.softmax_scale
        self.error = product_error(query.shape[-1])
        """Relative error of the products of queries and keys in float32."""
        self.scale_ends = None if problem.row_scale is None else _ends_of_blocks(problem.row_scale.detach(), BLOCK)
        """Smallest and largest factor of the log-prior in each block of queries, ``(B, H, query blocks)`` each."""

    def _ends_of_keys(self, factor: int) -> list[Tensor]:
        assert self.problem.key_bias is not None
        numbers, padding = self.problem.key_bias.detach(), self.geometry.key_padding_mask
        numbers = numbers.expand(self.geometry.batch, -1, -1)
        ends = _ends_of_blocks(numbers, factor * BLOCK, None if padding is None else padding.unsqueeze(1))
        mean = _in_blocks(numbers, factor * BLOCK, 0.0).mean(-1)
        return [each.to(self.problem.dtype) for each in (*ends, mean)]

    def run(self, tolerance: float) -> Pruned:
        """Choose the blocks to keep: coarse blocks first, then the blocks of 256 keys within them."""
        width = self.balls[self.factor].keys.shape[2] + self.query.shape[-1]
        step = block_length(self.geometry.batch * self.geometry.heads * BLOCK * width, NUMBERS)
        everything = Part(EVERY, EVERY, EVERY)
        parts = [
            self._shares(everything, slice(first, first + step), self.factor)
            for first in range(0, self.num_query_blocks, step)
        ]
        kept, spent = select(torch.cat(parts, dim=2), tolerance if self.factor == 1 else tolerance / 2)
        if self.factor > 1:
            kept, more = select(self._fine_shares(kept), tolerance - spent.unsqueeze(-1))
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

    @cached_property
    def lower(self) -> Tensor:
        """Lower bound of every query's log-sum-exp, ``(B, H, Lq)``.

        ``-inf`` where nothing is known, and ``inf`` for a query that sees nothing: there is nothing to lose.
        """
        lower = self._near_the_peak()
        if self.geometry.num_queries > 1:
            # Not their sum: they may have keys in common. The bound far away was computed with means of keys, which
            # lie no farther from the true ones than the keys do.
            lower = torch.maximum(lower, self._far_away() - self.norms * self.moved)
        # Dot products in float32 may be wrong by this much, relative to the norms.
        largest = self.balls[1].reach.amax(-1).repeat_interleave(self.group, dim=1).unsqueeze(-1)
        error = self.norms * largest * self.error + (1e-4 + self.error * lower.abs()).nan_to_num(posinf=0.0)
        return (lower - error).masked_fill((self.first == self.last).unsqueeze(1), math.inf)

    def _near_the_peak(self) -> Tensor:
        """Log-sum-exp over the keys near each head's peak, ``(B, H, Lq)``."""
        problem, norms = self.problem, self.norms
        bias_of = problem.bias()
        turned = torch.zeros(self.geometry.heads, dtype=torch.bool, device=norms.device)
        if self.scale_ends is not None:
            # A negative logit scale turns the prior upside down.
            turned = self.scale_ends[0][..., -1].sum(0) < 0
        out = torch.full_like(norms, -math.inf)
        for q_heads, peak in _runs_of_heads(self._peaks(turned), self.group):
            kv_heads = slice(q_heads.start // self.group, (q_heads.stop - 1) // self.group + 1)
            for tile in self._band(peak):
                query = tile.cut_rows(self.query, q_heads).flip(2).to(out.dtype) * problem.softmax_scale
                logits = _products(query, tile.cut_keys(self.key, kv_heads).to(out.dtype))
                centred, constant = bias_of.centred(tile, q_heads)
                bias = centred(tile, q_heads)
                found = (logits if bias is None else logits.add_(bias)).logsumexp(-1)
                if constant is not None:
                    scale = 1.0 if problem.row_scale is None else tile.cut_rows(problem.row_scale, q_heads).flip(2)
                    found = (found + constant * scale).to(out.dtype)
                tile.cut_rows(out, q_heads).copy_(found.flip(2))
        return out

    def _peaks(self, turned: Tensor) -> list[int]:
        """Return the distance where each head's log-prior is best; of one query, key biases included."""
        biases, padding = self.problem.key_bias, self.geometry.key_padding_mask
        if biases is None or self.geometry.num_queries > 1:
            return self.priors.peaks(turned)
        # The first key is the farthest one.
        log_prior = biases.detach().to(self.norms.dtype) + self.priors.values[:, : biases.shape[-1]]
        log_prior = torch.where(turned.unsqueeze(-1), -log_prior, log_prior)
        if padding is not None:
            log_prior = log_prior.masked_fill(padding.unsqueeze(1), -math.inf)
        return (self.priors.highest - log_prior.amax(0).argmax(-1)).tolist()

    def _band(self, peak: int) -> Iterator[Tile]:
        """Tiles of keys about ``peak`` tokens before their queries."""
        assert self.geometry.offset is not None
        ahead = self.geometry.offset - peak
        band = BAND if self.geometry.num_queries > 1 else BAND_OF_ONE_QUERY
        for tile in self.problem.tiling.blocks(BAND_ROWS):
            first, last = max(tile.first, tile.start + ahead - band), min(tile.last, tile.stop + ahead + band)
            if first < last:
                yield tile._replace(first=first, last=last)

    def _far_away(self) -> Tensor:
        """Lower bound of the log-sum-exp over the coarse blocks of which a query's whole block sees every key.

        With ``m_S`` the mean log-prior of block ``S``, and any weights ``w`` that add up to 1, Jensen says once more
        ``ln Σ_S e^{s <q, k̄_S> + m_S} ≥ ln Σ_S e^{m_S} + s <q, Σ_S w_S k̄_S>``, with equality of the first terms for
        ``w_S ∝ e^{m_S}``. So each block of queries needs a single mean key.
        """
        size, padding = self.factor * BLOCK, self.geometry.key_padding_mask
        low, high, fits = self.priors.means()
        if self.key_ends is not None:
            low, high = (numbers + self.key_ends[self.factor][2].unsqueeze(2) for numbers in (low, high))
        bound = low if self.scale_ends is None else products_of_ends(self.scale_ends, low, high).amin(0)
        means = self.balls[self.factor].means
        starts = torch.arange(means.shape[2], device=low.device) * size
        first = _in_blocks(self.first, BLOCK, 0).amax(-1).unsqueeze(-1)
        last = _in_blocks(self.last, BLOCK, self.geometry.num_keys).amin(-1).unsqueeze(-1)
        fits = fits & ((starts >= first) & (starts + size <= last)).unsqueeze(1)
        if padding is not None:
            fits = fits & ~_in_blocks(padding, size, True).any(-1)[:, None, None]
        bound = bound.masked_fill(~fits, -math.inf)
        weights = bound.softmax(-1).nan_to_num(0.0).to(self.norms.dtype)
        keys = _products(weights.expand(*self.norms.shape[:2], -1, -1), means.mT.to(weights.dtype))
        total = bound.logsumexp(-1, keepdim=True).to(weights.dtype)
        bounds = [
            (queries.to(key.dtype) @ key.unsqueeze(-1)).squeeze(-1) * self.problem.softmax_scale + constant
            for queries, key, constant in zip(self.query.split(BLOCK, 2), keys.unbind(2), total.unbind(2), strict=True)
        ]
        return torch.cat(bounds, dim=2) + math.log(size)

    # ---- from above

    def _fine_shares(self, kept: Tensor) -> Tensor:
        """:meth:`_shares` of blocks of 256 keys within the coarse blocks that are kept; ``-inf`` elsewhere."""
        kept = kept.repeat_interleave(self.factor, dim=-1)[..., : self.num_key_blocks]
        shares = torch.full(kept.shape, -math.inf, dtype=self.lower.dtype, device=kept.device)
        for start in range(0, self.num_query_blocks, TOGETHER):
            blocks = slice(start, start + TOGETHER)
            wanted = kept[:, :, blocks].any(2)
            for batch, head in wanted.any(-1).nonzero().tolist():
                kv_head, keys = head // self.group, wanted[batch, head].nonzero().flatten()
                part = Part(slice(batch, batch + 1), slice(head, head + 1), slice(kv_head, kv_head + 1))
                shares[batch, head, blocks, keys] = self._shares(part, blocks, 1, keys)[0, 0]
        return shares.masked_fill(~kept, -math.inf)

    def _shares(self, part: Part, blocks: slice, factor: int, keys: Tensor | slice = EVERY) -> Tensor:
        """Return the log of the share of weight that any query of a block may give to a block of keys.

        Args:
            part: texts and heads.
            blocks: which blocks of queries.
            factor: keys per block, in units of 256.
            keys: which blocks of keys, ``(n,)``.

        Returns:
            ``(b, h, query blocks, n)``.
        """
        queries = self._bounded_queries(part, slice(blocks.start * BLOCK, blocks.stop * BLOCK))
        products = _products(queries, part.of_keys(self.balls[factor].keys)[:, :, keys])
        largest = products.unflatten(2, (-1, self.priors.rows)).amax(-2)
        high = self._bias_extreme(True, part, blocks, factor, keys)
        hidden = torch.isneginf(high)
        if self.scale_ends is not None:
            low = self._bias_extreme(False, part, blocks, factor, keys)
            ends = [end[part.batches, part.heads, blocks] for end in self.scale_ends]
            high = products_of_ends(ends, low, high).amax(0)
        shares = largest + high + self.error * high.abs() + math.log(factor * BLOCK)
        # No key, no weight, whatever else is (not) known.
        return shares.masked_fill(hidden, -math.inf)

    def _bias_extreme(self, highest: bool, part: Part, blocks: slice, factor: int, keys: Tensor | slice) -> Tensor:
        extreme = self.priors.extreme(highest, factor, blocks)
        extreme = extreme[part.heads] if len(extreme) > 1 else extreme
        if self.key_ends is not None:
            extreme = extreme + self.key_ends[factor][int(highest)][part.batches, part.heads].unsqueeze(2)
        return extreme[..., keys]

    def _bounded_queries(self, part: Part, rows: slice) -> Tensor:
        """Return ``[s q, |s| ‖q‖, -lower]``, ``(b, h, n, D + 2)``: their products with :attr:`Balls.keys` are bounds.

        The last query is repeated to fill its block.
        """
        here = (part.batches, part.heads, rows)
        query = self.query[here].to(self.lower.dtype) * self.problem.softmax_scale
        # Infinities would become nan in a product. Nothing known, nothing dropped; nothing seen, nothing lost.
        shift = (-self.lower[here]).nan_to_num(nan=UNKNOWN, posinf=UNKNOWN, neginf=-UNKNOWN)
        queries = torch.cat([query, self.norms[here].unsqueeze(-1), shift.unsqueeze(-1)], dim=-1)
        extra = -queries.shape[2] % self.priors.rows
        return pad(queries, (0, 0, 0, extra), mode="replicate") if extra else queries


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


def select(shares: Tensor, budget: Tensor | float) -> tuple[Tensor, Tensor]:
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


def products_of_ends(scale: Sequence[Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return the products of a scale and a number at the ends of both their ranges, ``(4, ..., blocks, n)``.

    Args:
        scale: smallest and largest scale, ``(..., blocks)`` each.
        low: smallest numbers, ``(..., blocks, n)``.
        high: largest numbers, ``(..., blocks, n)``.
    """
    return torch.stack([end.unsqueeze(-1) * number for end in scale for number in (low, high)])


def _in_blocks(numbers: Tensor, size: int, nothing: float) -> Tensor:
    """``(..., L)`` as ``(..., ⌈L / size⌉, size)``, the last block filled up with ``nothing``."""
    return pad(numbers, (0, -numbers.shape[-1] % size), value=nothing).unflatten(-1, (-1, size))


def _ends_of_blocks(numbers: Tensor, size: int, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest number of each block that is not hidden, ``(..., blocks)``.

    A block whose numbers are all hidden has ``inf`` and ``-inf``.
    """
    low, high = numbers, numbers
    if hidden is not None:
        low, high = numbers.masked_fill(hidden, math.inf), numbers.masked_fill(hidden, -math.inf)
    return _in_blocks(low, size, math.inf).amin(-1), _in_blocks(high, size, -math.inf).amax(-1)


def _runs_of_heads(peaks: list[int], group: int) -> list[tuple[slice, int]]:
    """Heads with the same peak that can be worked on together: all, or neighbours, or (of shared keys) one by one."""
    alone = group > 1 and len(set(peaks)) > 1
    starts = [head for head, peak in enumerate(peaks) if alone or head == 0 or peak != peaks[head - 1]]
    return [(slice(start, stop), peaks[start]) for start, stop in pairwise([*starts, len(peaks)])]
