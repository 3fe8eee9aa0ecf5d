"""Attention in tiles, forward and backward, in linear memory: no bias matrix.

Each tile is one plain attention call whose bias is a view of a table, where that is possible (``bias.py``); the
results of tiles over different keys are merged by their log-sum-exps. The backward pass recomputes the
weights of each tile from the log-sum-exp; the table's gradient is the sum of the logits' gradient along its
diagonals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.content import Content, all_of
from attention_priors.attention.geometry import Geometry, block_length
from attention_priors.attention.pruning.bounds import BLOCK
from attention_priors.attention.pruning.kept_tiles import KeptTile, kept_tiles, whole_heads
from attention_priors.attention.tiles.bias import Bias, Distances, Scratch
from attention_priors.attention.tiles.tiling import Tile, Tiling
from attention_priors.precision import compute_dtype_of

ROWS = 1024
"""Queries per block of the forward pass: the CPU's kernel is at its best from 768 on."""
DIAGONAL_ROWS = 128
"""Queries per tile beside the causal diagonal: smaller ones waste less on keys nobody sees."""
KEYS_IN_MEMORY = 512
"""Keys per tile of the forward pass where the bias is in memory."""
BIAS_NUMBERS = 2**20
"""Numbers that such a bias may take: 4 MiB in float32."""
FEW_QUERIES = 32
"""Queries up to which the product of the lanes is computed apart: to lengthen all keys would be more work."""
BACKWARD_ROWS = 256
BACKWARD_KEYS = 512
BUFFER_NUMBERS = 2**19
"""Numbers per working buffer of the backward pass: 2 MiB in float32."""
LARGEST_STORED_LSE = 40.0
"""Log-sum-exp, in nats, up to which weights are recomputed as ``exp(logit - lse)``.

A float32 of size ``z`` is wrong by up to ``z · 2^-24``, and so is the weight. Beyond, a block's softmax is
computed anew: then the gradient of a row that sees one key is exactly 0 even where the log-prior and its
derivative are as large as 1e30.
"""
NATS_PER_BIT = math.log(2)


@dataclass(frozen=True)
class BlockProblem:
    """What the computation needs to know beside queries, keys and values."""

    geometry: Geometry
    distances: Distances
    table: Tensor | None
    """The log-prior of each distance, finite, ``(H, N)``; None for none."""
    inside: Tensor | None
    """``(N,)``: whether the prior lets a query see that distance (a window); None if all."""
    row_scale: Tensor | None
    """What multiplies the log-prior, per query, ``(B, H, Lq)``; None for nothing."""
    softmax_scale: float
    dtype: torch.dtype
    """Of biases, logits and log-sum-exps."""
    kept: Tensor | None = None
    """Which blocks of keys each block of queries looks at (``pruning/kept_tiles.py``); None for all."""

    @cached_property
    def tiling(self) -> Tiling:
        """How it is cut."""
        reach = None
        if self.inside is not None:
            seen = self.distances.values()[self.inside]
            reach = (int(seen.min()), int(seen.max())) if len(seen) else (0, -1)
        return Tiling.of(self.geometry, reach)

    def bias(self, unit: float = 1.0, lanes: tuple[Tensor, Tensor] | None = None) -> Bias:
        """Its biases; a nat is the number ``unit``. ``lanes`` as for :class:`Bias`."""
        return Bias(self.tiling, self.distances, self.table, self.inside, self.row_scale, self.dtype, unit, lanes)


# ---- forward


