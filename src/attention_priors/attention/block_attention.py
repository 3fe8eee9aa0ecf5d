"""Attention in tiles, forward and backward, in linear memory: no bias matrix.

Each tile is one plain attention call whose bias is a view of a table, where that is possible (``bias.py``); the
results of tiles over different keys are merged by their log-sum-exps. The backward pass recomputes the
weights of each tile from the log-sum-exp; the table's gradient is the sum of the logits' gradient along its
diagonals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.bias import Bias, Distances, Scratch
from attention_priors.attention.geometry import Geometry, block_length
from attention_priors.attention.tiles import Tile, Tiling
from attention_priors.precision import compute_dtype_of

ROWS = 1024
"""Queries per block of the forward pass: the CPU's kernel is at its best from 768 on."""
DIAGONAL_ROWS = 128
"""Queries per tile beside the causal diagonal: smaller ones waste less on keys nobody sees."""
KEYS_IN_MEMORY = 512
"""Keys per tile of the forward pass where the bias is in memory."""
BIAS_NUMBERS = 2**20
"""Numbers that such a bias may take: 4 MiB in float32."""
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

    @cached_property
    def tiling(self) -> Tiling:
        """How it is cut."""
        reach = None
        if self.inside is not None:
            seen = self.distances.values()[self.inside]
            reach = (int(seen.min()), int(seen.max())) if len(seen) else (0, -1)
        return Tiling.of(self.geometry, reach)

    def bias(self, unit: float = 1.0) -> Bias:
        """Its biases; a nat is the number ``unit``."""
        return Bias(self.tiling, self.distances, self.table, self.inside, self.row_scale, self.dtype, unit)


# ---- forward


def forward(query: Tensor, key: Tensor, value: Tensor, problem: BlockProblem) -> tuple[Tensor, Tensor]:
    """Output ``(B, H, Lq, Dv)`` in the query's dtype, and log-sum-exp ``(B, H, Lq)``."""
    batch, heads, num_queries, head_dim = query.shape
    value_dim = value.shape[-1]
    if value_dim != head_dim:
        # The CPU's kernel wants one width for all three.
        query, key, value = (pad(x, (0, max(head_dim, value_dim) - x.shape[-1])) for x in (query, key, value))
    out = query.new_empty(batch, heads, num_queries, value.shape[-1])
    lse = torch.empty(query.shape[:-1], dtype=problem.dtype, device=query.device)
    bias_of = problem.bias()
    rows, keys, group = ROWS, None, heads
    if bias_of.in_memory:
        rows = block_length(batch * KEYS_IN_MEMORY * min(2, heads), BIAS_NUMBERS)
        rows = min(num_queries, ROWS, max(DIAGONAL_ROWS, rows))
        # Few queries, as in decoding, take many keys at once.
        keys = max(KEYS_IN_MEMORY, block_length(batch * heads * rows, BIAS_NUMBERS))
        group = block_length(batch * keys * rows, BIAS_NUMBERS)
    groups = _head_groups(heads, key.shape[1], group)
    for block in problem.tiling.row_blocks(rows, DIAGONAL_ROWS, keys):
        here = slice(block.start, block.stop)
        reversed_query = query[block.batches, :, here].flip(2)
        plain = len(block.own) == 1 and not block.others
        merged = None if plain else _Merged.empty(reversed_query, value.shape[-1], problem.dtype)
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
                    out[block.batches, q_heads, here] = found.out.flip(2)
                    lse[block.batches, q_heads, here] = found.lse.flip(2)
                elif tile in block.own:
                    merged.out[:, q_heads, part], merged.lse[:, q_heads, part] = found
                else:
                    merged.merge(q_heads, found)
        if merged is not None:
            out[block.batches, :, here] = merged.out.flip(2)
            lse[block.batches, :, here] = merged.lse.flip(2)
    return out[..., :value_dim].contiguous(), lse


class _Found(NamedTuple):
    """What a tile gives: attention over its keys alone."""

    out: Tensor
    lse: Tensor


