"""Backward pass in linear memory: the weights of each tile are recomputed from the log-sum-exp.

The table's gradient is the sum of the logits' gradient along its diagonals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.geometry import block_length
from attention_priors.attention.pruning.bounds import BLOCK
from attention_priors.attention.tiles.bias import KEPT_NUMBERS, Bias, Scratch, far_rows
from attention_priors.attention.tiles.block_problem import BlockProblem, Content, Gradients
from attention_priors.attention.tiles.exact import without_best
from attention_priors.attention.tiles.scaled import sum_gradients
from attention_priors.attention.tiles.threads import share
from attention_priors.attention.tiles.tiling import Part, Tile, ranges_of
from attention_priors.precision import drop_negligible
from attention_priors.priors.base import ScaledDistance

ROWS = 256
"""Queries per tile. Half as many for at most ``MOST_KEYS`` keys."""
LEAST_ROWS = 128
"""Smallest number of queries per tile, however steep key biases are. Rows far from 0 are cheaper here than in the
forward pass."""
MOST_KEYS = 512
"""Largest number of keys per tile."""
NUMBERS = KEPT_NUMBERS
"""Approximate size of a thread's working buffer, in numbers. With smaller buffers, threads wait for Python's lock."""
PAIRS = 2**24
"""Query-key pairs, over all heads and rows of the batch, from which separate threads pay off. The forward pass needs
more pairs: small operations gain more from threads, and the backward pass has many."""
LARGEST_STORED_LSE = 40.0
"""Largest log-sum-exp, in nats, for which weights are recomputed as ``exp(logit - lse)``.

A float32 of size ``z`` has an error of up to ``z · 2^-24``, and so has the weight. Beyond this limit, the softmax of a
block is recomputed. The gradient of a row that sees one key is then exactly 0, even if the log-prior and its derivative
are as large as 1e30.
"""
LARGEST_WITH_KEYS = 200.0
"""``LARGEST_STORED_LSE`` for key biases, whose constant is subtracted per block of queries, not per query."""
NATS_PER_BIT = math.log(2)


def backward(
    content: Content,
    problem: BlockProblem,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    wanted: tuple[bool, ...],
) -> Gradients:
    """Compute the gradients of all inputs.

    Args:
        content: queries, keys and values.
        problem: prior, masks and tiling.
        saved: output and log-sum-exp.
        grads: gradients of ``saved``; None for 0.
        wanted: whether to compute the gradients of table, key bias, row scale and network.
    """
    out, lse = saved
    out_grad = grads[0]
    lse_grad = torch.zeros_like(lse, dtype=problem.dtype) if grads[1] is None else grads[1].to(problem.dtype)
    geometry = problem.geometry
    block_rows = ROWS if geometry.num_keys > MOST_KEYS else ROWS // 2
    block_rows = (
        BLOCK if problem.kept is not None else min(problem.levels(block_rows, 0.75 * LARGEST_WITH_KEYS, LEAST_ROWS))
    )
    bias_in_bits, bias = problem.bias(1 / NATS_PER_BIT), problem.bias()
    relative = lse if problem.key_bias is None else lse - _constants(problem, bias, block_rows)
    relative = relative.to(problem.dtype, copy=True).masked_fill_(torch.isneginf(lse), 0.0)
    rows = _Rows(
        # In bits, because exp2 is much faster than exp on CPUs.
        relative * (-1 / NATS_PER_BIT),
        lse_grad,
        out,
        out_grad,
        _inexact_rows(out.dtype, relative, problem.key_bias is not None),
        far_rows(relative),
    )
    heads, kv_heads = content.query.shape[1], content.key.shape[1]
    table, row_scale = problem.table, problem.row_scale
    query_grad, key_grad, value_grad = (
        torch.empty_like(x, dtype=problem.dtype, memory_format=torch.contiguous_format) for x in content[:3]
    )
    found = Gradients(
        query_grad,
        key_grad,
        value_grad,
        None if table is None or not wanted[0] else torch.zeros_like(table, dtype=problem.dtype),
        None if problem.key_bias is None or not wanted[1] else lse.new_zeros(geometry.batch, heads, geometry.num_keys),
        torch.zeros_like(row_scale) if row_scale is not None and wanted[2] else None,
    )
    rows_of_tile, keys_of_tile = min(block_rows, geometry.num_queries), min(MOST_KEYS, geometry.num_keys)
    # Distances.add pads most tiles with a column for each row.
    tile = rows_of_tile * (keys_of_tile + rows_of_tile)
    at_once = problem.is_large(PAIRS)
    parts = problem.parts(kv_heads, heads // kv_heads, block_length(tile, NUMBERS), at_once)

    def make_workspace() -> _Workspace:
        names = ("weights", "logits' gradient", "product")
        scratch = [Scratch(name, problem.dtype, lse.device) for name in names]
        return _Workspace(bias_in_bits.for_thread(), bias.for_thread(), scratch)

    work = [_Backward(part, content, problem, rows, found, block_rows) for part in parts]
    if bias.network is not None and wanted[3]:
        for one in work:
            one.network_grad = bias.network.zero_gradients()
    share([one.run for one in work], make_workspace, at_once)
    if found.table is not None:
        for one in work:
            assert one.table_grad is not None
            # One row of the batch after another: the sum does not depend on how the work was divided.
            for of_text in one.table_grad:
                found.table[one.part.heads] += of_text
    of_network = [one.network_grad for one in work if one.network_grad is not None]
    if of_network:
        found = found._replace(scaled=sum_gradients(of_network, geometry.batch))
    return found.unscaled(content, wanted[2])


class _Rows(NamedTuple):
    """Numbers of each query, ``(B, H, Lq)``. The output and its gradient are ``(B, H, Lq, Dv)``."""

    shift: Tensor
    """Negative log-sum-exp in bits, which is added to the logits; 0 for a query that sees no key."""
    lse_grad: Tensor
    out: Tensor
    out_grad: Tensor
    inexact: Tensor | None
    """Whether the stored output or log-sum-exp is not exact enough; None if all rows are exact enough."""
    far: Tensor | None
    """Whether float32 is not exact enough for the log-prior; None if it is exact enough for all rows."""


def _constants(problem: BlockProblem, bias: Bias, block_rows: int) -> Tensor:
    """Return the constant subtracted from each row's logits for its key biases, ``(B, H, Lq)`` in float64."""
    geometry = problem.geometry
    heads, device = slice(0, geometry.heads), geometry.device
    constants = torch.zeros(geometry.batch, geometry.heads, geometry.num_queries, dtype=torch.float64, device=device)
    for block in problem.tiling.blocks(block_rows):
        constant = bias.centred(block, heads)[1]
        if constant is not None:
            block.cut_rows(constants, heads).copy_(constant.expand(-1, -1, block.shape[0]))
    return constants if problem.row_scale is None else constants * problem.row_scale


