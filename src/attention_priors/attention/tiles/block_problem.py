"""Inputs of the passes over tiles, and gradients of the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import Geometry, block_length
from attention_priors.attention.pruning.bounds import BLOCK
from attention_priors.attention.tiles.bias import Bias, Distances
from attention_priors.attention.tiles.scaled import ScaledBias
from attention_priors.attention.tiles.tiling import FEW_NUMBERS, FEW_PAIRS, Part, Tile, Tiling, divide
from attention_priors.priors.base import ScaledDistance

HEADS_OF_NETWORK = 4
"""Approximate number of heads that are computed together if they share a network, and thus its hidden units."""

Runs: TypeAlias = list[list[list[list[tuple[int, int]]]]]
"""Runs of kept blocks, ``[row of the batch][head][block of queries]``, as pairs of first and one-past-last block."""


def all_of(tensor: Tensor) -> Tensor:
    """Return the whole tensor: the cut that removes nothing."""
    return tensor


EVERY = slice(None)
"""Range of everything."""


def columns_together(tensor: Tensor) -> Tensor:
    """Return the tensor with the numbers of a row adjacent in memory, as the kernels require."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def widened(tensor: Tensor, width: int | None) -> Tensor:
    """Pad rows with zeros up to ``width``; None for no padding."""
    missing = 0 if width is None else width - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing > 0 else tensor


