"""What a prior and a logit scale put beside queries and keys.

``<q_i, k_j> · softmax_scale + <phi(i), psi(j)>`` is the dot product, scaled, of ``[q_i, phi(i) / softmax_scale]``
and ``[k_j, psi(j)]`` (GOAT, equations 20 to 24, with the content kept at its full width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.content import Content
from attention_priors.attention.problem import Problem
from attention_priors.attention.tables import lanes_of
from attention_priors.priors import Lanes, Prior, Structure
from attention_priors.priors.base import LOG_PRIOR_FLOOR, join_lanes, per_head


class Augmented(NamedTuple):
    """Content whose products hold logit scale and lanes, and what they leave out."""

    content: Content
    row_offset: Tensor | None
    """``(B or 1, H, Lq)`` in float64: what is left out of each row's logits, hence of its log-sum-exp."""
    slope: Tensor | None
    """``(H,)`` in float64: nats per token of the key's position, which the lanes leave to a table."""
    size: Tensor | None
    """No lane of a prior that grows with position holds a larger number of nats; None if there is no such prior."""


def augment(problem: Problem, terms: Sequence[Prior]) -> Augmented:
    """Put the logit scale and the lanes of ``terms`` beside queries and keys."""
    geometry, scale = problem.geometry, problem.row_scale
    content = Content(problem.query, problem.key, problem.value, scale, None, None, problem.softmax_scale)
    if not terms:
        return Augmented(content, None, None, None)
    parts = [lanes_of(term, geometry, problem.compute_dtype) for term in terms]
    features = join_lanes(parts)
    prior_scale = scale if problem.scales_prior else None
    row_offset = _row_offset(features, geometry.query_positions, prior_scale)
    if features.key.shape[-1] == 0:
        return Augmented(content, row_offset, features.slope, None)
    phi = features.query
    if prior_scale is not None:
        phi = phi * prior_scale.unsqueeze(-1)
    grows = [part for term, part in zip(terms, parts, strict=True) if Structure.STATIONARY not in term.structure]
    content = replace(content, lane_query=phi, lane_key=features.key)
    return Augmented(content, row_offset, features.slope, _size(grows, prior_scale) if grows else None)


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
