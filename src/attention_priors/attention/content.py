"""Queries and keys as their products take them: with logit scale and lanes, put together where they are read.

``<q_i, k_j> · softmax_scale + <phi(i), psi(j)>`` is the dot product, scaled, of ``[q_i, phi(i) / softmax_scale]`` and
``[k_j, psi(j)]`` (GOAT, equations 20 to 24, with the content kept at its full width). Whole copies of
scaled queries and lengthened keys would be kept for the backward pass, and in decoding would cost more than the
attention itself. So what is kept is what was given, and the rest is made for one tile after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import block_length
from attention_priors.attention.problem import Problem
from attention_priors.attention.tables import lanes_of
from attention_priors.precision import compute_dtype_of
from attention_priors.priors import Lanes, Prior, Structure
from attention_priors.priors.base import LOG_PRIOR_FLOOR, join_lanes, per_head

LANES_AT_A_TIME = 8
"""Numbers of float32 in a vector register."""


def all_of(tensor: Tensor) -> Tensor:
    """All of it: the cut that cuts nothing."""
    return tensor


def columns_together(tensor: Tensor) -> Tensor:
    """The same numbers, with those of a row next to each other: the kernels look for them there."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@dataclass(frozen=True)
class Content:
    """Queries, keys and values, and what queries and keys have beside them."""

    query: Tensor
    """``(B, H, Lq, D)``."""
    key: Tensor
    """``(B, Hkv, Lk, D)``."""
    value: Tensor
    """``(B, Hkv, Lk, Dv)``."""
    query_scale: Tensor | None
    """What multiplies each query, ``(B, H, Lq)``; None for nothing."""
    lane_query: Tensor | None
    """Features of the query's position, in nats, ``(B or 1, H, Lq, R)``; None if there are no lanes."""
    lane_key: Tensor | None
    """Features of the key's position, ``(B or 1, Lk, R)``."""
    softmax_scale: float

    @property
    def dtype(self) -> torch.dtype:
        """Of the products. Lanes need float32: a position does not fit a bfloat16."""
        return self.query.dtype if self.lane_query is None else compute_dtype_of(self.query)

    @property
    def width(self) -> int:
        """Of queries and keys with lanes, a multiple of 8: without a remainder for vector units. 82 is slower."""
        width = self.query.shape[-1]
        if self.lane_query is None:
            return width
        width += self.lane_query.shape[-1]
        return width + -width % LANES_AT_A_TIME

    def without_lanes(self) -> Content:
        """The same, for those who add the product of the lanes themselves."""
        return replace(self, lane_query=None, lane_key=None)

    def queries(self, cut: Callable[[Tensor], Tensor], width: int | None = None) -> Tensor:
        """Some queries, scaled, with lanes, and zeros up to ``width``.

        Args:
            cut: takes what is wanted of a ``(B, H, Lq, ...)``.
            width: None for no zeros.
        """
        query = cut(self.query).to(self.dtype)
        if self.query_scale is not None:
            scale = cut(self.query_scale).unsqueeze(-1)
            query = (query.to(scale.dtype) * scale).to(self.dtype)
        if self.lane_query is not None:
            lanes = cut(self.lane_query.expand(len(self.query), -1, -1, -1))
            return _beside(query, lanes / self.softmax_scale, width)
        return _widened(query, width)

    def keys(self, cut: Callable[[Tensor], Tensor], width: int | None = None) -> Tensor:
        """Some keys, with lanes, and zeros up to ``width``; ``cut`` takes them of a ``(B, Hkv, Lk, ...)``."""
        key = cut(self.key).to(self.dtype)
        if self.lane_key is not None:
            lanes = cut(self.lane_key.unsqueeze(1).expand(*self.key.shape[:2], -1, -1))
            return _beside(key, lanes, width)
        return _widened(key, width)

    def values(self, cut: Callable[[Tensor], Tensor], width: int | None = None) -> Tensor:
        """Some values, and zeros up to ``width``."""
        return _widened(cut(self.value).to(self.dtype), width)

    def gradients(self, query: Tensor, key: Tensor, wants_scale: bool) -> ContentGradients:
        """Of what was given, from those of :meth:`queries` and :meth:`keys`, of any width.

        Args:
            query: is written to.
            key: may be handed on.
            wants_scale: whether to compute that of the queries' scale.
        """
        width, lane_query, lane_key = self.query.shape[-1], None, None
        if self.lane_query is not None and self.lane_key is not None:
            lanes = slice(width, width + self.lane_query.shape[-1])
            lane_query = _of_batch(query[..., lanes] / self.softmax_scale, self.lane_query)
            lane_key = _of_batch(key[..., lanes].sum(1), self.lane_key)
            query, key = query[..., :width], key[..., :width]
        scale_grad = None
        if self.query_scale is not None:
            scale_grad = torch.empty_like(self.query_scale, memory_format=torch.contiguous_format)
            # In blocks: their products would be another copy of all queries, when memory is at its peak.
            step = block_length(query.shape[0] * query.shape[1] * width)
            for start in range(0, query.shape[2], step):
                rows = slice(start, start + step)
                part, scale = query[:, :, rows], self.query_scale[:, :, rows]
                if wants_scale:
                    given = self.query[:, :, rows].to(scale.dtype)
                    scale_grad[:, :, rows] = torch.linalg.vecdot(given, part.to(scale.dtype))
                part.mul_(scale.unsqueeze(-1))
        return ContentGradients(
            query.to(self.query.dtype).contiguous(),
            key.to(self.key.dtype).contiguous(),
            scale_grad if wants_scale else None,
            lane_query,
            lane_key,
        )


class ContentGradients(NamedTuple):
    """Of what :class:`Content` holds beside values."""

    query: Tensor
    key: Tensor
    query_scale: Tensor | None
    lane_query: Tensor | None
    lane_key: Tensor | None


def _beside(tensor: Tensor, lanes: Tensor, width: int | None) -> Tensor:
    # The few lanes are widened, and not the whole, which would be copied once more.
    missing = None if width is None else width - tensor.shape[-1]
    return torch.cat([tensor, _widened(lanes.to(tensor.dtype), missing)], dim=-1)


def _widened(tensor: Tensor, width: int | None) -> Tensor:
    missing = 0 if width is None else width - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing > 0 else tensor


def _of_batch(grad: Tensor, given: Tensor) -> Tensor:
    """The gradient of something that all examples may share."""
    if len(given) < len(grad):
        grad = grad.sum(0, keepdim=True)
    return grad.to(given.dtype).contiguous()


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
