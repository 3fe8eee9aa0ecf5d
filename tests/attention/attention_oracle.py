"""Attention by its definition in float64, written without the library's attention code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attention_cases import Case
from torch import Tensor


def positions_of(case: Case) -> tuple[Tensor, Tensor]:
    """Return query positions ``(B, Lq)`` and key positions ``(B, Lk)``, with defaults filled in."""
    batch, num_queries, num_keys = len(case.query), case.query.shape[2], case.key.shape[2]
    if case.key_positions is not None:
        keys = case.key_positions.expand(batch, -1)
    elif case.document_ids is not None:
        rows = []
        for ids in case.document_ids.tolist():
            rows.append([ids[:slot].count(ids[slot]) for slot in range(num_keys)])
        keys = torch.tensor(rows)
    else:
        keys = torch.arange(num_keys).expand(batch, -1)
    if case.query_positions is not None:
        return case.query_positions.expand(batch, -1), keys
    if num_queries <= num_keys:
        return keys[:, num_keys - num_queries :], keys
    return torch.stack([row[-1] - torch.arange(num_queries - 1, -1, -1) for row in keys]), keys


def visibility_of(case: Case) -> Tensor:
    """Return the visibility ``(B, H, Lq, Lk)`` from causality, documents, padding and dense mask, without the prior's
    window.
    """
    batch, heads, num_queries, _ = case.query.shape
    num_keys = case.key.shape[2]
    queries, keys = positions_of(case)
    visible = torch.ones(batch, heads, num_queries, num_keys, dtype=torch.bool)
    if case.causal:
        visible &= (queries[:, :, None] >= keys[:, None, :])[:, None]
    if case.document_ids is not None:
        own = case.document_ids[:, num_keys - num_queries :]
        visible &= (own[:, :, None] == case.document_ids[:, None, :])[:, None]
    if case.key_padding_mask is not None:
        visible &= ~case.key_padding_mask[:, None, None, :]
    mask = case.attn_mask
    if mask is not None:
        visible &= ~mask if mask.dtype == torch.bool else ~torch.isneginf(mask)
    return visible


@dataclass(frozen=True)
class Dense:
    """A problem as dense matrices ``(B, H, Lq, Lk)`` in float64."""

    logits: Tensor
    """Finite logits. Only logits of ``seen`` pairs have a meaning."""
    seen: Tensor
    weights: Tensor
    value: Tensor
    prior_scale: Tensor
    """Factor of the log-prior, ``(B, H, Lq, 1)``: the logit scale, or 1 if the scale multiplies the content only."""

    @property
    def out(self) -> Tensor:
        """Output, shape ``(B, H, Lq, Dv)``."""
        return self.weights @ self.value

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp, shape ``(B, H, Lq)``."""
        return torch.where(self.seen, self.logits, float("-inf")).logsumexp(-1)


def oracle(case: Case) -> Dense:
    """Compute ``z = c (<q, k> · softmax_scale + K)``, masks and softmax from their definitions."""
    heads, head_dim = case.query.shape[1], case.query.shape[3]
    key, value = (
        torch.stack([tensor[:, h * tensor.shape[1] // heads] for h in range(heads)], dim=1).double()
        for tensor in (case.key, case.value)
    )
    softmax_scale = head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    visible = visibility_of(case)
    scale = torch.ones(*case.query.shape[:3], 1, dtype=torch.float64)
    if case.logit_scale is not None:
        number = visible.sum(-1, keepdim=True)
        if case.visible_keys is not None:
            counts = case.visible_keys
            number = counts.unsqueeze(-1) if counts.dim() == 3 else counts.reshape(-1, 1, counts.shape[-1], 1)
        number = number.clamp(min=1).double()
        scale = case.logit_scale.s.double()[:, None, None] * number.log()
    logits = torch.einsum("bhid,bhjd->bhij", case.query.double(), key) * softmax_scale
    seen = visible
    bias: Tensor | float = 0.0
    if case.prior is not None:
        bias = case.prior.log_prior(*positions_of(case), dtype=torch.float64)
        seen = visible & ~torch.isneginf(bias)
        bias = bias.masked_fill(torch.isneginf(bias), 0.0)
    if case.key_bias is not None:
        own = torch.stack([case.key_bias[:, h * case.key_bias.shape[1] // heads] for h in range(heads)], dim=1)
        bias = bias + own.double().unsqueeze(-2)
    if case.logit_scale is None or case.logit_scale.include_prior:
        logits = scale * (logits + bias)
    else:
        logits = scale * logits + bias
    if case.attn_mask is not None and case.attn_mask.is_floating_point():
        logits = logits + case.attn_mask.double().masked_fill(torch.isneginf(case.attn_mask), 0.0)
    highest = torch.where(seen, logits, float("-inf")).amax(-1, keepdim=True).clamp(min=-1e300).detach()
    exponentials = torch.where(seen, logits - highest, float("-inf")).exp()
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)
    alone = case.logit_scale is not None and not case.logit_scale.include_prior
    return Dense(logits, seen, weights, value, torch.ones_like(scale) if alone else scale)