class _Merged(NamedTuple):
    """Attention over the keys of several tiles, their queries in reverse order."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, query: Tensor, value_dim: int, dtype: torch.dtype) -> _Merged:
        return cls(
            torch.empty(*query.shape[:-1], value_dim, dtype=dtype, device=query.device),
            torch.empty(query.shape[:-1], dtype=dtype, device=query.device),
        )

    def merge(self, heads: slice, found: _Found) -> None:
        """Add keys that were not there before: outputs weigh as much as their exponentials sum to."""
        out, lse = self.out[:, heads], self.lse[:, heads]
        # Where neither sees a key, the difference is nan, and either output is 0.
        weight = torch.sigmoid((found.lse - lse).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
        out.lerp_(found.out.to(out.dtype), weight.unsqueeze(-1))
        torch.logaddexp(lse, found.lse, out=lse)


def _head_groups(heads: int, kv_heads: int, together: int) -> list[tuple[slice, slice]]:
    """Query heads to work on together, about so many, and the key heads they share."""
    group = heads // kv_heads
    step = max(1, min(together, heads) // group)
    return [
        (slice(kv * group, min(kv + step, kv_heads) * group), slice(kv, min(kv + step, kv_heads)))
        for kv in range(0, kv_heads, step)
    ]


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
    if query.device.type == "cpu" and query.shape[2] == 1 and query.dtype in (torch.float32, torch.float64):
        return _attend_one(query, key, value, bias, scale)
    if query.device.type == "cpu":
        if bias is not None:
            bias = bias.expand(-1, query.shape[1], query.shape[2], -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scale
        )
        return _Found(out, lse)
    group = query.shape[1] // key.shape[1]
    logits = (query @ key.repeat_interleave(group, dim=1).mT).to(compute_dtype_of(query)) * scale
    if bias is not None:
        logits = logits + bias
    out = logits.softmax(-1).to(value.dtype) @ value.repeat_interleave(group, dim=1)
    return _Found(out, logits.logsumexp(-1))


def _attend_one(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> _Found:
    """One query, as in decoding: two products that read each key and each value once."""
    batch, heads, _, width = query.shape
    kv_heads, number = key.shape[1:3]
    # Query heads that share a key head are rows of one product.
    query = query.reshape(batch * kv_heads, heads // kv_heads, width)
    key, value = (x.reshape(batch * kv_heads, number, -1) for x in (key, value))
    logits = torch.empty(batch, heads, 1, number, dtype=query.dtype, device=query.device)
    if bias is not None:
        logits.copy_(bias.expand_as(logits))
    logits = logits.view(*query.shape[:2], number).baddbmm_(query, key.mT, beta=int(bias is not None), alpha=scale)
    weights = logits.softmax(-1)
    # The largest weight is exp(highest - lse); exponentials of our own would be slow where they underflow.
    lse = logits.amax(-1) - weights.amax(-1).log()
    out = torch.bmm(weights, value)
    return _Found(out.view(batch, heads, 1, -1), lse.view(batch, heads, 1))


# ---- backward


class Gradients(NamedTuple):
    """Of everything that has one."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor | None
    row_scale: Tensor | None