class Content(NamedTuple):
    """Queries, keys and values, and the factor of each query.

    Queries are scaled one tile after another, because the backward pass would keep a copy of all scaled queries.
    """

    query: Tensor
    """``(B, H, Lq, D)``."""
    key: Tensor
    """``(B, Hkv, Lk, D)``."""
    value: Tensor
    """``(B, Hkv, Lk, Dv)``."""
    scale: Tensor | None
    """Factor of each query, ``(B, H, Lq)``; None for 1."""
    softmax_scale: float

    def queries(self, cut: Callable[[Tensor], Tensor], width: int | None = None) -> Tensor:
        """Return some queries, scaled, and padded with zeros up to ``width``.

        Args:
            cut: selects a part of ``(B, H, Lq, ...)``.
            width: width of the result, or None for no padding.
        """
        query = cut(self.query)
        if self.scale is not None:
            query = (query.to(self.scale.dtype) * cut(self.scale).unsqueeze(-1)).to(query.dtype)
        return widened(query, width)

    def reversed_queries(self, cut: Callable[[Tensor], Tensor], width: int | None = None) -> Tensor:
        """Return :meth:`queries` in reverse order, as a copy."""
        query = cut(self.query).flip(2)
        if self.scale is not None:
            # In place: a product in new memory takes twice as long.
            scale = cut(self.scale).flip(2).unsqueeze(-1)
            query = query.to(scale.dtype).mul_(scale).to(query.dtype)
        return widened(query, width)

    def query_gradient(self, scaled: Tensor, wants_scale: bool) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of queries and scale, from the gradient of the scaled queries, which is overwritten."""
        if self.scale is None:
            return scaled.to(self.query.dtype), None
        scale_grad = torch.empty_like(self.scale, memory_format=torch.contiguous_format) if wants_scale else None
        # In blocks, because the products would be another copy of all queries while memory is at its peak.
        step = block_length(scaled.shape[0] * scaled.shape[1] * scaled.shape[3])
        for start in range(0, scaled.shape[2], step):
            rows = slice(start, start + step)
            part, scale = scaled[:, :, rows], self.scale[:, :, rows]
            if scale_grad is not None:
                given = self.query[:, :, rows].to(scale.dtype)
                scale_grad[:, :, rows] = torch.linalg.vecdot(given, part.to(scale.dtype))
            part.mul_(scale.unsqueeze(-1))
        return scaled.to(self.query.dtype), scale_grad


@dataclass(frozen=True)
class BlockProblem:
    """Inputs of the computation besides queries, keys and values."""

    geometry: Geometry
    distances: Distances
    table: Tensor | None
    """Log-prior of each distance, finite, ``(H, N)`` in float64; None for no table."""
    key_bias: Tensor | None
    """Log-prior of each key, finite, ``(B or 1, H, Lk)`` in float64; None for no key biases."""
    inside: Tensor | None
    """Whether the prior lets a query see each distance (a window), ``(N,)``; None for all distances."""
    scaled: ScaledDistance | None
    """Part of the log-prior that is a network of a scaled distance, in float64; None for no network."""
    row_scale: Tensor | None
    """Factor of the log-prior for each query, ``(B, H, Lq)``; None for 1."""
    softmax_scale: float
    dtype: torch.dtype
    """Dtype of biases, logits and log-sum-exps."""
    kept: Tensor | None = None
    """Which blocks of keys each block of queries looks at, ``(B, H, ⌈Lq / 256⌉, ⌈Lk / 256⌉)``; None for all."""

    @cached_property
    def tiling(self) -> Tiling:
        """Tiling of the problem."""
        reach = None
        if self.inside is not None:
            seen = self.distances.values()[self.inside]
            reach = (int(seen.min()), int(seen.max())) if len(seen) else (0, -1)
        return Tiling.of(self.geometry, reach)

    @cached_property
    def scale_keeps_masks(self) -> bool:
        """Whether ``-inf`` times the logit scale is ``-inf``. On a GPU, the answer would take longer than a mask."""
        return self.row_scale is None or (self.row_scale.is_cpu and bool((self.row_scale > 0).all()))

    @cached_property
    def has_gaps(self) -> bool:
        """Whether the prior hides a distance between two that it lets a query see. Requires an offset."""
        if self.inside is None or self.tiling.reach is None:
            return False
        low, high = self.tiling.reach
        return int(self.inside.sum()) <= high - low

    @cached_property
    def hidden(self) -> Tensor | None:
        """Mask of the table, ``(1, N + overhang)``: ``-inf`` at distances that no query sees, or 0; None if all 0."""
        distances, seen = self.distances, self.inside
        if self.geometry.causal and distances.listed is not None:
            past = distances.listed >= 0
            seen = past if seen is None else seen & past
        # If distances fall, future distances come last.
        number = distances.number
        if self.geometry.causal and distances.listed is None:
            number = min(number, max(0, distances.highest + 1))
        zeros = torch.zeros(1, number, dtype=self.dtype, device=self.geometry.device)
        if seen is not None:
            zeros.masked_fill_(~seen[:number], float("-inf"))
        missing = distances.number + distances.overhang - number
        if missing == 0 and (seen is None or bool(seen.all())):
            return None
        return pad(zeros, (0, missing), value=float("-inf"))

    @cached_property
    def whole(self) -> Tile | None:
        """Tile of all queries and keys, for few pairs or a single query; otherwise None."""
        geometry, segments = self.geometry, self.tiling.segments
        pairs = geometry.num_queries * geometry.num_keys
        if (pairs > FEW_PAIRS and geometry.num_queries > 1) or pairs * geometry.batch * geometry.heads > FEW_NUMBERS:
            return None
        if len(segments) > 1 or self.kept is not None:
            return None
        first, last = self.tiling.keys_of(segments[0], 0, geometry.num_queries)
        return segments[0]._replace(first=first, last=last)

    @cached_property
    def runs(self) -> Runs | None:
        """Runs of kept blocks; None if all blocks are kept."""
        return None if self.kept is None else _kept_runs(self.kept)

    @cached_property
    def whole_heads(self) -> list[list[bool]]:
        """Whether each head of each row of the batch keeps all blocks."""
        assert self.kept is not None
        return self.kept.flatten(2).all(-1).tolist()

    def kept_keys(self, block: Tile, head: int) -> list[tuple[int, int]]:
        """Return the ranges of keys that a block of queries looks at. The block has one row of the batch."""
        ranges = [(block.first, block.last)]
        if self.runs is not None:
            runs = self.runs[block.batches.start][head][block.start // BLOCK]
            ranges = [(max(first * BLOCK, block.first), min(last * BLOCK, block.last)) for first, last in runs]
        return [(first, last) for first, last in ranges if first < last]

    def is_large(self, pairs: int) -> bool:
        """Return whether the device is a CPU and there are ``pairs`` query-key pairs or more, over batch and heads."""
        number = sum(math.prod(tile.shape) * tile.number for tile in self.tiling.segments) * self.geometry.heads
        return self.geometry.device.type == "cpu" and number >= pairs

    def parts(self, kv_heads: int, unit: int, most: int | None, at_once: bool) -> list[Part]:
        """Divide batch and heads into parts, which are computed one after another or at once.

        Args:
            kv_heads: number of key heads.
            unit: number of heads that stay together. Either 1, or all that share a key head.
            most: largest number of matrices (heads of rows of the batch) in a part, or None.
            at_once: whether threads share the parts. If so, there are more parts than threads, so that a thread
                computes fewer parts while another process slows it down.
        """
        batch, heads = self.geometry.batch, self.geometry.heads
        count = 1 if most is None else -(-batch * heads // most)
        if at_once and torch.get_num_threads() > 1:
            count = max(count, 2 * torch.get_num_threads())
        if self.scaled is not None:
            # One row of the batch and some heads: gradients add up in a fixed order, whatever is computed at once.
            count = batch * max(1, heads // HEADS_OF_NETWORK)
        if self.kept is not None:
            count = batch * heads  # each head keeps keys of its own
        return divide(batch, heads, kv_heads, count, unit)

    def levels(self, rows: int, nats: float, least: int) -> list[int]:
        """Return, for each head, ``rows`` halved until scaled key biases change by at most ``nats`` along a block.

        The engine subtracts a block's best bias. Rows that are still far from 0 take slower paths. Blocks shorter than
        ``least`` would be slower.
        """
        levels = [rows] * self.geometry.heads
        if self.key_bias is None or self.hidden is None:
            return levels  # all queries see the best bias
        number = self.key_bias.shape[-1]
        scale = 1.0 if self.row_scale is None else self.row_scale.abs().amax((0, 2))
        while rows > least:
            apart = min(rows, self.geometry.num_queries, number) - 1
            change = self.key_bias[..., apart:] - self.key_bias[..., : number - apart]
            steep = (change.abs().amax((0, 2)) * scale > nats).tolist()
            if not any(steep):
                break
            rows //= 2
            levels = [min(level, rows) if is_steep else level for level, is_steep in zip(levels, steep, strict=True)]
        return levels

    def scaled_bias(self, dtype: torch.dtype, unit: float = 1.0) -> ScaledBias | None:
        """Return the bias of the network, with ``unit`` as the value of one nat; None without a network."""
        return None if self.scaled is None else ScaledBias(self.scaled, self.distances, dtype, unit)

    def bias(self, unit: float = 1.0) -> Bias:
        """Return the bias of the problem, with ``unit`` as the value of one nat."""
        return Bias(self, self.tiling, unit)


def _kept_runs(kept: Tensor) -> Runs:
    """Return the runs of the boolean ``kept (B, H, ⌈Lq / 256⌉, ⌈Lk / 256⌉)``."""
    edges = pad(kept.to(torch.int8), (1, 1)).diff(dim=-1).nonzero().tolist()
    batch, heads, blocks, _ = kept.shape
    runs: Runs = [[[[] for _ in range(blocks)] for _ in range(heads)] for _ in range(batch)]
    for (b, h, i, start), (*_, stop) in zip(edges[::2], edges[1::2], strict=True):
        runs[b][h][i].append((start, stop))
    return runs


class Gradients(NamedTuple):
    """Gradients of all inputs that have one."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor | None
    key_bias: Tensor | None
    row_scale: Tensor | None
    scaled: ScaledDistance | None = None

    def unscaled(self, content: Content, wants_scale: bool) -> Gradients:
        """Convert gradients of scaled queries to gradients of queries, and complete the gradient of the scale.

        ``row_scale`` holds the part of that gradient that comes from the prior.
        """
        query, scale = content.query_gradient(self.query, wants_scale)
        if scale is not None and self.row_scale is not None:
            scale += self.row_scale
        key, value = self.key.to(content.key.dtype), self.value.to(content.value.dtype)
        return self._replace(query=query, key=key, value=value, row_scale=scale)
