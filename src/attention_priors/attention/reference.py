"""The dense formula: the specification of every other backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_priors.attention.geometry import block_length
from attention_priors.attention.problem import Problem


class DenseLogits(NamedTuple):
    """Scaled terms of all logits ``z = content + position``, and the mask of hidden keys."""

    content: Tensor
    """Content logits ``c <q_i, k_j> softmax_scale``, including Shaw's vectors, ``(B, H, Lq, Lk)``."""
    position: Tensor | None
    """Finite ``c K`` (``K`` if the logit scale excludes the prior) plus a float ``attn_mask``, minus the row's
    ``constant``. The shape expands to ``(B, H, Lq, Lk)``. None for a uniform prior."""
    constant: Tensor | None
    """Constant subtracted from each row of the log-prior, in float64, ``(B or 1, H, Lq)``; None for 0."""
    hidden: Tensor | None
    """Mask of hidden keys, True = hidden, ``(B or 1, H or 1, Lq, Lk)``; None if all keys are visible."""


def dense_logits(problem: Problem) -> DenseLogits:
    """Return the logits of a problem in float32, or float64 for float64 queries. Memory: ``B · H · Lq · Lk``.

    The log-prior is computed in float64. For float32, a constant is subtracted from each row before rounding.
    """
    dtype = problem.compute_dtype
    group = problem.query.shape[1] // problem.key.shape[1]
    query = problem.query.to(dtype)
    key = problem.key.to(dtype).repeat_interleave(group, dim=1)
    geometry, scale = problem.geometry, problem.row_scale
    content = query @ key.mT * problem.softmax_scale
    relative = problem.relative
    if relative is not None:
        key_vectors = relative.key_vectors.to(dtype)[relative.index(_distance(problem))]
        content = content + problem.softmax_scale * torch.einsum(
            "bhid,bijd->bhij", query, key_vectors.expand(query.shape[0], *[-1] * 3)
        )
    if scale is not None:
        content = content * scale.unsqueeze(-1)

    visible = geometry.visible()
    hidden = None if visible is None else ~visible
    position = constant = None
    if problem.key_bias is not None:
        position = problem.key_bias.double().unsqueeze(-2).expand_as(content)
    if problem.prior is not None:
        log_prior, seen = problem.prior.bias_and_visibility(
            geometry.query_positions, geometry.key_positions, torch.float64
        )
        position = log_prior if position is None else position + log_prior
        if seen is not None:
            outside = ~seen.unsqueeze(-3)
            hidden = outside if hidden is None else hidden | outside
    if position is not None:
        scale = scale if problem.scales_prior else None
        if dtype != torch.float64:
            constant = _best(position, hidden, scale)
            position = (position - constant.unsqueeze(-1)).to(dtype)
        if scale is not None:
            position = position * scale.unsqueeze(-1)
            constant = None if constant is None else constant * scale.double()
    if geometry.attn_mask is not None and geometry.attn_mask.dtype != torch.bool:
        # `hidden` already covers keys at -inf, which would make gradients NaN.
        mask = geometry.attn_mask.to(dtype).clamp(min=torch.finfo(dtype).min)
        position = mask if position is None else position + mask
    return DenseLogits(content, position, constant, hidden)


def reference(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention by its definition: the softmax of :func:`dense_logits`.

    The logits are ``z_ij = c_i (q_i · k_j · softmax_scale + K_ij)``, or ``c_i q_i · k_j · softmax_scale + K_ij`` if the
    logit scale excludes the prior. Masks apply before the softmax.

    Returns:
        Output ``(B, H, Lq, Dv)`` in the query's dtype, log-sum-exp ``(B, H, Lq)``, and attention weights
        ``(B, H, Lq, Lk)`` in the computation's dtype. The log-sum-exp is in float64 if it includes a constant of the
        row. A query that sees no key has output 0, log-sum-exp ``-inf`` and weights 0.
    """
    content, position, constant, hidden = dense_logits(problem)
    logits = content if position is None else content + position
    if hidden is None:
        weights, lse = logits.softmax(-1), logits.logsumexp(-1)
    else:
        blind = hidden.all(-1, keepdim=True)
        logits = logits.masked_fill(hidden & ~blind, float("-inf"))
        weights = logits.softmax(-1).masked_fill(blind, 0.0)
        lse = logits.logsumexp(-1).masked_fill(blind.squeeze(-1), float("-inf"))

    if constant is not None:
        lse = torch.where(torch.isneginf(lse), lse, lse + constant)
    group = problem.query.shape[1] // problem.key.shape[1]
    kept = torch.nn.functional.dropout(weights, problem.dropout_p)
    out = kept @ problem.value.to(kept.dtype).repeat_interleave(group, dim=1)
    relative = problem.relative
    if relative is not None and relative.value_vectors is not None:
        value_vectors = relative.value_vectors.to(kept.dtype)[relative.index(_distance(problem))]
        out = out + torch.einsum("bhij,bijd->bhid", kept, value_vectors.expand(out.shape[0], *[-1] * 3))
    return out.to(problem.query.dtype), lse, weights


def _distance(problem: Problem) -> Tensor:
    geometry = problem.geometry
    return geometry.query_positions.unsqueeze(-1) - geometry.key_positions.unsqueeze(-2)


def _best(bias: Tensor, hidden: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return the best log-prior that each row sees, ``(B or 1, H, Lq)``: the highest, or the lowest if scale < 0.

    Subtracting the best from the row in float64 leaves small numbers at the keys with weight, however far all keys are.
    """
    with torch.no_grad():
        sign = None if scale is None else torch.where(scale < 0, -1.0, 1.0).unsqueeze(-1)
        best = bias if sign is None else bias * sign
        best = (best if hidden is None else best.masked_fill(hidden, float("-inf"))).amax(-1, keepdim=True)
        best = best.masked_fill(torch.isneginf(best), 0.0)
        return (best if sign is None else best * sign).squeeze(-1)


def blockwise(problem: Problem) -> tuple[Tensor, Tensor]:
    """Compute the dense formula one block of queries at a time, with recomputation in the backward pass.

    Memory is linear in length. This engine supports what the faster backends do not: Shaw's vectors, dropout, and a
    float mask with a gradient.
    """
    batch, heads, num_queries, head_dim = problem.query.shape
    width = head_dim if problem.relative is not None else 1
    rows = block_length(batch * max(heads, width) * problem.key.shape[2])

    def some(start: int) -> tuple[Tensor, Tensor]:
        out, lse, _ = reference(problem.rows(slice(start, start + rows)))
        return out, lse

    starts = range(0, num_queries, rows)
    if len(starts) == 1:
        return some(0)
    parts: list[Any] = [checkpoint(some, start, use_reentrant=False) for start in starts]
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)