def forward(content: Content, problem: BlockProblem) -> tuple[Tensor, Tensor]:
    """Output ``(B, H, Lq, Dv)`` in the content's dtype, and log-sum-exp ``(B, H, Lq)``."""
    query, lanes, dtype = content.query, None, content.dtype
    if content.lane_query is not None and content.lane_key is not None and query.shape[2] <= FEW_QUERIES:
        lanes = content.lane_query, content.lane_key
        content = content.without_lanes()
    width, value_width = content.width, content.value.shape[-1]
    if not is_one_on_cpu(query):
        # The CPU's kernel wants one width for queries, keys and values.
        width = value_width = max(width, value_width)
    key, value = content.keys(all_of, width), content.values(all_of, value_width)
    queries = partial(content.queries, width=width)
    bias_of = problem.bias(lanes=lanes)
    if (
        query.shape[2] == 1
        and problem.kept is None
        and (found := _attend_at_once(content, key, value, problem, bias_of))
    ):
        return found.out[..., : content.value.shape[-1]].to(dtype).contiguous(), found.lse
    if problem.kept is None:
        out = query.new_empty(*query.shape[:-1], value_width, dtype=dtype)
    else:  # tiles add up in it
        out = torch.zeros(*query.shape[:-1], value_width, dtype=problem.dtype, device=query.device)
    lse = torch.full(query.shape[:-1], -math.inf, dtype=problem.dtype, device=query.device)
    merged = _Found(out, lse)
    whole = range(query.shape[1]) if problem.kept is None else whole_heads(problem.kept)
    if whole:
        _attend_whole_heads(queries, key, value, problem, bias_of, whole, merged)
    if problem.kept is not None:
        _attend_kept_tiles(queries, key, value, problem, bias_of, merged)
    return out[..., : content.value.shape[-1]].to(dtype).contiguous(), lse


def _attend_at_once(
    content: Content, key: Tensor, value: Tensor, problem: BlockProblem, bias_of: Bias
) -> _Found | None:
    """One query per text, as in decoding, without a word about tiles; None if there are several."""
    segments = problem.tiling.segments
    heads = slice(0, content.query.shape[1])
    if len(segments) > 1 or (bias_of.in_memory and len(key) * heads.stop * key.shape[2] > BIAS_NUMBERS):
        return None
    first, last = problem.tiling.keys_of(segments[0], 0, 1)
    tile = segments[0]._replace(first=first, last=last)
    query, key, value = content.queries(all_of, key.shape[-1]), key[:, :, tile.keys], value[:, :, tile.keys]
    return _attend_tile(query, key, value, bias_of, tile, heads, content.softmax_scale)