class _Backward:
    """The backward pass over all tiles; gradients add up in its tensors."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        problem: BlockProblem,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        wanted: tuple[bool, bool],
    ) -> None:
        self.problem = problem
        self.query, self.key, self.value = query, key, value
        self.out_grad, self.lse_grad = grads
        self.lse = saved[1]
        self.kv_heads = key.shape[1]
        self.group = query.shape[1] // key.shape[1]
        # dS = P (dP + dlse - Σ P dP), and Σ_j P_ij dP_ij = <out_i, dout_i>.
        moment = torch.linalg.vecdot(saved[0].to(problem.dtype), self.out_grad.to(problem.dtype))
        self.row_constant = self.lse_grad.to(problem.dtype) - moment
        dtype = problem.dtype
        self.query_grad, self.key_grad, self.value_grad = (
            torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (query, key, value)
        )
        table, row_scale = problem.table, problem.row_scale
        self.table_grad = torch.zeros_like(table) if table is not None and wanted[0] else None
        self.scale_grad = torch.zeros_like(row_scale) if row_scale is not None and wanted[1] else None
        self.scratch = [Scratch(dtype, query.device) for _ in range(5)]
        self.bias = problem.bias(1 / NATS_PER_BIT)

    def run(self) -> Gradients:
        far = self._far_blocks()
        for tiles in self.problem.tiling.columns(BACKWARD_ROWS, BACKWARD_KEYS):
            near = [tile for tile in tiles if (tile.batches.start, tile.start) not in far]
            if near:
                self._column(near)
        if far:
            self._whole_rows(far)
        return Gradients(
            self.query_grad.to(self.query.dtype),
            self.key_grad.to(self.key.dtype),
            self.value_grad.to(self.value.dtype),
            self.table_grad,
            self.scale_grad,
        )

    def _far_blocks(self) -> set[tuple[int, int]]:
        """First batch and first query of the blocks whose stored outputs or log-sum-exps are not exact enough.

        Outputs in half precision are not: their rounding would be all over the gradients of the prior, which
        learns in float32.
        """
        size = self.lse.abs().masked_fill(torch.isneginf(self.lse), 0.0)
        if self.query.dtype != self.problem.dtype:
            size.fill_(math.inf)
        if float(size.max()) <= LARGEST_STORED_LSE:
            return set()
        return {
            (segment.batches.start, start)
            for segment in self.problem.tiling.segments
            for start in range(segment.start, segment.stop, BACKWARD_ROWS)
            if float(size[segment.batches, :, start : min(start + BACKWARD_ROWS, segment.stop)].max())
            > LARGEST_STORED_LSE
        }

    def _column(self, tiles: list[Tile]) -> None:
        """Tiles that hold one range of keys; their gradients of keys and values add up transposed.

        "Columns x queries" times "queries x keys" is much the faster product on CPUs.
        """
        first, last = min(t.first for t in tiles), max(t.last for t in tiles)
        keys = slice(first, last)
        rows = max(t.stop - t.start for t in tiles)
        batches = tiles[0].batches
        number = batches.stop - batches.start
        for b, kv in _tiles(batches.start, number, self.kv_heads, self.group * rows * (last - first)):
            here = slice(kv.start * self.group, kv.stop * self.group)
            key, value = (x[b, kv, keys].to(self.problem.dtype) for x in (self.key, self.value))
            key_grad, value_grad = (torch.zeros_like(x.mT, memory_format=torch.contiguous_format) for x in (key, value))
            for whole in tiles:
                tile = whole._replace(batches=b)
                cut = slice(tile.first - first, tile.last - first)
                self._tile(tile, here, kv, key[:, :, cut], value[:, :, cut], key_grad[..., cut], value_grad[..., cut])
            self.key_grad[b, kv, keys] += key_grad.mT
            self.value_grad[b, kv, keys] += value_grad.mT

    def _rows_of(self, tensor: Tensor, tile: Tile, heads: slice) -> Tensor:
        """The tile's part of ``(B, H, Lq, ...)`` in reverse order, ``(b, h, n, ...)``, in the working dtype."""
        return tensor[tile.batches, heads, tile.rows].flip(2).to(self.problem.dtype)

    def _stack(self, tile: Tile, heads: slice, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tile's queries, output gradients, keys and values as batches of matrices.

        The query heads that share a key head are more rows of the same matrix product.
        """
        rows, keys = tile.shape
        batch = key.shape[0] * key.shape[1]
        query, out_grad = (
            self._rows_of(x, tile, heads).reshape(batch, self.group * rows, -1) for x in (self.query, self.out_grad)
        )
        return query, out_grad, key.reshape(batch, keys, -1), value.reshape(batch, keys, -1)

    def _tile(
        self,
        tile: Tile,
        heads: slice,
        kv: slice,
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
        batch, number = tile.batches.stop - tile.batches.start, heads.stop - heads.start
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
        self.query_grad[tile.batches, heads, tile.rows].add_(query_part.flip(2), alpha=scale)

        padded = padded.view(batch, number, rows, rows + keys)
        if self.scale_grad is not None:
            log_prior = self.bias.log_prior(tile, heads)
            moments = torch.mul(padded[..., rows:], log_prior, out=self.scratch[4].of(batch, number, rows, keys))
            self.scale_grad[tile.batches, heads, tile.rows] += moments.sum(-1).flip(-1) * NATS_PER_BIT
        if self.table_grad is not None:
            if self.problem.row_scale is not None:
                padded *= self.bias.scale(tile, heads)
            self.problem.distances.add(self.table_grad[heads], tile, padded)

    def _whole_rows(self, blocks: set[tuple[int, int]]) -> None:
        """Blocks of queries whose softmax is computed anew, over all of their keys."""
        bias_of = self.problem.bias()
        tiling = self.problem.tiling
        dtype = self.problem.dtype
        for segment in tiling.segments:
            for start in range(segment.start, segment.stop, BACKWARD_ROWS):
                if (segment.batches.start, start) not in blocks:
                    continue
                stop = min(start + BACKWARD_ROWS, segment.stop)
                whole = Tile(segment.batches, start, stop, *tiling.keys_of(segment, start, stop))
                rows, keys = whole.shape
                if not keys:
                    continue
                number = segment.batches.stop - segment.batches.start
                for b, kv in _tiles(segment.batches.start, number, self.kv_heads, self.group * rows * keys):
                    tile = whole._replace(batches=b)
                    heads = slice(kv.start * self.group, kv.stop * self.group)
                    key, value = (x[b, kv, tile.keys].to(dtype) for x in (self.key, self.value))
                    q, o, k, v = self._stack(tile, heads, key, value)
                    stacked = q.shape[:2]
                    logits = self.scratch[0].of(*stacked, keys)
                    shape = (key.shape[0], heads.stop - heads.start, rows, keys)
                    bias = bias_of.write(logits.view(shape), tile, heads, None)
                    blind = bias_of.blind(tile, bias)
                    logits.baddbmm_(q, k.mT, alpha=self.problem.softmax_scale)
                    if blind is not None:
                        logits.view(shape).masked_fill_(blind, 0.0)
                    weights = logits.softmax(-1)
                    if blind is not None:
                        weights.view(shape).masked_fill_(blind, 0.0)
                    weights_grad = torch.bmm(o, v.mT, out=logits)
                    logits_grad = torch.ops.aten._softmax_backward_data(weights_grad, weights, -1, dtype)
                    lse_grad = self._rows_of(self.lse_grad, tile, heads)
                    logits_grad += weights * lse_grad.reshape(*stacked, 1)
                    key_grad, value_grad = (x[b, kv, tile.keys].mT for x in (self.key_grad, self.value_grad))
                    self._add_products(tile, heads, weights, None, q, k, o, key_grad, value_grad, logits_grad)


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    problem: BlockProblem,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    wanted: tuple[bool, bool],
) -> Gradients:
    """Gradients of everything.

    Args:
        query: and
        key: and
        value: as for :func:`forward`.
        problem: as for :func:`forward`.
        saved: output and log-sum-exp.
        grads: their gradients.
        wanted: whether to compute those of table and row scale.
    """
    return _Backward(query, key, value, problem, saved, grads, wanted).run()


def _tiles(start: int, batch: int, kv_heads: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Batches and key heads to work on together, so that a buffer of ``size`` numbers each stays small."""
    together = block_length(size, BUFFER_NUMBERS)
    stop = start + batch
    if together >= kv_heads:
        step = together // kv_heads
        yield from ((slice(b, min(b + step, stop)), slice(0, kv_heads)) for b in range(start, stop, step))
        return
    for b in range(start, stop):
        for h in range(0, kv_heads, together):
            yield slice(b, b + 1), slice(h, min(h + together, kv_heads))
