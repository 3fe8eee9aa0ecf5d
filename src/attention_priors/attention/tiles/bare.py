"""Problems as they mostly are, a step of decoding or a short context: nothing is hidden but the future.

Two products, or one call of PyTorch's kernel, and little around them. What makes long texts fast, tiles and views of a
table, takes longer to set up than these take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.operator import attend_backward, nobody_watches, refuse_forward_mode
from attention_priors.attention.plan import Plan
from attention_priors.attention.problem import Problem
from attention_priors.attention.tables import consecutive_table
from attention_priors.attention.tiles.arithmetic import diagonals
from attention_priors.attention.tiles.bias import far_rows
from attention_priors.attention.tiles.forward import FLASH_ON_CPU, is_one_on_cpu, logits_of_one, mean_of_one
from attention_priors.attention.tiles.one_tile import gradients
from attention_priors.attention.tiles.tiling import FEW_NUMBERS, FEW_PAIRS
from attention_priors.precision import compute_dtype_of, without_autocast
from attention_priors.priors import Prior
from attention_priors.priors.base import checked_lanes

VIEWED_PAIRS = 2**17
"""Pairs of a query and a key up to which a forward pass alone is one call whose bias is a view of the table."""


def attend_bare(problem: Problem, plan: Plan, *, need_lse: bool) -> tuple[Tensor, Tensor | None] | None:
    """Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``, or None unless needed; None for any other problem.

    Also None where a row is too far from 0 for float32.
    """
    query, geometry = problem.query, problem.geometry
    if (
        not geometry.is_plain
        or geometry.has_given_positions
        or problem.kept is not None
        or problem.tolerance > 0
        or query.device.type != "cpu"
        or not nobody_watches(query, learning=True)
        or any(type(term).visible_at is not Prior.visible_at for term in problem.terms)
    ):
        return None
    if geometry.num_queries > 1:
        return _attend_short(problem, plan)
    return None if need_lse or torch.is_grad_enabled() or not is_one_on_cpu(query) else _attend_one(problem, plan)


# ---- one query per text


def _attend_one(problem: Problem, plan: Plan) -> tuple[Tensor, None] | None:
    geometry = problem.geometry
    query, scale, dtype, number = problem.query, problem.row_scale, problem.compute_dtype, geometry.num_keys
    stationary, of_keys, factored = plan.parts(problem)
    # The first entry is that of the first key, which is the farthest.
    bias = consecutive_table(stationary, number - 1, 0, query.device, dtype)
    growing = [problem.key_bias, consecutive_table(of_keys, 0, 1 - number, query.device)]
    for term in factored:
        phi, psi = checked_lanes(term, geometry.query_positions, geometry.key_positions, torch.float64)
        growing.append((phi @ psi.unsqueeze(-3).mT).squeeze(-2))
    for part in growing:
        if part is not None:
            # Less that of the last key, before it is rounded.
            part = (part - part[..., -1:]).to(dtype)
            bias = part if bias is None else bias + part
    bias = None if bias is None else bias.unsqueeze(-2)
    if scale is not None:
        scale = scale.unsqueeze(-1)
        query = query * scale
        bias = bias * scale if bias is not None and problem.scales_prior else bias
    logits = logits_of_one(query, problem.key, bias, problem.softmax_scale)
    if bias is not None and far_rows(logits.amax(-1)) is not None:
        return None
    return mean_of_one(logits.softmax(-1), problem.value), None


# ---- a short context


def _attend_short(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor] | None:
    query, value, geometry, learning = problem.query, problem.value, problem.geometry, torch.is_grad_enabled()
    pairs = geometry.num_queries * geometry.num_keys
    in_memory = pairs <= FEW_PAIRS and pairs * geometry.batch * geometry.heads <= FEW_NUMBERS
    if not (
        (in_memory or (pairs <= VIEWED_PAIRS and not learning))
        and len(plan.table) == len(problem.terms) > 0
        and problem.key_bias is problem.row_scale is None
        and value.shape[-1] == query.shape[-1]
    ):
        return None
    lowest = 0 if geometry.causal else 1 - geometry.num_queries
    table = consecutive_table(problem.terms, geometry.num_keys - 1, lowest, query.device)
    assert table is not None
    inputs = (query, problem.key, value, table, geometry.causal, problem.softmax_scale)
    out, lse = _ShortContext.apply(*inputs) if learning else _forward(*inputs, in_memory)[:2]
    return None if far_rows(lse) is not None else (out, lse)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, causal: bool, scale: float, in_memory: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and the bias that was added, ``(B, H, Lq, Lk)``."""
    (batch, heads, rows, _), table = query.shape, table.to(compute_dtype_of(query))
    if causal:
        table = pad(table, (0, rows - 1), value=float("-inf"))
    # From the last query on, a row starts where the one before it has its second entry.
    bias = table.as_strided((1, heads, rows, key.shape[2]), (0, table.stride(0), *[table.stride(1)] * 2))
    bias = (bias.flip(2) if in_memory else bias).expand(batch, -1, -1, -1)
    out, lse = FLASH_ON_CPU(query if in_memory else query.flip(2), key, value, attn_mask=bias, scale=scale)
    return (out, lse, bias) if in_memory else (out.flip(2), lse.flip(2), bias)


class _ShortContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        query, key, value, table, *ctx.others = inputs
        out, lse, bias = _forward(*inputs, in_memory=True)
        ctx.save_for_backward(query, key, value, table, out, lse, bias)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (query, key, value, table, out, lse, bias), (causal, scale) = ctx.saved_tensors, ctx.others
        out_grad = torch.zeros_like(out) if grads[0] is None else grads[0]
        if torch.is_grad_enabled():
            # The operator has its own word on second derivatives.
            of_prior = (table, None, None, False, None, None, key.shape[2] - 1, table.shape[1])
            inputs = (query, key, value, scale, *of_prior, *[None] * 5, causal, None, False)
            wanted = [True] * 4 + [False] * 2
            return *attend_backward(out_grad, grads[1], out, lse.double(), wanted, *inputs)[:4], None, None
        with without_autocast("cpu"):
            found = gradients(query, key, value, bias, None, (out_grad, grads[1]), scale)
            table_grad = _along_diagonals(found.logits, causal).to(table.dtype) if ctx.needs_input_grad[3] else None
        return *(x.to(query.dtype) for x in found[:3]), table_grad, None, None

    jvp = staticmethod(refuse_forward_mode)


def _along_diagonals(logits: Tensor, causal: bool) -> Tensor:
    """The sums of ``(B, H, n, e)`` over texts and pairs of one distance: all distances, falling, ``(H, N)``."""
    rows = logits.shape[2]
    if not causal:
        return diagonals(pad(logits.flip(2), (rows, 0))).sum((0, 2))
    # Beyond the diagonal are zeros: what a row lacks at its start, its neighbour has at its end. The first has none.
    strides = (*logits.stride()[:2], rows + 1, 1)
    sums = logits.as_strided((*logits.shape[:2], rows - 1, rows), strides, logits.storage_offset() + 2).sum((0, 2))
    sums[:, -1] += logits[:, :, 0, 0].sum(0)
    return sums