def _inexact_rows(saved: torch.dtype, lse: Tensor, has_keys: bool) -> Tensor | None:
    # Outputs in half precision are inexact: their rounding would spread to the gradients of the prior, which trains in
    # float32.
    if saved != lse.dtype:
        return torch.ones_like(lse, dtype=torch.bool)
    inexact = lse.abs() > (LARGEST_WITH_KEYS if has_keys else LARGEST_STORED_LSE)
    return inexact if bool(inexact.any()) else None


class _Workspace(NamedTuple):
    """Working memory of one thread."""

    bias_in_bits: Bias
    bias: Bias
    scratch: list[Scratch]


def _with_rows_as_columns(tensor: Tensor) -> Tensor:
    """View the memory of contiguous matrices with the sizes of rows and columns swapped. Numbers do not move."""
    return tensor.view(*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])


class _Queries(NamedTuple):
    """Matrices of a block's queries, one per row of the batch and key head. Heads that share a key head are stacked."""

    query: Tensor
    out_grad: Tensor
    query_grad: Tensor


@dataclass
class _Backward:
    """Backward pass of some rows of the batch and some heads.

    Gradients of keys and values accumulate transposed, in their final memory, because "columns x queries" times
    "queries x keys" is the faster product on CPUs.
    """

    part: Part
    content: Content
    problem: BlockProblem
    rows: _Rows
    found: Gradients
    block_rows: int
    table_grad: Tensor | None = None
    network_grad: ScaledDistance | None = None

    def run(self, workspace: _Workspace) -> None:
        self.bias_in_bits, self.bias, self.scratch = workspace
        self.in_bits, self.here = self.bias_in_bits, self.bias
        part, content, found, dtype = self.part, self.content, self.found, self.problem.dtype
        self.key, self.value = (part.of_keys(x).to(dtype).contiguous() for x in (content.key, content.value))
        of_keys = [part.of_keys(x) for x in (found.key, found.value)]
        self.key_grad, self.value_grad = (_with_rows_as_columns(x).zero_() for x in of_keys)
        if found.table is not None:
            texts = part.batches.stop - part.batches.start
            self.table_grad = torch.zeros_like(
                found.table[part.heads].expand(texts, -1, -1), memory_format=torch.contiguous_format
            )
        apart = range(part.heads.start, part.heads.stop) if self.problem.kept is not None else ()
        for block in self.problem.tiling.of_texts(part.batches).blocks(self.block_rows):
            # With pruning, each head keeps different keys.
            for heads in [slice(head, head + 1) for head in apart] or [part.heads]:
                self._block(block, heads)
        # Turn the sums into (Lk, D), a few matrices at a time.
        for matrices in (x.view(-1, *x.shape[2:]) for x in of_keys):
            for some in matrices.split(block_length(matrices[0].numel(), NUMBERS)):
                transposed = self.scratch[0].of(*some.mT.shape).copy_(_with_rows_as_columns(some))
                some.copy_(transposed.mT)

    def _block(self, block: Tile, heads: slice) -> None:
        """Add the gradients from a block of queries, which are in reverse order."""
        content, problem, rows, dtype = self.content, self.problem, self.rows, self.problem.dtype
        cut = partial(block.cut_rows, heads=heads)
        # In matrices, the rows of one head are adjacent. A model has the heads of a token side by side, and a reversed
        # copy keeps that.
        query = content.reversed_queries(lambda x: cut(x).contiguous())
        query, out_grad = (self._stacked(x.to(dtype)) for x in (query, cut(rows.out_grad).contiguous().flip(2)))
        # Of all products, those into contiguous matrices are the fastest.
        query_grad = torch.zeros_like(query, memory_format=torch.contiguous_format)
        queries = _Queries(query, out_grad, query_grad)
        if self.bias.key_bias is not None:
            (self.in_bits, _), (self.here, constant) = (b.centred(block, heads) for b in (self.bias_in_bits, self.bias))
            if self.found.row_scale is not None and constant is not None:
                # `log_prior` lacks the constant, so the constant's part is added here.
                cut(self.found.row_scale).add_((cut(rows.lse_grad) * constant).to(dtype))
        tiles = [block._replace(first=first, last=last) for first, last in problem.kept_keys(block, heads.start)]
        # The choice considers all heads and rows of the batch, so it does not depend on how the work is divided. A
        # pruned head is computed alone.
        if rows.inexact is not None and bool(
            rows.inexact[:, :, block.rows].any() if problem.kept is None else cut(rows.inexact).any()
        ):
            self._with_new_softmax(tiles, heads, queries)
        else:
            step = max(MOST_KEYS // 4, min(MOST_KEYS, block_length(query.shape[0] * query.shape[1], NUMBERS)))
            # dS = P (dP + dlse - Σ P dP), and Σ_j P_ij dP_ij = <out_i, dout_i>.
            moment = cut(rows.lse_grad) - torch.linalg.vecdot(cut(rows.out).to(dtype), cut(rows.out_grad).to(dtype))
            shift, moment = (x.flip(2).unsqueeze(-1) for x in (cut(rows.shift), moment))
            for tile in tiles:
                for first, last in ranges_of(tile.first, tile.last, step):
                    piece = tile._replace(first=first, last=last)
                    self._tile(piece, heads, shift, self._stacked(moment), queries)
        shape = (block.number, heads.stop - heads.start, block.shape[0], -1)
        torch.mul(queries.query_grad.view(shape).flip(2), problem.softmax_scale, out=cut(self.found.query))

    def _stacked(self, rows: Tensor) -> Tensor:
        """Reshape ``(b, h, n, ...)`` to the matrices of :class:`_Queries`."""
        return rows.reshape(len(rows) * self.key.shape[1], -1, rows.shape[-1])

    def _keys(self, tensor: Tensor, tile: Tile) -> Tensor:
        """Return the tile's keys of ``(b, h, Lk, D)``, as matrices."""
        cut = tensor[self.part.within(tile.batches), :, tile.keys]
        return cut.view(-1, *cut.shape[2:])

    def _tile(self, tile: Tile, heads: slice, shift: Tensor, moment: Tensor, queries: _Queries) -> None:
        shape = (tile.number, heads.stop - heads.start, *tile.shape)
        weights = self._stacked(self.in_bits.write(self.scratch[0].of(*shape), tile, heads, shift))
        key = self._keys(self.key, tile)
        weights.baddbmm_(queries.query, key.mT, alpha=self.problem.softmax_scale / NATS_PER_BIT).exp2_()
        drop_negligible(weights)
        factor = self.scratch[1].of(*weights.shape)
        torch.baddbmm(moment, queries.out_grad, self._keys(self.value, tile).mT, out=factor)
        self._add(tile, heads, weights, factor, queries, key)

    def _add(self, tile: Tile, heads: slice, weights: Tensor, factor: Tensor, queries: _Queries, key: Tensor) -> None:
        """Add a tile's part of every gradient. The gradient of its logits is ``weights · factor``.

        The product may overwrite ``factor``.
        """
        (query, out_grad, query_grad), keys = queries, tile.shape[1]
        logits_grad = torch.mul(weights, factor, out=self.scratch[1].of(*weights.shape))
        # First, while the numbers are in the cache.
        if self.found.row_scale is not None or self.table_grad is not None:
            self._add_to_scale_and_table(
                tile, heads, logits_grad.view(tile.number, heads.stop - heads.start, *tile.shape)
            )
        key_grad, value_grad = (self._keys(x.mT, tile).mT for x in (self.key_grad, self.value_grad))
        # Products are faster if they write to separate memory.
        value_grad += torch.bmm(
            out_grad.mT, weights, out=self.scratch[2].of(weights.shape[0], out_grad.shape[-1], keys)
        )
        product = torch.bmm(query.mT, logits_grad, out=self.scratch[2].of(weights.shape[0], query.shape[-1], keys))
        key_grad.add_(product, alpha=self.problem.softmax_scale)
        query_grad.baddbmm_(logits_grad, key)
        if self.found.key_bias is None and self.network_grad is None:
            return
        logits_grad = logits_grad.view(tile.number, heads.stop - heads.start, *tile.shape)
        if self.problem.row_scale is not None:
            logits_grad *= self.bias.scale(tile, heads)
        if self.found.key_bias is not None:
            self.found.key_bias[tile.batches, heads, tile.keys] += logits_grad.sum(2)
        if self.network_grad is not None and self.bias.network is not None:
            # With a network, each part has one row of the batch.
            self.bias.network.add_gradients(self.network_grad, tile, heads, logits_grad[0])

    def _add_to_scale_and_table(self, tile: Tile, heads: slice, logits_grad: Tensor) -> None:
        """Add a tile's part of the gradients of row scale and table."""
        distances, by_distance = self.problem.distances, None
        if self.problem.table is not None and self.problem.geometry.offset is not None:
            by_distance = distances.diagonals(tile, logits_grad)
        if self.found.row_scale is not None:
            moments = self.here.moments(tile, heads, logits_grad, by_distance)
            tile.cut_rows(self.found.row_scale, heads).add_(moments.flip(-1))
        if self.table_grad is not None:
            here = slice(heads.start - self.part.heads.start, heads.stop - self.part.heads.start)
            table, scale = self.table_grad[self.part.within(tile.batches), here], None
            if self.problem.row_scale is not None:
                scale = self.bias.scale(tile, heads)
            if by_distance is not None:
                by_distance.add_to(table, scale)
                return
            scaled = logits_grad if scale is None else logits_grad * scale
            for text, of_text in enumerate(table):
                distances.add(of_text, tile.texts()[text], scaled[text : text + 1])

    def _with_new_softmax(self, tiles: list[Tile], heads: slice, queries: _Queries) -> None:
        """Add the gradients from queries whose softmax is recomputed. ``tiles`` contain all keys that they look at."""
        ends = list(accumulate((tile.shape[1] for tile in tiles), initial=0))
        if not ends[-1]:
            return
        shape = (tiles[0].number, heads.stop - heads.start, tiles[0].shape[0], ends[-1])
        logits, blind = self.scratch[0].of(*shape), []
        columns = [slice(start, stop) for start, stop in pairwise(ends)]
        far = self.rows.far
        if far is not None and bool(far[:, :, tiles[0].rows].any()):
            exact = torch.cat([self.bias.in_full(tile, heads) for tile in tiles], dim=-1)
            logits.copy_(without_best(exact)[0])
        for tile, column in zip(tiles, columns, strict=True):
            bias = logits[..., column]
            if far is None or not bool(far[:, :, tile.rows].any()):
                self.here.write(bias, tile, heads, None)
            blind.append(self.bias.blind(tile, bias))
        key, value = (torch.cat([self._keys(x, tile) for tile in tiles], dim=1) for x in (self.key, self.value))
        stacked, nothing = self._stacked(logits), None
        stacked.baddbmm_(queries.query, key.mT, alpha=self.problem.softmax_scale)
        if all(part is not None for part in blind):
            nothing = torch.stack([part.expand(*shape[:-1], 1) for part in blind if part is not None]).all(0)
            logits.masked_fill_(nothing, 0.0)
        weights = drop_negligible(logits.softmax(-1))
        if nothing is not None:
            weights.masked_fill_(nothing, 0.0)
        weights_grad = torch.bmm(queries.out_grad, value.mT, out=stacked)
        mean = torch.linalg.vecdot(weights.view_as(weights_grad), weights_grad)
        lse_grad = self._stacked(tiles[0].cut_rows(self.rows.lse_grad, heads).flip(2).unsqueeze(-1))
        # The order matters: for a row with one key, the difference is exactly 0, and the log-prior may be 1e30.
        factor = weights_grad.sub_(mean.unsqueeze(-1)).add_(lse_grad)
        for tile, column in zip(tiles, columns, strict=True):
            one, other = self._stacked(weights)[..., column], factor[..., column]
            self._add(tile, heads, one, other, queries, key[:, column])
