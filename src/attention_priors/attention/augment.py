"""Lanes appended to queries and keys.

``<q_i, k_j> · softmax_scale + <phi(i), psi(j)>`` is the dot product, scaled, of ``[q_i, phi(i) / softmax_scale]``
and ``[k_j, psi(j)]`` (GOAT, equations 20 to 24, with the content kept at its full width).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.problem import Problem
from attention_priors.priors import Lanes, Prior, Structure
from attention_priors.priors.base import LOG_PRIOR_FLOOR, join_lanes, per_head

LANES_AT_A_TIME = 8
"""Numbers of float32 in a vector register."""


class Augmented(NamedTuple):
    """Queries, keys and values whose dot products hold content, logit scale and lanes."""

    query: Tensor
    key: Tensor
    value: Tensor
    row_offset: Tensor | None
    """``(B or 1, H, Lq)`` in float64: what is left out of each row's logits, hence of its log-sum-exp."""
    slope: Tensor | None
    """``(H,)`` in float64: nats per token of the key's position, which the lanes leave to a table."""
    size: Tensor | None
    """No lane of a prior that grows with position holds a larger number of nats; None if there is no such prior."""


def augment(problem: Problem, terms: Sequence[Prior]) -> Augmented:
    """Scale the queries and append the lanes of ``terms``.

    With lanes, half-precision inputs become float32: a position does not fit a bfloat16.
    """
    geometry = problem.geometry
    parts = [
        term.lanes(geometry.query_positions, geometry.key_positions, dtype=problem.compute_dtype) for term in terms
    ]
    features = join_lanes(parts) if parts else None
    has_lanes = features is not None and features.key.shape[-1] > 0
    dtype = problem.compute_dtype if has_lanes else problem.query.dtype
    query, key, value = problem.query.to(dtype), problem.key.to(dtype), problem.value.to(dtype)
    scale = problem.row_scale
    if scale is not None:
        query = (query.to(scale.dtype) * scale.unsqueeze(-1)).to(dtype)
    if features is None:
        return Augmented(query, key, value, None, None, None)
    prior_scale = scale if problem.scales_prior else None
    row_offset = _row_offset(features, geometry.query_positions, prior_scale)
    if not has_lanes:
        return Augmented(query, key, value, row_offset, features.slope, None)
    phi = features.query
    if prior_scale is not None:
        phi = phi * prior_scale.unsqueeze(-1)
    grows = [part for term, part in zip(terms, parts, strict=True) if Structure.STATIONARY not in term.structure]
    size = _size(grows, prior_scale) if grows else None
    # Empty lanes make the width a multiple of 8, without a remainder for vector units: 82 is slower than 88.
    empty = (0, -(query.shape[-1] + phi.shape[-1]) % LANES_AT_A_TIME)
    phi, psi = pad(phi, empty), pad(features.key, empty).unsqueeze(-3)
    query = torch.cat([query, (phi / problem.softmax_scale).expand(len(query), -1, -1, -1)], dim=-1)
    key = torch.cat([key, psi.expand(*key.shape[:2], -1, -1)], dim=-1)
    return Augmented(query, key, value, row_offset, features.slope, size)


def slope_term(slope: Tensor, distance: Tensor) -> Tensor:
    """``slope · j`` less the row's constant ``slope · i``: ``-slope · d``, ``(H, *distance.shape)``, in float64."""
    return (-per_head(slope, distance) * distance.double()).clamp(LOG_PRIOR_FLOOR, -LOG_PRIOR_FLOOR)


def _row_offset(features: Lanes, query_positions: Tensor, scale: Tensor | None) -> Tensor | None:
    """The rows' constants: of the lanes, and of a slope that is in a table."""
    row_offset = features.row_offset
    if features.slope is not None:
        constant = features.slope.unsqueeze(-1) * query_positions.double().unsqueeze(-2)
        row_offset = constant if row_offset is None else row_offset + constant
    return row_offset if row_offset is None or scale is None else row_offset * scale


def _size(parts: Sequence[Lanes], scale: Tensor | None) -> Tensor:
    """An upper bound of what the lanes add up to, in nats, over all queries, keys and heads."""
    with torch.no_grad():
        sizes = [
            (part.query.abs().amax(-2) * part.key.abs().amax(-2).unsqueeze(-2))
            .sum(-1)
            .reshape(-1, part.query.shape[-3])
            for part in parts
        ]
        heads = torch.stack([size.amax(0) for size in sizes]).sum(0)
        return (heads if scale is None else heads * scale.abs().amax((0, 2))).amax()
