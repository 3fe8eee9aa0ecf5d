"""Stationary priors in linear memory: no bias matrix, forward or backward.

Each block of queries is one plain attention call whose bias is a view of a table (see ``blocks.py``); causal
masks and windows are ``-inf`` in it. Documents, padding, dense masks, positions that do not step by one and a
logit scale on the prior need a bias in memory, for one block at a time.

The backward pass recomputes the softmax of each block. The table's gradient is the sum of the logits' gradient
along its diagonals; the prior's parameters follow from the table by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from attention_priors.attention.augment import Augmented, augment
from attention_priors.attention.blocks import Bias, Layout, Scratch, total
from attention_priors.attention.problem import Problem, block_length
from attention_priors.priors import Prior, Structure

BUFFER_NUMBERS = 2**18
"""Numbers per working buffer of the backward pass: 1 MiB in float32, which stays in a core's cache."""


def toeplitz(problem: Problem) -> tuple[Tensor, Tensor]:
    """Attention with the stationary terms of the prior in a table and the others in lanes.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``.
    """
    terms = () if problem.prior is None else tuple(problem.prior.terms())
    stationary = [term for term in terms if Structure.STATIONARY in term.structure]
    augmented = augment(problem, [term for term in terms if Structure.STATIONARY not in term.structure])
    return attend_in_blocks(problem, augmented, stationary)


def attend_in_blocks(problem: Problem, augmented: Augmented, terms: Sequence[Prior]) -> tuple[Tensor, Tensor]:
    """Attention over augmented queries and keys, plus the stationary ``terms``.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``.
    """
    query, key, value, row_offset = augmented
    layout = Layout.of(problem, terms)
    table = total([term.log_prior_at(layout.distances, problem.compute_dtype) for term in terms])
    # Views are read off it with strides.
    table = None if table is None else table.contiguous()
    row_scale = problem.scale_per_query if problem.scales_prior and table is not None else None
    # The CPU's kernel wants one width for all three.
    width = max(query.shape[-1], value.shape[-1])
    out, lse = _BlockAttention.apply(  # pyright: ignore[reportGeneralTypeIssues]
        pad(query, (0, width - query.shape[-1])),
        pad(key, (0, width - key.shape[-1])),
        pad(value, (0, width - value.shape[-1])),
        table,
        row_scale,
        layout,
    )
    if row_offset is not None:
        # Where no key is seen there is nothing to add to, and no gradient.
        lse = torch.where(lse == float("-inf"), lse, lse + row_offset)
    return out[..., : value.shape[-1]].to(problem.query.dtype), lse


