"""Lanes appended to queries and keys.

``<q_i, k_j> · softmax_scale + <phi(i), psi(j)>`` is the dot product, scaled, of ``[q_i, phi(i) / softmax_scale]``
and ``[k_j, psi(j)]`` (GOAT, equations 20 to 24, with the content kept at its full width).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.problem import Problem
from attention_priors.priors import Lanes, Prior
from attention_priors.priors.base import gather_lanes


class Augmented(NamedTuple):
    """Queries, keys and values whose dot products hold content, logit scale and lanes."""

    query: Tensor
    key: Tensor
    value: Tensor
    row_offset: Tensor | None
    """``(B or 1, H, Lq)``: what the lanes leave out of each row's logits, hence of its log-sum-exp."""


def augment(problem: Problem, terms: Sequence[Prior]) -> Augmented:
    """Scale the queries and append the lanes of ``terms``.

    With lanes, half-precision inputs become float32: a position does not fit a bfloat16.
    """
    features = _gather(problem, terms)
    dtype = problem.query.dtype if features is None else problem.compute_dtype
    query, key, value = problem.query.to(dtype), problem.key.to(dtype), problem.value.to(dtype)
    scale = problem.row_scale
    if scale is not None:
        query = (query.to(scale.dtype) * scale.unsqueeze(-1)).to(dtype)
    if features is None:
        return Augmented(query, key, value, None)
    phi, row_offset = features.query / problem.softmax_scale, features.row_offset
    if scale is not None and problem.scales_prior:
        phi = phi * scale.unsqueeze(-1)
        row_offset = None if row_offset is None else row_offset * scale
    psi = features.key.unsqueeze(-3)
    query = torch.cat([query, phi.expand(len(query), -1, -1, -1)], dim=-1)
    key = torch.cat([key, psi.expand(*key.shape[:2], -1, -1)], dim=-1)
    return Augmented(query, key, value, row_offset)


def _gather(problem: Problem, terms: Sequence[Prior]) -> Lanes | None:
    """The lanes of all terms side by side; None if there are none."""
    if not terms:
        return None
    features = gather_lanes(
        terms, problem.geometry.query_positions, problem.geometry.key_positions, problem.compute_dtype
    )
    return features if features.key.shape[-1] else None
