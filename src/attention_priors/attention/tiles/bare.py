"""A short context without given positions, an ``attn_mask`` or interleaved documents.

It needs two products and a softmax, or one call of PyTorch's kernel. Tiles and table views make long contexts fast, but
their setup takes longer than the whole computation here. The same is true of one query
(:mod:`~attention_priors.attention.tiles.decoding`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import Geometry
from attention_priors.attention.operator import (
    attend_backward,
    geometry_arguments,
    nobody_watches,
    refuse_forward_mode,
)
from attention_priors.attention.plan import Plan
from attention_priors.attention.problem import Problem
from attention_priors.attention.tables import consecutive_table, table_of_keys, table_of_network, visible_at
from attention_priors.attention.tiles.arithmetic import diagonals
from attention_priors.attention.tiles.bias import far_rows
from attention_priors.attention.tiles.block_problem import Content, Gradients, all_of, columns_together
from attention_priors.attention.tiles.decoding import attend_one
from attention_priors.attention.tiles.forward import AVX512, attend_plain, is_one_on_cpu
from attention_priors.attention.tiles.one_tile import gradients, logits_of, stacked
from attention_priors.precision import compute_dtype_of, drop_negligible, without_autocast
from attention_priors.priors import Prior
from attention_priors.priors.base import checked_scaled_distance

SHORT_PAIRS = 2**17
"""Largest number of query-key pairs (362 tokens) for which two products and a softmax are faster than tiles."""
SHORT_NUMBERS = 2**20
"""Largest number of logits that are computed at once. Larger matrices do not fit in a core's cache."""
FUSED_ROWS = 192 if AVX512 else SHORT_PAIRS + 1
"""Number of queries from which PyTorch's kernel is faster than two products and a softmax, without a backward pass.
Without AVX-512, no short context has as many."""
LOWEST = -1e30
"""Lowest bias of a visible key. In float32, lower biases might become ``-inf``, as if the key was hidden."""


def attend_bare(problem: Problem, plan: Plan, *, need_lse: bool) -> tuple[Tensor, Tensor | None] | None:
    """Compute a decoding step or a short context; return None for any other problem.

    The result is also None if a row is too far from 0.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``. Without ``need_lse``, the log-sum-exp is None.
    """
    query, geometry = problem.query, problem.geometry
    if (
        geometry.has_given_positions
        or geometry.attn_mask is not None
        or problem.kept is not None
        or (plan.unpruned is None and problem.tolerance > 0)
        or query.device.type != "cpu"
        or not nobody_watches(query, learning=True)
    ):
        return None
    if geometry.num_queries > 1:
        return _attend_short(problem, plan, need_lse) if _is_short(geometry) else None
    hides = geometry.has_masks or any(type(term).visible_at is not Prior.visible_at for term in problem.terms)
    if hides or need_lse or torch.is_grad_enabled() or not is_one_on_cpu(query):
        return None
    out = attend_one(problem, plan)
    return None if out is None else (out, None)


def _is_short(geometry: Geometry) -> bool:
    """Return whether :func:`_attend_short` supports sizes, positions and documents of several queries."""
    pairs = geometry.num_queries * geometry.num_keys
    return (
        pairs <= SHORT_PAIRS
        and pairs * geometry.heads <= SHORT_NUMBERS
        and (not geometry.causal or geometry.num_queries == geometry.num_keys)
        # Otherwise, documents are interleaved, and distances differ from those of slots.
        and geometry.offset is not None
    )


def _attend_short(problem: Problem, plan: Plan, need_lse: bool) -> tuple[Tensor, Tensor | None] | None:
    """Compute a short context; None where lanes need the operator, or rows are too far from 0."""
    geometry, scale, device = problem.geometry, problem.row_scale, problem.query.device
    stationary, of_keys, factored, scaled = plan.parts(problem)
    if factored:
        return None
    lowest = 0 if geometry.causal else 1 - geometry.num_queries
    inside = visible_at(problem.terms, geometry.num_keys - 1, geometry.num_keys - lowest, device)
    table = consecutive_table(stationary, geometry.num_keys - 1, lowest, device)
    for term in scaled:
        apart = torch.arange(geometry.num_keys - 1, lowest - 1, -1, device=device)
        alike = table_of_network(checked_scaled_distance(term, geometry.query_positions, apart))
        if alike is None:
            return None
        table = alike if table is None else table + alike
    key_bias, best = table_of_keys(of_keys, geometry, problem.key_bias), None
    if key_bias is not None:
        # Subtract the best before rounding.
        best = key_bias.detach().amax(-1, keepdim=True)
        key_bias = key_bias - best
    learning = torch.is_grad_enabled()
    run = _ShortContext.apply if learning else _forward
    fused = inside is None and not learning and _suits_kernel(problem.query, problem.value)
    number, found = SHORT_NUMBERS // (geometry.heads * geometry.num_queries * geometry.num_keys), []
    if fused and not geometry.has_masks and not problem.scales_prior and (key_bias is None or len(key_bias) == 1):
        number = geometry.batch  # all rows share a bias, and there are no logits in memory
    tensors = (problem.query, problem.key, problem.value, key_bias, scale)
    for start, query, key, value, bias, factor in _rows_of(geometry.batch, number, *tensors):
        texts = slice(start, start + number)
        how = _How(problem.softmax_scale, problem.scales_prior, geometry, texts, need_lse, learning, fused, inside)
        found.append(run(query, key, value, table, bias, factor, how)[:2])
    out, lse = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
    if far_rows(lse) is not None:
        return None
    if best is not None and need_lse:
        lse = lse + (best if scale is None or not problem.scales_prior else best * scale)
    return out, lse if need_lse else None