class _BlockAttention(torch.autograd.Function):
    """Attention in blocks of queries, with gradients for the table and the scale of its rows."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        row_scale: Tensor | None,
        layout: Layout,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value, table, row_scale)
        ctx.layout = layout
        problem = layout.problem
        bias_of = Bias(layout, table, row_scale)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(query.shape[:-1], dtype=problem.compute_dtype, device=query.device)
        for block in layout.blocks():
            if not block.shape[1]:
                out[:, :, block.rows], lse[:, :, block.rows] = 0, float("-inf")
                continue
            bias = bias_of(block)
            part, part_lse = _attend(
                query[:, :, block.rows].flip(2),
                key[:, :, block.keys],
                value[:, :, block.keys],
                bias,
                problem.softmax_scale,
            )
            blind = None if bias is None else bias_of.blind(block, bias)
            if blind is not None:
                part = part.masked_fill(blind, 0.0)
                part_lse = part_lse.masked_fill(blind.squeeze(-1), float("-inf"))
            out[:, :, block.rows], lse[:, :, block.rows] = part.flip(2), part_lse.flip(2)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # A caller who is inside autocast would have the recomputed products rounded.
        with torch.autocast(grads[0].device.type, enabled=False):
            return _BlockAttention._backward(ctx, *grads)

    @staticmethod
    def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out_grad, lse_grad = grads
        query, key, value, table, row_scale = ctx.saved_tensors
        layout: Layout = ctx.layout
        problem = layout.problem
        bias_of = Bias(layout, table, row_scale)
        batch, heads, num_queries, width = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        dtype = problem.compute_dtype
        scale = problem.softmax_scale
        wants_table, wants_scale = ctx.needs_input_grad[3:5]
        has_lse_grad = bool(lse_grad.count_nonzero())

        # The query heads that share a key head are more rows of the same matrix product.
        grouped = (batch, kv_heads, group, num_queries, width)
        query, out_grad, lse_grad = (
            query.reshape(grouped),
            out_grad.reshape(grouped),
            lse_grad.reshape(grouped[:-1]),
        )
        key_dtype, value_dtype = key.dtype, value.dtype
        key, value = key.to(dtype).contiguous(), value.to(dtype).contiguous()
        query_grad = torch.zeros(grouped, dtype=dtype, device=query.device)
        # Transposed: "columns x queries" times "queries x keys" is much the faster product on CPUs.
        key_grad, value_grad = (torch.zeros_like(x.mT, memory_format=torch.contiguous_format) for x in (key, value))
        table_grad = None if table is None or not wants_table else torch.zeros_like(table)
        scale_grad = None if row_scale is None or not wants_scale else torch.zeros_like(row_scale)
        scratch = [Scratch(dtype, query.device) for _ in range(4)]

        for block in layout.blocks():
            rows, keys = block.shape
            if not keys:
                continue
            bias = bias_of(block)
            blind = None if bias is None else bias_of.blind(block, bias)
            queries, out_grads = (x[..., block.rows, :].flip(-2).to(dtype) for x in (query, out_grad))
            lse_grads = lse_grad[..., block.rows].flip(-1)
            for batches, kv in _tiles(batch, kv_heads, group * rows * keys):
                here = slice(kv.start * group, kv.stop * group)
                q, o = (x[batches, kv].reshape(-1, group * rows, width) for x in (queries, out_grads))
                k, v = (x[batches, kv, block.keys].reshape(-1, keys, width) for x in (key, value))
                per_head = (batches.stop - batches.start, here.stop - here.start, rows, keys)
                logits, weights, logits_grad = (buffer.of(len(q), group * rows, keys) for buffer in scratch[:3])

                if bias is not None:
                    logits.view(per_head).copy_(_part(bias, batches, here))
                logits.baddbmm_(q, k.mT, beta=int(bias is not None), alpha=scale)
                if blind is not None:
                    logits.view(per_head).masked_fill_(_part(blind, batches, here), 0.0)
                # A whole new softmax rather than exp(logits - lse): it makes the gradient of a row that sees one
                # key exactly zero, where the log-prior and its derivative may be as large as 1e30.
                torch.softmax(logits, -1, out=weights)
                if blind is not None:
                    weights.view(per_head).masked_fill_(_part(blind, batches, here), 0.0)
                weights_grad = torch.bmm(o, v.mT, out=logits)
                torch.ops.aten._softmax_backward_data.out(weights_grad, weights, -1, dtype, grad_input=logits_grad)
                if has_lse_grad:
                    logits_grad += weights * lse_grads[batches, kv].reshape(-1, group * rows, 1)

                shape = (-1, width, keys)
                value_grad[batches, kv, :, block.keys].view(shape).baddbmm_(o.mT, weights)
                key_grad[batches, kv, :, block.keys].view(shape).baddbmm_(q.mT, logits_grad, alpha=scale)
                q_grad = torch.bmm(logits_grad, k).mul_(scale).view(*per_head[:1], -1, group, rows, width)
                query_grad[batches, kv, :, block.rows] = q_grad.flip(-2)

                by_head = logits_grad.view(per_head)
                if scale_grad is not None:
                    moment = (by_head * _part(bias_of.log_prior(block), batches, here)).sum(-1).flip(-1)
                    part = scale_grad[batches if len(scale_grad) > 1 else slice(None), here, block.rows]
                    part += moment if len(scale_grad) > 1 else moment.sum(0)
                if table_grad is not None:
                    if row_scale is not None:
                        by_head = by_head * _part(bias_of.scale(block), batches, here)
                    layout.add_by_distance(table_grad[here], block, by_head, batches, scratch[3])
        return (
            query_grad.view(batch, heads, num_queries, width).to(query.dtype),
            key_grad.mT.to(key_dtype),
            value_grad.mT.to(value_dtype),
            table_grad,
            scale_grad,
            None,
        )


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Plain attention with a bias: output and log-sum-exp."""
    if query.device.type == "cpu":
        if bias is not None:
            bias = bias.expand(-1, query.shape[1], -1, -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scale
        )
        return out, lse
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // key.shape[1]
    logits = (query @ key.repeat_interleave(group, dim=1).mT).to(wide) * scale
    if bias is not None:
        logits = logits + bias
    out = logits.softmax(-1).to(value.dtype) @ value.repeat_interleave(group, dim=1)
    return out, logits.logsumexp(-1)


def _tiles(batch: int, kv_heads: int, size: int) -> list[tuple[slice, slice]]:
    """Batches and key heads to work on together, so that a buffer of ``size`` numbers each stays small."""
    together = block_length(size, BUFFER_NUMBERS)
    if together >= kv_heads:
        step = together // kv_heads
        return [(slice(b, min(b + step, batch)), slice(0, kv_heads)) for b in range(0, batch, step)]
    return [
        (slice(b, b + 1), slice(h, min(h + together, kv_heads)))
        for b in range(batch)
        for h in range(0, kv_heads, together)
    ]


def _part(tensor: Tensor, batches: slice, heads: slice) -> Tensor:
    """Some batches and heads of a tensor in which either dimension may be 1."""
    tensor = tensor[batches] if tensor.shape[0] > 1 else tensor
    return tensor[:, heads] if tensor.shape[1] > 1 else tensor
