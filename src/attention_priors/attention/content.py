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
from attention_priors.precision import NEAR, compute_dtype_of, is_traced
from attention_priors.priors import Prior, Structure
from attention_priors.priors.base import checked_lanes, join_lanes

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


def content_of(problem: Problem, terms: Sequence[Prior]) -> Content:
    """Queries, keys and values of a problem, with logit scale and the lanes of ``terms``."""
    content = Content(problem.query, problem.key, problem.value, problem.row_scale, None, None, problem.softmax_scale)
    if not terms:
        return content
    positions = problem.geometry.query_positions, problem.geometry.key_positions
    phi, psi = join_lanes([checked_lanes(term, *positions, problem.compute_dtype) for term in terms])
    if psi.shape[-1] == 0:
        return content
    if problem.row_scale is not None and problem.scales_prior:
        phi = phi * problem.row_scale.unsqueeze(-1)
    return replace(content, lane_query=phi, lane_key=psi)


def lanes_are_exact(content: Content, terms: Sequence[Prior]) -> bool:
    """Whether no lane of ``terms`` that grows with position holds a number too large for float32.

    Where numbers cannot be read, the answer is yes.
    """
    phi, psi = content.lane_query, content.lane_key
    if phi is None or psi is None or all(Structure.STATIONARY in term.structure for term in terms):
        return True
    if phi.is_meta or is_traced() or torch._C._are_functorch_transforms_active():
        return True
    with torch.no_grad():
        sizes = phi.abs().amax(-2) * psi.abs().amax(-2).unsqueeze(-2)
        return phi.dtype == torch.float64 or bool((sizes.sum(-1) <= NEAR).all())
