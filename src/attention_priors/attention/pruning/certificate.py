"""Certified pruning: blocks of keys that a block of queries can skip.

Softmax gives a set of keys the share ``Σ_set e^z / Σ_all e^z`` of a query's weight. Both sums have bounds that need no
logits. Let ``J`` be a block of keys with mean ``k̄`` and radius ``r`` (:class:`Balls`). Query ``i`` has content scale
``s`` (logit scale included) and log-prior ``b``. Then

    ``ln Σ_{j∈J} e^{z_ij}  ≤  s <q_i, k̄> + |s| ‖q_i‖ r + max_{j∈J} b_ij + ln |J|``     (Cauchy-Schwarz).
    ``ln Σ_{j∈J} e^{z_ij}  ≥  s <q_i, k̄> + mean_{j∈J} b_ij + ln |J|``                (Jensen).

The second bound holds for blocks that the query sees whole. Near the peak of the prior, the sum is computed directly.
The largest set of blocks whose bounds add up to at most the tolerance is dropped. No query loses a larger share of its
weight than the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import Geometry, block_length
from attention_priors.attention.pruning.band import Band
from attention_priors.attention.pruning.bounds import BLOCK, Balls, in_blocks, product_error, products
from attention_priors.attention.tiles.block_problem import EVERY, BlockProblem, Content, all_of
from attention_priors.attention.tiles.tiling import Part

COARSE_BLOCKS = 64
"""Approximate number of coarse blocks in the first step of the search."""
COARSE_BLOCKS_ON_CUDA = 1024
"""``COARSE_BLOCKS`` on GPUs. Their time is the number of kernels: bounds of many blocks are cheaper than two steps."""
TOGETHER = 16
"""Blocks of queries per computation of fine bounds."""
NUMBERS = 2**20
"""Numbers per working buffer."""
NUMBERS_ON_CUDA = 2**26
"""``NUMBERS`` on GPUs: 256 MiB in float32."""
WEIGHTLESS = 2.0**-64
"""Share of its weight that a query may lose with a tolerance of 0: far below the rounding errors of float64 (2^-53)."""
MOST_PAIRS = 2**36
"""Number of query-key pairs (262144 tokens) up to which a tolerance of 0 skips keys. Beyond, the search takes about as
much memory as the queries."""
WORTH_PRUNING = 0.8
"""Largest share of kept blocks at which a head is pruned. Above, large tiles over all blocks are faster."""
FEWEST_KEYS = 3 * 2**10
"""Number of keys above which pruning takes less time than it saves, on CPUs."""
FEWEST_KEYS_ON_CUDA = 2**19
"""``FEWEST_KEYS`` on GPUs, where a search in many small kernels took longer than attention without pruning."""
FEWEST_QUERIES = 32
"""Number of queries below which attention takes as long as reading the keys. Pruning must then not read them all."""
FEWEST_CACHED_KEYS = 2**14
"""``FEWEST_KEYS`` for fewer than ``FEWEST_QUERIES`` queries."""
LOWEST_MEAN = -1e6
"""Lowest log-prior, in nats, that enters a mean."""
UNKNOWN = 1e30
"""Stand-in for an infinity, in nats."""


class Pruned(NamedTuple):
    """Kept blocks, and a bound on the weight of the dropped blocks."""

    kept: Tensor
    """Blocks of keys that each block of queries reads, boolean, ``(B, H, ⌈Lq / 256⌉, ⌈Lk / 256⌉)``."""
    dropped: Tensor
    """Largest share of its weight that a query of the block may lose, float64, ``(B, H, ⌈Lq / 256⌉)``."""


def prune(content: Content, problem: BlockProblem, tolerance: float, balls: Balls | None) -> Pruned:
    """Choose the blocks to keep so that no query loses more than ``tolerance`` of its weight.

    All blocks are kept for positions with gaps, for dense masks, and for heads with little to gain.

    Args:
        content: Queries and keys.
        problem: All other inputs of attention.
        tolerance: Share of its weight that a query may lose, in (0, 1).
        balls: Balls around the blocks of keys, or None to compute them.
    """
    geometry = problem.geometry
    if geometry.attn_mask is not None or geometry.offset is None or problem.distances.listed is not None:
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
    """Return a result that keeps every block."""
    size = (geometry.batch, geometry.heads, -(-geometry.num_queries // BLOCK), -(-geometry.num_keys // BLOCK))
    return Pruned(
        torch.ones(size, dtype=torch.bool, device=geometry.device),
        torch.zeros(size[:3], dtype=torch.float64, device=geometry.device),
    )


def why_not_prune(geometry: Geometry, *, bounded: bool, exact: bool) -> str | None:
    """Return why attention does not prune; None if it does.

    Args:
        geometry: Positions and masks.
        bounded: Whether the caller has bounds of the keys.
        exact: Whether the tolerance is 0.
    """
    if exact and geometry.num_queries < BLOCK:
        return f"with a tolerance of 0, it needs {BLOCK} queries"
    if exact and geometry.num_queries * geometry.num_keys > MOST_PAIRS:
        return "with a tolerance of 0, it would take too much memory"
    if geometry.attn_mask is not None:
        return "an attn_mask may hide any key"
    few = geometry.num_queries < FEWEST_QUERIES
    if few and not bounded:
        return f"with fewer than {FEWEST_QUERIES} queries, it needs key_bounds"
    fewest = FEWEST_CACHED_KEYS if few else FEWEST_KEYS
    fewest = FEWEST_KEYS_ON_CUDA if geometry.device.type == "cuda" else fewest
    if geometry.num_keys <= fewest:
        return f"up to {fewest} keys, it would take more time than it saves"
    return None


def _visible_distances(problem: BlockProblem) -> tuple[int, int]:
    """Return the lowest and the highest visible distance between a query and a key.

    The lowest is above the highest if no query sees a key. The table holds all distances between them, all visible.
    """
    geometry, distances, reach = problem.geometry, problem.distances, problem.tiling.reach
    assert geometry.offset is not None
    lowest = max(geometry.offset - geometry.num_keys + 1, distances.highest - distances.number + 1)
    highest = min(geometry.offset + geometry.num_queries - 1, distances.highest)
    if reach is not None:
        lowest, highest = max(lowest, reach[0]), min(highest, reach[1])
    return max(lowest, 0) if geometry.causal else lowest, highest


class BlockPriors:
    """Extremes and means of the log-prior over pairs of blocks, which depend on the blocks' distance.

    The log-prior is read at falling distances, in runs of 256. This order follows the keys, so no number is moved.
    Hidden distances (outside a window, or in the future) are not read.

    Args:
        problem: Problem with the prior, the offset and the causal mask. At least one distance must be visible.
        num_query_blocks: Number of blocks of 256 queries.
        num_key_blocks: Number of blocks of 256 keys.
        factor: Number of blocks of 256 keys in a coarse block.
    """

    def __init__(self, problem: BlockProblem, num_query_blocks: int, num_key_blocks: int, factor: int) -> None:
        geometry, distances, table = problem.geometry, problem.distances, problem.table
        assert geometry.offset is not None
        self.num_query_blocks, self.num_key_blocks, self.factor = num_query_blocks, num_key_blocks, factor
        self.rows = min(BLOCK, geometry.num_queries)
        self.highest = geometry.offset + (num_query_blocks - 1) * BLOCK + self.rows - 1
        """Distance between the last query of the last block and the first key."""
        bottom, top = self.visible = _visible_distances(problem)
        cut = slice(distances.highest - top, distances.highest - bottom + 1)
        if table is None:
            values = torch.zeros(1, top - bottom + 1, dtype=problem.dtype, device=geometry.device)
        else:
            values = table.detach()[:, cut].to(problem.dtype)
        self.overlap = 0 if self.rows == 1 else 1
        """Additional runs that hold a block's distances: 0 for one query, 1 for 256 queries."""
        # The last coarse block has as many runs as the other blocks, but may have fewer keys.
        runs = num_query_blocks - 1 + -(-num_key_blocks // factor) * factor + self.overlap
        # Padding repeats the outermost number, so that padding adds no new extreme.
        beyond = (self.highest - top, runs * BLOCK - (self.highest - bottom + 1))
        self.values = pad(values.unsqueeze(0), beyond, mode="replicate")[0] if max(beyond) > 0 else values
        """Log-prior at falling distances, ``(H or 1, 256 runs)``."""
        seen = torch.ones_like(values[0], dtype=torch.bool) if problem.inside is None else problem.inside[cut]
        seen = pad(seen, beyond, value=False).unflatten(-1, (-1, BLOCK))
        self._none, self._all = ~seen.any(-1), seen.all(-1)

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
        """Return the distance of each head's largest log-prior or, for heads ``turned (H,)``, of the lowest."""
        turned = turned.unsqueeze(-1)
        extremes = torch.where(turned, -self._low, self._high) if bool(turned.any()) else self._high
        run = extremes.argmax(-1, keepdim=True)
        values = self._runs.take_along_dim(run.unsqueeze(-1), dim=1).squeeze(1)
        place = run.squeeze(-1) * BLOCK + torch.where(turned, -values, values).argmax(-1)
        # Padding repeats a visible number, so a peak in padding moves to the nearest visible distance.
        return (self.highest - place).clamp(*self.visible).tolist()

    def extreme(self, highest: bool, factor: int, blocks: slice) -> Tensor:
        """Return the highest or lowest log-prior over the visible pairs of two blocks.

        Args:
            highest: Whether to return the highest log-prior instead of the lowest.
            factor: Keys per block, in units of 256.
            blocks: Blocks of queries.

        Returns:
            ``(H or 1, query blocks, blocks of keys)``. If all pairs are hidden, ``-inf`` (highest) or ``inf`` (lowest).
        """
        width = factor + self.overlap
        found = self._high.unfold(-1, width, 1).amax(-1) if highest else self._low.unfold(-1, width, 1).amin(-1)
        return found[:, self._first_run(factor, blocks)]

    def hidden(self, factor: int, blocks: slice) -> Tensor:
        """Return whether all pairs of two blocks are hidden, ``(query blocks, blocks of keys)``."""
        return self._none.unfold(-1, factor + self.overlap, 1).all(-1)[self._first_run(factor, blocks)]

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the smallest and largest mean log-prior over a coarse block of keys, among the queries of a block.

        Returns:
            Smallest means, largest means, and whether the means are valid, each
            ``(H or 1, query blocks, blocks of keys)``. A mean is not valid if a key is hidden, or if a log-prior below
            ``LOWEST_MEAN`` would swamp the other values.
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
        content: Queries and keys.
        problem: All other inputs of attention.
        balls: Balls around the blocks of keys, or None to compute them.
    """

    def __init__(self, content: Content, problem: BlockProblem, balls: Balls | None) -> None:
        geometry, query, key = problem.geometry, content.queries(all_of), content.key
        self.query, self.key, self.problem, self.geometry = query, key, problem, geometry
        self.group = query.shape[1] // key.shape[1]
        self.moved: Tensor | float = 0.0
        """Largest distance that a cast moved a key from the key in its ball, ``(B, H, 1)``."""
        if balls is None:
            balls = Balls.around(key)
        elif (moved := _moved_by_a_cast(balls, key.dtype)) is not None:
            balls = Balls.of(balls.means.to(problem.dtype), (balls.radii + moved).to(problem.dtype))
            self.moved = moved.amax(-1).to(problem.dtype).repeat_interleave(self.group, dim=1).unsqueeze(-1)
        self.num_key_blocks = balls.means.shape[2]
        self.num_query_blocks = -(-geometry.num_queries // BLOCK)
        cuda = geometry.device.type == "cuda"
        self.numbers = NUMBERS_ON_CUDA if cuda else NUMBERS
        # A single block of queries, as in decoding, takes all blocks of keys at once.
        many = self.num_key_blocks if self.num_query_blocks > 1 else 1
        self.factor = 2 ** max(0, math.ceil(math.log2(many / (COARSE_BLOCKS_ON_CUDA if cuda else COARSE_BLOCKS))))
        """Number of blocks of 256 keys in a coarse block."""
        sizes = {1, self.factor}
        self.balls = {size: balls.joined(size, geometry.num_keys) if size > 1 else balls for size in sizes}
        """Balls around blocks of 256 keys and around coarse blocks, by factor."""
        self.priors = BlockPriors(problem, self.num_query_blocks, self.num_key_blocks, self.factor)
        self.key_ends = None if problem.key_bias is None else {size: self._ends_of_keys(size) for size in sizes}
        """Lowest, highest and mean key bias of each block of keys, ``(B, H, blocks)`` each, by factor."""
        self.first, self.last = geometry.slot_range
        self.norms = torch.linalg.vector_norm(query, dim=-1, dtype=problem.dtype) * problem.softmax_scale
        self.error = product_error(query.shape[-1])
        """Relative error of float32 products of queries and keys."""
        self.scale_ends = None if problem.row_scale is None else _ends_of_blocks(problem.row_scale.detach(), BLOCK)
        """Smallest and largest factor of the log-prior in each block of queries, ``(B, H, query blocks)`` each."""

    def _ends_of_keys(self, factor: int) -> list[Tensor]:
        assert self.problem.key_bias is not None
        numbers, padding = self.problem.key_bias.detach(), self.geometry.key_padding_mask
        numbers = numbers.expand(self.geometry.batch, -1, -1)
        ends = _ends_of_blocks(numbers, factor * BLOCK, None if padding is None else padding.unsqueeze(1))
        mean = in_blocks(numbers, factor * BLOCK, 0.0).mean(-1)
        return [each.to(self.problem.dtype) for each in (*ends, mean)]

    def run(self, tolerance: float) -> Pruned:
        """Choose the blocks to keep: coarse blocks first, then the blocks of 256 keys within them."""
        width = self.balls[self.factor].keys.shape[2] + self.query.shape[-1]
        step = block_length(self.geometry.batch * self.geometry.heads * BLOCK * width, self.numbers)
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
            # All other invisible blocks have weight 0 because of their distance.
            kept &= self.visible_blocks()
        return Pruned(kept, spent)

    def visible_blocks(self) -> Tensor:
        """Return which blocks of keys each block of queries sees, ``(B or 1, 1, query blocks, key blocks)``."""
        number = self.geometry.num_keys
        seen = self.first < self.last
        first = in_blocks(self.first.masked_fill(~seen, number), BLOCK, number).amin(-1).unsqueeze(-1)
        last = in_blocks(self.last.masked_fill(~seen, 0), BLOCK, 0).amax(-1).unsqueeze(-1)
        starts = torch.arange(self.num_key_blocks, device=self.first.device) * BLOCK
        return ((starts < last) & (starts + BLOCK > first)).unsqueeze(1)

    # ---- lower bounds

    @cached_property
    def lower(self) -> Tensor:
        """Lower bound of every query's log-sum-exp, ``(B, H, Lq)``.

        ``-inf`` means no bound. ``inf`` marks a query that sees no key and therefore can lose no weight.
        """
        lower = self._near_the_peak()
        if self.geometry.num_queries > 1:
            # The two bounds may share keys, so they are not added. The far bound uses means of keys. A cast moves
            # a mean no farther than it moves the keys.
            lower = torch.maximum(lower, self._far_away() - self.norms * self.moved)
        # Rounding of float32 dot products, relative to the norms.
        largest = self.balls[1].reach.amax(-1).repeat_interleave(self.group, dim=1).unsqueeze(-1)
        error = self.norms * largest * self.error + (1e-4 + self.error * lower.abs()).nan_to_num(posinf=0.0)
        return (lower - error).masked_fill((self.first == self.last).unsqueeze(1), math.inf)

    def _near_the_peak(self) -> Tensor:
        """Return the log-sum-exp over the keys near each head's peak, ``(B, H, Lq)``."""
        num_queries = self.geometry.num_queries
        turned = torch.zeros(self.geometry.heads, dtype=torch.bool, device=self.norms.device)
        if self.scale_ends is not None:
            # A negative logit scale turns the prior upside down.
            turned = self.scale_ends[0][..., -1].sum(0) < 0
        heads = []
        for q_heads, peak in _runs_of_heads(self._peaks(turned), self.group):
            band = Band(self.query, self.key, self.problem, q_heads, peak)
            step = block_length(band.size, self.numbers) * band.rows
            ranges = [slice(start, min(start + step, num_queries)) for start in range(0, num_queries, step)]
            heads.append(torch.cat([band.lower_bounds(queries) for queries in ranges], dim=2))
        return torch.cat(heads, dim=1)

    def _peaks(self, turned: Tensor) -> list[int]:
        """Return the distance of each head's best log-prior; for a single query, key biases count too."""
        biases, padding = self.problem.key_bias, self.geometry.key_padding_mask
        if biases is None or self.geometry.num_queries > 1:
            return self.priors.peaks(turned)
        # The first key is the farthest one.
        log_prior = biases.detach().to(self.norms.dtype) + self.priors.values[:, : biases.shape[-1]]
        log_prior = torch.where(turned.unsqueeze(-1), -log_prior, log_prior)
        if padding is not None:
            log_prior = log_prior.masked_fill(padding.unsqueeze(1), -math.inf)
        return (self.priors.highest - log_prior.amax(0).argmax(-1)).tolist()

    def _far_away(self) -> Tensor:
        """Return a lower bound of the log-sum-exp over coarse blocks that a whole block of queries sees.

        Let ``m_S`` be the mean log-prior of block ``S``, and ``w_S ∝ e^{m_S}`` weights that add up to 1. By Jensen,
        ``ln Σ_S e^{s <q, k̄_S> + m_S} ≥ ln Σ_S e^{m_S} + s <q, Σ_S w_S k̄_S>``. Each block of queries therefore needs
        a single mean key.
        """
        size, padding = self.factor * BLOCK, self.geometry.key_padding_mask
        low, high, fits = self.priors.means()
        if self.key_ends is not None:
            low, high = (numbers + self.key_ends[self.factor][2].unsqueeze(2) for numbers in (low, high))
        bound = low if self.scale_ends is None else products_of_ends(self.scale_ends, low, high).amin(0)
        means = self.balls[self.factor].means
        starts = torch.arange(means.shape[2], device=low.device) * size
        first = in_blocks(self.first, BLOCK, 0).amax(-1).unsqueeze(-1)
        last = in_blocks(self.last, BLOCK, self.geometry.num_keys).amin(-1).unsqueeze(-1)
        fits = fits & ((starts >= first) & (starts + size <= last)).unsqueeze(1)
        if padding is not None:
            fits = fits & ~in_blocks(padding, size, True).any(-1)[:, None, None]
        bound = bound.masked_fill(~fits, -math.inf)
        weights = bound.softmax(-1).nan_to_num(0.0).to(self.norms.dtype)
        keys = products(weights.expand(*self.norms.shape[:2], -1, -1), means.mT.to(weights.dtype))
        total = bound.logsumexp(-1, keepdim=True).to(weights.dtype)
        step, bounds = block_length(self.query[:, :, :BLOCK].numel(), self.numbers), []
        for queries, key, constant in zip(
            self.query.split(step * BLOCK, 2), keys.split(step, 2), total.split(step, 2), strict=True
        ):
            query = in_blocks(queries.mT, BLOCK, 0.0).movedim(2, -1).to(key.dtype)
            found = (query @ key.unsqueeze(-1)).squeeze(-1) * self.problem.softmax_scale + constant
            bounds.append(found.flatten(2)[:, :, : queries.shape[2]])
        return torch.cat(bounds, dim=2) + math.log(size)

    # ---- upper bounds

    def _fine_shares(self, kept: Tensor) -> Tensor:
        """Return :meth:`_shares` of the blocks of 256 keys in kept coarse blocks; ``-inf`` elsewhere."""
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
        """Return the log of the largest share of weight that a query of a block may give to a block of keys.

        Args:
            part: Rows of the batch, and heads.
            blocks: Blocks of queries.
            factor: Keys per block, in units of 256.
            keys: Indices of blocks of keys, ``(n,)``, or a slice.

        Returns:
            ``(b, h, query blocks, n)``.
        """
        queries = self._bounded_queries(part, slice(blocks.start * BLOCK, blocks.stop * BLOCK))
        scores = products(queries, part.of_keys(self.balls[factor].keys)[:, :, keys])
        largest = scores.unflatten(2, (-1, self.priors.rows)).amax(-2)
        high = self._bias_extreme(True, part, blocks, factor, keys)
        if self.scale_ends is not None:
            low = self._bias_extreme(False, part, blocks, factor, keys)
            ends = [end[part.batches, part.heads, blocks] for end in self.scale_ends]
            high = products_of_ends(ends, low, high).amax(0)
        # A query without a lower bound keeps every key that it sees, however low the log-priors.
        high = high.clamp(min=-UNKNOWN / 4)
        shares = largest + high + self.error * high.abs() + math.log(factor * BLOCK)
        # A block without a visible key has no weight, even where another bound is infinite or NaN.
        hidden = self.priors.hidden(factor, blocks)
        if self.key_ends is not None:
            lowest, highest = (ends[part.batches, part.heads] for ends in self.key_ends[factor][:2])
            hidden = hidden | (lowest > highest).unsqueeze(2)  # without a visible key
        return shares.masked_fill(hidden[..., keys], -math.inf)

    def _bias_extreme(self, highest: bool, part: Part, blocks: slice, factor: int, keys: Tensor | slice) -> Tensor:
        extreme = self.priors.extreme(highest, factor, blocks)
        extreme = extreme[part.heads] if len(extreme) > 1 else extreme
        if self.key_ends is not None:
            extreme = extreme + self.key_ends[factor][int(highest)][part.batches, part.heads].unsqueeze(2)
        return extreme[..., keys]

    def _bounded_queries(self, part: Part, rows: slice) -> Tensor:
        """Return ``[s q, |s| ‖q‖, -lower]``, ``(b, h, n, D + 2)``, whose products with :attr:`Balls.keys` are bounds.

        Copies of the last query fill its block.
        """
        here = (part.batches, part.heads, rows)
        query = self.query[here].to(self.lower.dtype) * self.problem.softmax_scale
        # Infinities would become NaN in a product. Without a bound nothing is dropped; a blind query loses nothing.
        shift = (-self.lower[here]).nan_to_num(nan=UNKNOWN, posinf=UNKNOWN, neginf=-UNKNOWN)
        queries = torch.cat([query, self.norms[here].unsqueeze(-1), shift.unsqueeze(-1)], dim=-1)
        extra = -queries.shape[2] % self.priors.rows
        return pad(queries, (0, 0, 0, extra), mode="replicate") if extra else queries


def _moved_by_a_cast(balls: Balls, dtype: torch.dtype) -> Tensor | None:
    """Return the largest distance that a later cast moved a key from the key in its ball, or None without a cast.

    Autocast is a common cause. Balls are float32 for half-precision and for float32 keys, and do not record the dtype
    of the keys. The result allows for both.

    Args:
        balls: Balls around the blocks of the original keys.
        dtype: Dtype of the keys in attention.

    Returns:
        Distance per block, ``(B, Hkv, blocks)``, or None.
    """
    if dtype == balls.keys.dtype:
        return None
    coarser = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    # Half a unit in the last place. In float32, means are rounded by the same amount again.
    share = coarser.eps if coarser.dtype == "float32" else coarser.eps / 2
    # Subnormal numbers have a constant last place.
    smallest = math.sqrt(balls.means.shape[-1]) * coarser.smallest_normal * coarser.eps
    return share * balls.reach + smallest


def select(shares: Tensor, budget: Tensor | float) -> tuple[Tensor, Tensor]:
    """Drop the blocks with the smallest shares, as many as the budget allows.

    Args:
        shares: Log of the largest share of each block, ``(..., n)``.
        budget: Largest total share of the dropped blocks, ``(..., 1)`` or a number.

    Returns:
        Whether each block is kept, ``(..., n)``, and a bound on the total share of the dropped blocks, ``(...)``.
    """
    ascending, order = shares.double().exp().sort(-1)
    total = ascending.cumsum(-1)
    drop = total <= budget
    kept = torch.empty_like(drop).scatter_(-1, order, ~drop)
    return kept, torch.where(drop, total, 0.0).amax(-1)


def products_of_ends(scale: Sequence[Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return the products of a scale and a number at the ends of their ranges, ``(4, ..., blocks, n)``.

    Args:
        scale: Smallest and largest scale, ``(..., blocks)`` each.
        low: Smallest numbers, ``(..., blocks, n)``.
        high: Largest numbers, ``(..., blocks, n)``.
    """
    return torch.stack([end.unsqueeze(-1) * number for end in scale for number in (low, high)])


def _ends_of_blocks(numbers: Tensor, size: int, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest visible number of each block, ``(..., blocks)`` each.

    A block with only hidden numbers gets ``inf`` and ``-inf``.
    """
    low, high = numbers, numbers
    if hidden is not None:
        low, high = numbers.masked_fill(hidden, math.inf), numbers.masked_fill(hidden, -math.inf)
    return in_blocks(low, size, math.inf).amin(-1), in_blocks(high, size, -math.inf).amax(-1)


def _runs_of_heads(peaks: list[int], group: int) -> list[tuple[slice, int]]:
    """Group neighbouring heads with equal peaks; if heads share keys but not one peak, each head is alone."""
    alone = group > 1 and len(set(peaks)) > 1
    starts = [head for head, peak in enumerate(peaks) if alone or head == 0 or peak != peaks[head - 1]]
    return [(slice(start, stop), peaks[start]) for start, stop in pairwise([*starts, len(peaks)])]