def _attend_whole_heads(
    queries: Callable[[Callable[[Tensor], Tensor]], Tensor],
    key: Tensor,
    value: Tensor,
    problem: BlockProblem,
    bias_of: Bias,
    heads: Sequence[int],
    result: _Found,
) -> None:
    """Write the ``result`` of heads that look at everything they see; ``queries`` as :meth:`Content.queries`."""
    batch, num_heads, num_queries = result.lse.shape
    rows, keys, group = ROWS, None, len(heads)
    if bias_of.in_memory:
        rows = block_length(batch * KEYS_IN_MEMORY * min(2, len(heads)), BIAS_NUMBERS)
        rows = min(num_queries, ROWS, max(DIAGONAL_ROWS, rows))
        # Few queries, as in decoding, take many keys at once.
        keys = max(KEYS_IN_MEMORY, block_length(batch * len(heads) * rows, BIAS_NUMBERS))
        group = block_length(batch * keys * rows, BIAS_NUMBERS)
    groups = _head_groups(heads, num_heads // key.shape[1], group)
    for block in problem.tiling.row_blocks(rows, DIAGONAL_ROWS, keys):
        here = slice(block.start, block.stop)
        reversed_query = queries(lambda x, block=block, here=here: x[block.batches, :, here]).flip(2)
        plain = len(block.own) == 1 and not block.others
        merged = None if plain else _empty(reversed_query, value.shape[-1], problem.dtype)
        for tile in (*block.own, *block.others):
            for q_heads, kv_heads in groups:
                # Reversed, the tile's queries end where the block's begin.
                part = slice(block.stop - tile.stop, block.stop - tile.start)
                found = _attend_tile(
                    reversed_query[:, q_heads, part],
                    key[tile.batches, kv_heads, tile.keys],
                    value[tile.batches, kv_heads, tile.keys],
                    bias_of,
                    tile,
                    q_heads,
                    problem.softmax_scale,
                )
                if merged is None:
                    result.out[block.batches, q_heads, here] = found.out.flip(2)
                    result.lse[block.batches, q_heads, here] = found.lse.flip(2)
                elif tile in block.own:
                    merged.out[:, q_heads, part], merged.lse[:, q_heads, part] = found
                else:
                    _merge(_Found(merged.out[:, q_heads], merged.lse[:, q_heads]), found)
        if merged is not None:
            for q_heads, _ in groups:
                result.out[block.batches, q_heads, here] = merged.out[:, q_heads].flip(2)
                result.lse[block.batches, q_heads, here] = merged.lse[:, q_heads].flip(2)


def _attend_kept_tiles(
    queries: Callable[[Callable[[Tensor], Tensor]], Tensor],
    key: Tensor,
    value: Tensor,
    problem: BlockProblem,
    bias_of: Bias,
    result: _Found,
) -> None:
    """Add to the ``result`` what the other heads look at."""
    assert problem.kept is not None
    tiles = kept_tiles(problem.tiling, problem.kept, key.shape[1], join=not bias_of.in_memory)
    if bias_of.in_memory:
        tiles = [part for tile in tiles for part in tile.cut(BIAS_NUMBERS, BIAS_NUMBERS)]
    for heads, kv_heads, tile in tiles:
        found = _attend_tile(
            queries(partial(tile.cut_rows, heads=heads)).flip(2),
            tile.cut_keys(key, kv_heads),
            tile.cut_keys(value, kv_heads),
            bias_of,
            tile,
            heads,
            problem.softmax_scale,
        )
        into = _Found(tile.cut_rows(result.out, heads), tile.cut_rows(result.lse, heads))
        _merge(into, _Found(found.out.flip(2), found.lse.flip(2)))


class _Found(NamedTuple):
    """What a tile gives: attention over its keys alone."""

    out: Tensor
    lse: Tensor


def _empty(query: Tensor, value_dim: int, dtype: torch.dtype) -> _Found:
    """Room for the results of these queries."""
    return _Found(
        torch.empty(*query.shape[:-1], value_dim, dtype=dtype, device=query.device),
        torch.empty(query.shape[:-1], dtype=dtype, device=query.device),
    )


def _merge(into: _Found, found: _Found) -> None:
    """Add keys that were not there before: outputs weigh as much as their exponentials sum to."""
    # Where neither sees a key, the difference is nan, and either output is 0.
    weight = torch.sigmoid((found.lse - into.lse).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
    into.out.lerp_(found.out.to(into.out.dtype), weight.unsqueeze(-1))
    into.lse.copy_(torch.logaddexp(into.lse, found.lse))


def _head_groups(heads: Sequence[int], group: int, together: int) -> list[tuple[slice, slice]]:
    """Query heads to work on together, about so many, and the key heads they share.

    Args:
        heads: query heads, rising.
        group: how many of them share a key head.
        together: how many at most, or one key head's.
    """
    wanted = set(heads)
    groups: list[tuple[slice, slice]] = []
    for kv in range(heads[0] // group, heads[-1] // group + 1):
        mine = [h for h in range(kv * group, (kv + 1) * group) if h in wanted]
        if len(mine) < group:
            groups += [(slice(h, h + 1), slice(kv, kv + 1)) for h in mine]
            continue
        q_heads, kv_heads = slice(mine[0], mine[-1] + 1), slice(kv, kv + 1)
        if groups:
            q_before, kv_before = groups[-1]
            joined = q_heads.stop - q_before.start
            if q_before.stop == q_heads.start and q_before.start % group == 0 and joined <= max(together, group):
                groups[-1] = (slice(q_before.start, q_heads.stop), slice(kv_before.start, kv + 1))
                continue
        groups.append((q_heads, kv_heads))
    return groups


def _attend_tile(
    query: Tensor, key: Tensor, value: Tensor, bias_of: Bias, tile: Tile, heads: slice, scale: float
) -> _Found:
    """Attention of a tile's queries, in reverse order, over its keys."""
    if not tile.shape[1]:
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        return _Found(out, torch.full(query.shape[:-1], -math.inf, dtype=bias_of.dtype, device=query.device))
    bias = bias_of(tile, heads)
    found = _attend(query, key, value, bias, scale)
    blind = None if bias is None else bias_of.blind(tile, bias)
    if blind is None:
        return found
    return _Found(found.out.masked_fill(blind, 0.0), found.lse.masked_fill(blind.squeeze(-1), -math.inf))


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> _Found:
    """Plain attention with a bias. A query that sees no key gets a meaningless answer."""
    if is_one_on_cpu(query):
        return _attend_one(query, key, value, bias, scale)
    if query.device.type == "cpu":
        if bias is not None:
            bias = bias.expand(-1, query.shape[1], query.shape[2], -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scale
        )
        return _Found(out, lse)
    group = query.shape[1] // key.shape[1]
    # Products of half-precision numbers are exact in float32; in half precision logits would be rounded, and the
    # log-sum-exp with them.
    compute = compute_dtype_of(query)
    logits = (query.to(compute) @ key.repeat_interleave(group, dim=1).to(compute).mT) * scale
    if bias is not None:
        logits = logits + bias
    out = logits.softmax(-1).to(value.dtype) @ value.repeat_interleave(group, dim=1)
    return _Found(out, logits.logsumexp(-1))


def is_one_on_cpu(query: Tensor) -> bool:
    """Whether it is one query per text, whose products :func:`logits_of_one` takes."""
    return query.device.type == "cpu" and query.shape[2] == 1 and query.dtype in (torch.float32, torch.float64)


def logits_of_one(query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The logits of one query per text, ``(B * Hkv, H / Hkv, Lk)``, by a product that reads each key once.

    Args:
        query: ``(B, H, 1, D)``.
        key: ``(B, Hkv, Lk, D)``.
        bias: what expands to ``(B, H, 1, Lk)``; None for none.
        scale: of the content.
    """
    batch, heads, _, width = query.shape
    kv_heads, number = key.shape[1:3]
    # Query heads that share a key head are rows of one product.
    query = query.reshape(batch * kv_heads, heads // kv_heads, width)
    key = key.reshape(batch * kv_heads, number, width)
    if bias is None:
        return torch.bmm(query, key.mT).mul_(scale)
    bias = bias.expand(batch, heads, 1, number).reshape(*query.shape[:2], number).to(query.dtype)
    return torch.baddbmm(bias, query, key.mT, alpha=scale)


def mean_of_one(weights: Tensor, value: Tensor) -> Tensor:
    """The output ``(B, H, 1, Dv)`` of such weights, by a product that reads each value once."""
    batch, kv_heads, number, width = value.shape
    return torch.bmm(weights, value.reshape(batch * kv_heads, number, width)).view(batch, -1, 1, width)


def _attend_one(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> _Found:
    logits = logits_of_one(query, key, bias, scale)
    weights = logits.softmax(-1)
    # The largest weight is exp(highest - lse); exponentials of our own would be slow where they underflow.
    lse = logits.amax(-1) - weights.amax(-1).log()
    return _Found(mean_of_one(weights, value), lse.view(query.shape[:-1]))


# ---- backward


class Gradients(NamedTuple):
    """Of everything that has one."""

    query: Tensor
    """Of :meth:`Content.queries`."""
    key: Tensor
    """Of :meth:`Content.keys`."""
    value: Tensor
    table: Tensor | None
    row_scale: Tensor | None


class _Backward:
    """The backward pass over all tiles; gradients add up in its tensors."""

    def __init__(
        self,
        content: Content,
        problem: BlockProblem,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        wanted: tuple[bool, bool],
    ) -> None:
        self.content, self.problem = content, problem
        self.key, self.value = content.keys(all_of, content.width), content.value
        self.out_grad, self.lse_grad = grads
        self.saved_dtype, self.lse = saved[0].dtype, saved[1]
        self.heads, self.kv_heads = content.query.shape[1], content.key.shape[1]
        self.group = self.heads // self.kv_heads
        # dS = P (dP + dlse - Σ P dP), and Σ_j P_ij dP_ij = <out_i, dout_i>.
        moment = torch.linalg.vecdot(saved[0].to(problem.dtype), self.out_grad.to(problem.dtype))
        self.row_constant = self.lse_grad.to(problem.dtype) - moment
        dtype, device = problem.dtype, content.query.device
        self.query_grad, self.key_grad, self.value_grad = (
            torch.zeros(*x.shape[:-1], width, dtype=dtype, device=device)
            for x, width in (
                (content.query, content.width),
                (content.key, content.width),
                (content.value, content.value.shape[-1]),
            )
        )
        table, row_scale = problem.table, problem.row_scale
        self.table_grad = torch.zeros_like(table) if table is not None and wanted[0] else None
        self.scale_grad = torch.zeros_like(row_scale) if row_scale is not None and wanted[1] else None
        self.scratch = [Scratch(dtype, device) for _ in range(5)]
        self.bias = problem.bias(1 / NATS_PER_BIT)
        self.inexact = self._inexact_rows()

    def run(self) -> Gradients:
        kept = self.problem.kept
        heads = range(self.heads) if kept is None else whole_heads(kept)
        if heads:
            self._whole_heads(heads)
        if kept is not None:
            self._kept_tiles(kept)
        return Gradients(
            self.query_grad,
            self.key_grad,
            self.value_grad.to(self.value.dtype),
            self.table_grad,
            self.scale_grad,
        )

    def _inexact_rows(self) -> Tensor | None:
        """Rows whose stored output or log-sum-exp is not exact enough, ``(B, H, Lq)``; None if there are none.

        Outputs in half precision are not: their rounding would be all over the gradients of the prior, which
        learns in float32.
        """
        if self.saved_dtype != self.problem.dtype:
            return torch.ones_like(self.lse, dtype=torch.bool)
        inexact = self.lse.abs().masked_fill(torch.isneginf(self.lse), 0.0) > LARGEST_STORED_LSE
        return inexact if bool(inexact.any()) else None

    def _whole_heads(self, heads: Sequence[int]) -> None:
        """Heads that look at everything they see, column by column; inexact blocks of queries on their own."""
        tiling = self.problem.tiling
        anew = set()
        if self.inexact is not None:
            anew = {
                (segment.batches.start, start)
                for segment in tiling.segments
                for start in range(segment.start, segment.stop, BACKWARD_ROWS)
                if bool(self.inexact[segment.batches, heads, start : min(start + BACKWARD_ROWS, segment.stop)].any())
            }
        for tiles in tiling.columns(BACKWARD_ROWS, BACKWARD_KEYS):
            near = [tile for tile in tiles if (tile.batches.start, tile.start) not in anew]
            if near:
                self._column(near, heads)
        for segment in tiling.segments if anew else ():
            for start in range(segment.start, segment.stop, BACKWARD_ROWS):
                if (segment.batches.start, start) not in anew:
                    continue
                stop = min(start + BACKWARD_ROWS, segment.stop)
                tile = Tile(segment.batches, start, stop, *tiling.keys_of(segment, start, stop))
                rows, keys = tile.shape
                if keys:
                    for b, q_heads, kv_heads in self._parts(tile.batches, heads, rows * keys):
                        self._rows_anew(q_heads, kv_heads, [tile._replace(batches=b)])

    def _kept_tiles(self, kept: Tensor) -> None:
        """The other heads."""
        anew: dict[tuple[int, int, int], list[KeptTile]] = {}
        for whole in kept_tiles(self.problem.tiling, kept, self.kv_heads, join=True):
            for tile in whole.each() if self._is_inexact(whole) else (whole,):
                if self._is_inexact(tile):
                    place = (tile.tile.batches.start, tile.heads.start, tile.tile.start)
                    anew.setdefault(place, []).append(tile)
                    continue
                # Tiles along a diagonal must not have keys in common: what they add to would overlap.
                for heads, kv_heads, part in tile.cut(BUFFER_NUMBERS, BLOCK, BLOCK):
                    key, value = (part.cut_keys(x, kv_heads).to(self.problem.dtype) for x in (self.key, self.value))
                    key_grad, value_grad = _transposed_zeros(key), _transposed_zeros(value)
                    self._tile(part, heads, key, value, key_grad, value_grad)
                    part.cut_keys(self.key_grad, kv_heads).add_(key_grad.mT)
                    part.cut_keys(self.value_grad, kv_heads).add_(value_grad.mT)
        for tiles in anew.values():
            self._rows_anew(tiles[0].heads, tiles[0].kv_heads, [tile.tile for tile in tiles])

    def _is_inexact(self, kept: KeptTile) -> bool:
        return self.inexact is not None and bool(kept.tile.cut_rows(self.inexact, kept.heads).any())

    def _parts(self, batches: slice, heads: Sequence[int], size: int) -> Iterator[tuple[slice, slice, slice]]:
        """Batches, heads and key heads to work on together, so that a buffer of ``size`` numbers each stays small."""
        together = max(1, block_length(size, BUFFER_NUMBERS))
        for q_heads, kv_heads in _head_groups(heads, self.group, together):
            step = max(1, together // (q_heads.stop - q_heads.start))
            for b in range(batches.start, batches.stop, step):
                yield slice(b, min(b + step, batches.stop)), q_heads, kv_heads

    def _column(self, tiles: list[Tile], heads: Sequence[int]) -> None:
        """Tiles that hold one range of keys; their gradients of keys and values add up transposed.

        "Columns x queries" times "queries x keys" is much the faster product on CPUs.
        """
        first, last = min(t.first for t in tiles), max(t.last for t in tiles)
        keys = slice(first, last)
        rows = max(t.stop - t.start for t in tiles)
        for b, q_heads, kv_heads in self._parts(tiles[0].batches, heads, rows * (last - first)):
            key, value = (x[b, kv_heads, keys].to(self.problem.dtype) for x in (self.key, self.value))
            key_grad, value_grad = _transposed_zeros(key), _transposed_zeros(value)
            for whole in tiles:
                tile = whole._replace(batches=b)
                cut = slice(tile.first - first, tile.last - first)
                self._tile(tile, q_heads, key[:, :, cut], value[:, :, cut], key_grad[..., cut], value_grad[..., cut])
            self.key_grad[b, kv_heads, keys] += key_grad.mT
            self.value_grad[b, kv_heads, keys] += value_grad.mT

    def _rows_of(self, tensor: Tensor, tile: Tile, heads: slice) -> Tensor:
        """The tile's part of ``(B, H, Lq, ...)`` in reverse order, ``(b, h, n, ...)``, in the working dtype."""
        return tile.cut_rows(tensor, heads).flip(2).to(self.problem.dtype)

    def _stack(self, tile: Tile, heads: slice, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tile's queries, output gradients, keys and values as batches of matrices.

        The query heads that share a key head are more rows of the same matrix product.
        """
        keys = tile.shape[1]
        batch = key.shape[0] * key.shape[1]
        query = self.content.queries(partial(tile.cut_rows, heads=heads), self.content.width).flip(2)
        query, out_grad = (
            x.to(self.problem.dtype).reshape(batch, -1, x.shape[-1])
            for x in (query, self._rows_of(self.out_grad, tile, heads))
        )
        return query, out_grad, key.reshape(batch, keys, -1), value.reshape(batch, keys, -1)

    def _tile(
        self,
        tile: Tile,
        heads: slice,
        key: Tensor,
        value: Tensor,
        key_grad: Tensor,
        value_grad: Tensor,
    ) -> None:
        q, o, k, v = self._stack(tile, heads, key, value)
        stacked, keys = q.shape[:2], tile.shape[1]
        shape = (key.shape[0], heads.stop - heads.start, *tile.shape)
        lse = self._rows_of(self.lse, tile, heads)
        constant = self._rows_of(self.row_constant, tile, heads)
        weights, weights_grad = (scratch.of(*stacked, keys) for scratch in self.scratch[:2])

        # Powers of two: exp2 is much the faster function on CPUs.
        shift = lse.masked_fill(torch.isneginf(lse), 0.0).unsqueeze(-1) * (-1 / NATS_PER_BIT)
        self.bias.write(weights.view(shape), tile, heads, shift)
        weights.baddbmm_(q, k.mT, alpha=self.problem.softmax_scale / NATS_PER_BIT).exp2_()
        torch.baddbmm(constant.reshape(*stacked, 1).expand_as(weights), o, v.mT, out=weights_grad)
        self._add_products(tile, heads, weights, weights_grad, q, k, o, key_grad, value_grad)

    def _add_products(
        self,
        tile: Tile,
        heads: slice,
        weights: Tensor,
        weights_grad: Tensor | None,
        q: Tensor,
        k: Tensor,
        o: Tensor,
        key_grad: Tensor,
        value_grad: Tensor,
        logits_grad: Tensor | None = None,
    ) -> None:
        """Add a tile's part of every gradient, given its weights and what they are multiplied by to give dS."""
        rows, keys = tile.shape
        stacked, width = weights.shape[:2], q.shape[-1]
        batch, number = tile.number, heads.stop - heads.start
        scale = self.problem.softmax_scale
        product = self.scratch[2]

        value_part = torch.bmm(o.mT, weights, out=product.of(stacked[0], o.shape[-1], keys))
        value_grad += value_part.view(value_grad.shape)
        # After as many columns of zeros as there are rows: see Distances.add.
        padded = self.scratch[3].of(*stacked, rows + keys)
        padded[..., :rows] = 0
        if logits_grad is None:
            assert weights_grad is not None
            logits_grad = torch.mul(weights, weights_grad, out=padded[..., rows:])
        else:
            padded[..., rows:] = logits_grad
            logits_grad = padded[..., rows:]
        key_part = torch.bmm(q.mT, logits_grad, out=product.of(stacked[0], width, keys))
        key_grad.add_(key_part.view(key_grad.shape), alpha=scale)
        query_part = torch.bmm(logits_grad, k, out=product.of(*stacked, width)).view(batch, number, rows, width)
        tile.cut_rows(self.query_grad, heads).add_(query_part.flip(2), alpha=scale)

        padded = padded.view(batch, number, rows, rows + keys)
        if self.scale_grad is not None:
            log_prior = self.bias.log_prior(tile, heads)
            moments = torch.mul(padded[..., rows:], log_prior, out=self.scratch[4].of(batch, number, rows, keys))
            tile.cut_rows(self.scale_grad, heads).add_(moments.sum(-1).flip(-1), alpha=NATS_PER_BIT)
        if self.table_grad is not None:
            if self.problem.row_scale is not None:
                padded *= self.bias.scale(tile, heads)
            self.problem.distances.add(self.table_grad[heads], tile, padded)

    def _rows_anew(self, heads: slice, kv_heads: slice, tiles: list[Tile]) -> None:
        """Queries whose softmax is computed anew: ``tiles`` hold all of the keys that they look at."""
        bias_of, dtype = self.problem.bias(), self.problem.dtype
        one = tiles[0]
        keys_and_values = [
            torch.cat([tile.cut_keys(x, kv_heads) for tile in tiles], dim=2).to(dtype) for x in (self.key, self.value)
        ]
        ends = list(accumulate((tile.shape[1] for tile in tiles), initial=0))
        whole = one._replace(first=0, last=ends[-1])
        q, o, k, v = self._stack(whole, heads, *keys_and_values)
        stacked = (*q.shape[:2], ends[-1])
        shape = (one.number, heads.stop - heads.start, *whole.shape)
        logits = self.scratch[0].of(*stacked)
        blind: list[Tensor | None] = []
        for tile, start, stop in zip(tiles, ends, ends[1:], strict=False):
            bias = bias_of.write(logits.view(shape)[..., start:stop], tile, heads, None)
            blind.append(bias_of.blind(tile, bias))
        logits.baddbmm_(q, k.mT, alpha=self.problem.softmax_scale)
        nothing = None
        if all(part is not None for part in blind):
            nothing = torch.stack([part.expand(*shape[:-1], 1) for part in blind if part is not None]).all(0)
            logits.view(shape).masked_fill_(nothing, 0.0)
        weights = logits.softmax(-1)
        if nothing is not None:
            weights.view(shape).masked_fill_(nothing, 0.0)
        weights_grad = torch.bmm(o, v.mT, out=logits)
        logits_grad = torch.ops.aten._softmax_backward_data(weights_grad, weights, -1, dtype)
        logits_grad += weights * self._rows_of(self.lse_grad, one, heads).reshape(*stacked[:2], 1)
        for tile, start, stop in zip(tiles, ends, ends[1:], strict=False):
            key_grad, value_grad = (tile.cut_keys(x, kv_heads).mT for x in (self.key_grad, self.value_grad))
            part = slice(start, stop)
            self._add_products(
                tile, heads, weights[..., part], None, q, k[:, part], o, key_grad, value_grad, logits_grad[..., part]
            )


def _transposed_zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor.mT, memory_format=torch.contiguous_format)


def backward(
    content: Content,
    problem: BlockProblem,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    wanted: tuple[bool, bool],
) -> Gradients:
    """Gradients of everything.

    Args:
        content: and
        problem: as for :func:`forward`.
        saved: output and log-sum-exp.
        grads: their gradients.
        wanted: whether to compute those of table and row scale.
    """
    return _Backward(content, problem, saved, grads, wanted).run()
