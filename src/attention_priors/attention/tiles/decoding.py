"""One query per text, as in a decoding step.

The whole computation takes as long as a hundred calls of Python. So a step whose log-prior is in the cache skips the
checked problem and the plan (:func:`attend_cached`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attention_priors.attention.logit_scale import ResidualSSMax, SSMax
from attention_priors.attention.observe import of_thread
from attention_priors.attention.operator import nobody_watches
from attention_priors.attention.plan import Plan
from attention_priors.attention.problem import Problem
from attention_priors.attention.tables import cached_row, consecutive_table
from attention_priors.attention.tiles.bias import far_rows
from attention_priors.attention.tiles.forward import attend_plain, is_one_on_cpu
from attention_priors.priors import Prior
from attention_priors.priors.base import checked_lanes, checked_scaled_distance


def attend_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None,
    logit_scale: SSMax | None,
    softmax_scale: float | None,
) -> Tensor | None:
    """Compute a decoding step whose log-prior is cached, without any other option of :func:`attend`.

    Returns:
        Output ``(B, H, 1, Dv)``. None for any other or invalid arguments, which :func:`attend` checks.
    """
    if not (
        nobody_watches(query)
        and not getattr(of_thread, "told", ())
        and type(query) is type(key) is type(value) is Tensor
        and query.dim() == key.dim() == 4
        and is_one_on_cpu(query)
        and torch._C._get_tracing_state() is None
        and not torch.is_autocast_enabled("cpu")
        and isinstance(prior, Prior)
        # Other logit scales may not take an integer.
        and (logit_scale is None or type(logit_scale) in (SSMax, ResidualSSMax))
        and (softmax_scale is None or (type(softmax_scale) is float and 0 < softmax_scale < math.inf))
    ):
        return None
    batch, heads, _, width = query.shape
    rows, shared, number, key_width = shape = key.shape
    if not (
        value.shape == shape
        and key.dtype == value.dtype == query.dtype
        and key.device == value.device == query.device
        and (rows, key_width) == (batch, width)
        and prior.num_heads == heads
        and batch * shared * number * width > 0
        and heads % shared == 0
        and (logit_scale is None or logit_scale.num_heads == heads)
    ):
        return None
    prior.check(causal=True)
    bias = cached_row(prior, number, query.device, query.dtype)
    if bias is None:
        return None
    scaling = float(width**-0.5 if softmax_scale is None else softmax_scale)
    if logit_scale is None:
        return _attend(query, key, value, bias, None, False, scaling)
    scale = logit_scale(number, query.dtype)
    return _attend(query, key, value, bias, scale, logit_scale.include_prior, scaling)


def attend_one(problem: Problem, plan: Plan) -> Tensor | None:
    """Compute a problem with one query per text; None if a row is too far from 0 for float32."""
    geometry = problem.geometry
    query, dtype, number = problem.query, problem.compute_dtype, geometry.num_keys
    stationary, of_keys, factored, scaled = plan.parts(problem)
    # The first key is the farthest, so the first entry belongs to it.
    bias = consecutive_table(stationary, number - 1, 0, query.device, dtype)
    growing = [problem.key_bias, consecutive_table(of_keys, 0, 1 - number, query.device)]
    for term in factored:
        phi, psi = checked_lanes(term, geometry.query_positions, geometry.key_positions, torch.float64)
        growing.append((phi @ psi.unsqueeze(-3).mT).squeeze(-2))
    for term in scaled:
        apart = torch.arange(number - 1, -1, -1, device=query.device)
        network = checked_scaled_distance(term, geometry.query_positions, apart)
        growing.append(network.log_prior().movedim(0, 1).squeeze(-2))
    for part in growing:
        if part is not None:
            # Subtract the last key's bias before rounding.
            part = (part - part[..., -1:]).to(dtype)
            bias = part if bias is None else bias + part
    if bias is not None:
        bias = bias.reshape(-1, query.shape[1], 1, number)
    return _attend(
        query, problem.key, problem.value, bias, problem.row_scale, problem.scales_prior, problem.softmax_scale
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    scales_prior: bool,
    softmax_scale: float,
) -> Tensor | None:
    """Compute one query per text with the bias ``(1 or B, H, 1, Lk)``; None if a row is too far from 0."""
    if row_scale is not None:
        scale = row_scale.unsqueeze(-1)
        query = query * scale
        bias = bias * scale if bias is not None and scales_prior else bias
    out, lse = attend_plain(query, key, value, bias, None, softmax_scale)
    return None if bias is not None and far_rows(lse) is not None else out
