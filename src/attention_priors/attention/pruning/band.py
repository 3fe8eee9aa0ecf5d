"""Log-sum-exps over the keys near a prior's peak: lower bounds of those over all keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.pruning.bounds import in_blocks, products
from attention_priors.attention.tiles.block_problem import BlockProblem
from attention_priors.precision import log_sum_exp

BAND_ROWS = 64
"""Queries that read one range of keys near the peak."""
BAND = 16
"""Distances on each side of the prior's peak where the sum over keys is computed, not bounded."""
BAND_OF_ONE_QUERY = 256
"""``BAND`` for a single query, whose only lower bound is the band: means of the log-prior would cost too much."""


class Band:
    """Keys about ``peak`` tokens before each query, whose logits are computed.

    A window of ``rows`` consecutive queries reads one range of ``rows + 2 reach`` keys. Results have one dimension of
    windows, ``w``, after the batch.

    Args:
        query: Queries, ``(B, H, Lq, D)``.
        key: Keys, ``(B, Hkv, Lk, D)``.
        problem: All other inputs of attention, with an offset and without dense masks.
        heads: Heads with this peak. If heads with different peaks share keys, a single head.
        peak: Distance in the middle of the band.
    """

    def __init__(self, query: Tensor, key: Tensor, problem: BlockProblem, heads: slice, peak: int) -> None:
        geometry, group = problem.geometry, query.shape[1] // key.shape[1]
        assert geometry.offset is not None
        self.problem, self.heads = problem, heads
        self.query, self.key = query[:, heads], key[:, heads.start // group : (heads.stop - 1) // group + 1]
        reach = BAND if geometry.num_queries > 1 else BAND_OF_ONE_QUERY
        self.rows = min(BAND_ROWS, geometry.num_queries)
        self.width = self.rows + 2 * reach
        """Number of keys that a window of queries reads."""
        self.size = geometry.batch * (heads.stop - heads.start) * self.rows * self.width
        """Number of logits of a window."""
        self.ahead = geometry.offset - peak - reach
        """Slot of a window's first key, relative to its first query."""
        self.table, self.best, self.inside = self._read_table(peak + reach)

    def _read_table(self, farthest: int) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return the part of the table that every window reads.

        Returns:
            Log-priors minus the best, ``(h, rows, width)``, or None without a table; the best, ``(h, 1, 1)``; and
            whether each distance is visible, ``(rows, width)``.
        """
        problem, distances = self.problem, self.problem.distances
        index = torch.arange(1 - self.rows, self.width, device=problem.geometry.device)
        index += distances.highest - farthest
        here = index.clamp(0, distances.number - 1)
        inside = index == here if problem.inside is None else (index == here) & problem.inside[here]

        def of_pairs(numbers: Tensor) -> Tensor:
            # Later queries are farther from the same key.
            return numbers.unfold(-1, self.width, 1).flip(-2).contiguous()

        if problem.table is None:
            return None, None, of_pairs(inside)
        line = problem.table.detach()[self.heads][:, here].masked_fill(~inside, -math.inf)
        best = line.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        # Hidden numbers are finite, because a logit scale may be 0.
        line = (line - best).masked_fill(~inside, 0.0)
        return of_pairs(line.to(problem.dtype)), best.unsqueeze(-1), of_pairs(inside)

    def lower_bounds(self, queries: slice) -> Tensor:
        """Return the log-sum-exp over the band for some queries, ``(B, h, n)``."""
        problem, geometry = self.problem, self.problem.geometry
        dtype, rows, count = problem.dtype, self.rows, queries.stop - queries.start
        number, start = -(-count // rows), queries.start + self.ahead

        def of_queries(numbers: Tensor) -> Tensor:
            """Divide ``(..., Lq)`` into ``(..., w, rows)``."""
            return in_blocks(numbers[..., queries], rows, 0)

        def of_keys(numbers: Tensor, nothing: float) -> Tensor:
            """Divide ``(..., Lk)`` into ``(..., w, width)``."""
            stop = start + (number - 1) * rows + self.width
            inner = numbers[..., max(start, 0) : max(stop, 0)]
            before = min(max(-start, 0), stop - start)
            edges = (before, stop - start - before - inner.shape[-1])
            return (pad(inner, edges, value=nothing) if max(edges) > 0 else inner).unfold(-1, self.width, rows)

        first, last = (of_queries(slots)[:, :, None, :, None] for slots in geometry.slot_range)
        slots = of_keys(torch.arange(geometry.num_keys, device=first.device), -1)[:, None, None]
        seen = (slots >= first) & (slots < last) & self.inside
        if geometry.key_padding_mask is not None:
            seen = seen & ~of_keys(geometry.key_padding_mask, True)[:, :, None, None]
        query = of_queries(self.query.mT).permute(0, 3, 1, 4, 2).to(dtype)
        key = of_keys(self.key.mT, 0.0).permute(0, 3, 1, 4, 2).to(dtype)
        logits = products((query * problem.softmax_scale).flatten(0, 1), key.flatten(0, 1))
        logits = logits.unflatten(0, (-1, number))
        bias, constant = self.table, self.best
        if problem.key_bias is not None:
            keys = of_keys(problem.key_bias.detach()[:, self.heads], 0.0).transpose(1, 2).unsqueeze(-2)
            unseen = ~seen.any(-2, keepdim=True)
            best = keys.masked_fill(unseen, -math.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
            keys, constant = (keys - best).masked_fill(unseen, 0.0), best if constant is None else best + constant
            bias = keys.to(dtype) if bias is None else bias + keys.to(dtype)
        scale = None
        if problem.row_scale is not None:
            scale = of_queries(problem.row_scale.detach()[:, self.heads]).transpose(1, 2).unsqueeze(-1)
        if bias is not None:
            logits.add_(bias if scale is None else bias * scale)
        # One mask for all heads: on CPUs, adding it is several times as fast as masked_fill.
        logits.add_(torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf))
        found = log_sum_exp(logits)
        if constant is not None:
            constant = constant if scale is None else constant * scale
            found = (found + constant.squeeze(-1)).to(dtype)
        return found.transpose(1, 2).flatten(2)[..., :count]