def _suits_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether PyTorch's kernel supports widths and dtype, and is faster than two products."""
    return query.shape[2] >= FUSED_ROWS and query.dtype == torch.float32 and query.shape[-1] == value.shape[-1]


def _rows_of(batch: int, number: int, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield the first of each ``number`` rows of the batch, and these rows of the tensors that have them."""
    if batch <= number:
        return iter([(0, *tensors)])
    starts = range(0, batch, number)
    # Unlike gradients of slices, gradients of a split are joined once.
    parts = ([x] * len(starts) if x is None or len(x) == 1 else x.split(number) for x in tensors)
    return zip(starts, *parts, strict=True)


class _How(NamedTuple):
    """Settings of a short context, all without gradients."""

    softmax_scale: float
    scales_prior: bool
    geometry: Geometry
    texts: slice
    """Rows of the geometry's batch."""
    need_lse: bool
    learning: bool
    """Whether a backward pass may follow."""
    fused: bool
    """Whether PyTorch's kernel computes products and softmax."""
    inside: Tensor | None
    """Which distances the prior lets a query see, boolean ``(N,)``; None for all."""


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    key_bias: Tensor | None,
    row_scale: Tensor | None,
    how: _How,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute attention with two products and a softmax or, if ``how.fused``, with PyTorch's kernel.

    Returns:
        Output, log-sum-exp (or each row's highest logit without ``need_lse``), weights (None if fused), and the
        log-prior if a logit scale multiplies it.
    """
    softmax_scale, scales_prior, geometry, texts, need_lse, learning, fused, inside = how
    causal, allowed = geometry.causal, geometry.allowed(slice(None), slice(None), texts)
    rows, number, dtype = query.shape[2], key.shape[2], compute_dtype_of(query)
    # The bias of queries in reverse order needs no memory.
    reverse = fused and allowed is None and not scales_prior
    apart = table is None or scales_prior
    if row_scale is not None and table is not None and scales_prior and not learning:
        apart = not bool((row_scale > 0).all())  # a positive scale keeps a mask of -inf
    if table is None:
        bias = query.new_zeros(1, 1, 1, 1, dtype=dtype)
    else:
        table = table.to(dtype).clamp(min=LOWEST)
        if inside is not None and not apart:
            table = table.masked_fill(~inside, -math.inf)
        bias = _by_distance(table, rows, number, causal, 0.0 if apart else -math.inf, reverse)
    if key_bias is not None:
        bias = bias + key_bias.to(dtype).clamp(min=LOWEST).unsqueeze(-2)
    log_prior = bias if scales_prior else None
    if row_scale is not None:
        query = Content(query, key, value, row_scale, softmax_scale).queries(all_of)
        if scales_prior:
            factor = row_scale.unsqueeze(-1)
            fits = table is not None and len(factor) in (1, len(bias))
            bias = bias.mul_(factor) if fits and not learning else bias * factor
    if apart and (causal or inside is not None):
        # The logit scale must not multiply the mask.
        mask = query.new_zeros(1, number if causal else number + rows - 1, dtype=dtype)
        mask = mask if inside is None else mask.masked_fill(~inside, -math.inf)
        hidden = _by_distance(mask, rows, number, causal, -math.inf, reverse)
        bias = bias.add_(hidden) if scales_prior and bias.shape[2:] == hidden.shape[2:] else bias + hidden
    if allowed is not None:
        # Much faster than torch.where over all heads.
        bias = bias + query.new_zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -math.inf)
    if fused:
        blind = None if allowed is None else (geometry.visible_keys[texts] == 0).unsqueeze(-1)
        blind = blind if blind is not None and bool(blind.any()) else None
        query = query.flip(2) if reverse else query
        out, lse = attend_plain(query, key, value, bias, blind, softmax_scale)
        return *((out.flip(2), lse.flip(2)) if reverse else (out, lse)), None, log_prior
    with without_autocast("cpu"):
        logits = logits_of(query, key, bias, softmax_scale)
        lse = logits.amax(-1)
        blind = None
        if (allowed is not None or inside is not None) and bool((lse == -math.inf).any()):
            blind = lse.unsqueeze(-1) == -math.inf
            logits.masked_fill_(blind, 0.0)
        weights = torch._softmax(logits, -1, False, out=logits)  # pyright: ignore[reportPrivateImportUsage]
        if need_lse:
            # The largest weight is exp(highest - lse). A separate exponential would be slow where it underflows.
            lse -= weights.amax(-1).log_()
        drop_negligible(weights)
        if blind is not None:
            weights.masked_fill_(blind, 0.0)
        out = torch.bmm(stacked(weights, key.shape[1]), stacked(value, key.shape[1]))
    return out.view(*query.shape[:3], value.shape[-1]).to(query.dtype), lse, weights, log_prior


def _by_distance(table: Tensor, rows: int, number: int, causal: bool, beyond: float, reverse: bool) -> Tensor:
    """Return the entry of each pair's distance, ``(1, H, rows, number)``, from a table of falling distances ``(H, N)``.

    Under a causal mask the table ends at distance 0, and later keys get ``beyond``. With queries in ``reverse`` order,
    the result is a view.
    """
    table = columns_together(torch.constant_pad_nd(table, (0, rows - 1), beyond) if causal else table)
    # Counted from the last query, each row starts one entry later than the row before.
    entries = table.as_strided((1, len(table), rows, number), (0, table.stride(0), 1, 1))
    return entries if reverse else entries.flip(2)


class _ShortContext(torch.autograd.Function):
    """Autograd function of :func:`_forward`, with gradients of output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *given, ctx.how = inputs
        out, lse, *kept = _forward(*inputs)
        ctx.save_for_backward(*given, out, lse, *kept)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, table, key_bias, row_scale, out, lse, weights, log_prior = ctx.saved_tensors
        softmax_scale, scales_prior, geometry, texts, need_lse, _, _, inside = ctx.how
        out_grad = torch.zeros_like(out) if grads[0] is None else grads[0]
        # The last four are parts of a network, which is in the table here.
        wanted = (*ctx.needs_input_grad[:6], *[False] * 4)
        if torch.is_grad_enabled():
            # The operator raises the error about second derivatives.
            # A query that sees no key has no weights, and keeps its -inf.
            lse = lse if need_lse else lse - weights.amax(-1).clamp(min=1e-30).log()
            highest, lowest = key.shape[2] - 1, 0 if geometry.causal else 1 - query.shape[2]
            of_prior = (table, key_bias, row_scale, scales_prior, inside, None, highest, highest - lowest + 1)
            masks = (x[texts] if isinstance(x, Tensor) else x for x in geometry_arguments(geometry))
            inputs = (query, key, value, softmax_scale, *of_prior, *[None] * 4, *masks, None, False)
            found = attend_backward(out_grad, grads[1], out, lse.double(), wanted, *inputs)
            given = [grad if want else None for grad, want in zip(found, wanted, strict=True)]
            return *given[:6], None
        content = Content(query, key, value, row_scale, softmax_scale)
        table_grad = bias_grad = scale_grad = None
        with without_autocast("cpu"):
            of_tile = gradients(content.queries(all_of), key, value, weights, (out_grad, grads[1]), softmax_scale)
            logits = of_tile.logits
            if scales_prior:
                scale_grad = (logits * log_prior).sum(-1) if wanted[5] else None
                logits.mul_(row_scale.unsqueeze(-1))
            if wanted[3]:
                table_grad = _along_diagonals(logits, geometry.causal).to(table.dtype)
            if wanted[4]:
                bias_grad = logits.sum(2)
                bias_grad = (bias_grad if len(key_bias) > 1 else bias_grad.sum(0, keepdim=True)).to(key_bias.dtype)
            all_found = Gradients(*of_tile[:3], table_grad, bias_grad, scale_grad).unscaled(content, wanted[5])
        return *all_found[:6], None

    jvp = staticmethod(refuse_forward_mode)


def _along_diagonals(logits: Tensor, causal: bool) -> Tensor:
    """Sum ``(B, H, n, e)`` over the batch and over pairs of one distance. Return ``(H, N)``, by falling distances."""
    rows = logits.shape[2]
    if not causal:
        return diagonals(pad(logits.flip(2), (rows, 0))).sum((0, 2))
    # Beyond the diagonal are zeros. A row of the view joins the zeros at the end of a row with the start of the next
    # row, so that its columns are diagonals. Entry (0, 0) is in no row of the view.
    strides = (*logits.stride()[:2], rows + 1, 1)
    sums = logits.as_strided((*logits.shape[:2], rows - 1, rows), strides, logits.storage_offset() + 2).sum((0, 2))
    sums[:, -1] += logits[:, :, 0, 0].sum(0)
    return sums
