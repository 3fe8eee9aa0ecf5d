"""Stationary priors in linear memory: one number per distance and head, and no bias matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_priors.attention.augment import Augmented, augment
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.operators import attend_in_tiles, geometry_arguments
from attention_priors.attention.problem import Problem
from attention_priors.attention.tables import consecutive_table
from attention_priors.attention.triton_backend import distance_range
from attention_priors.priors import Prior, Structure


def toeplitz(problem: Problem, fused: bool = False) -> tuple[Tensor, Tensor]:
    """Attention with the stationary terms of the prior in a table and the others in lanes.

    Args:
        problem: what to compute.
        fused: by Triton's kernels; else in tiles.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``.
    """
    terms = () if problem.prior is None else tuple(problem.prior.terms())
    stationary = [term for term in terms if Structure.STATIONARY in term.structure]
    augmented = augment(problem, [term for term in terms if Structure.STATIONARY not in term.structure])
    return attend_in_blocks(problem, augmented, stationary, fused)


def attend_in_blocks(
    problem: Problem, augmented: Augmented, terms: Sequence[Prior], fused: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention over augmented queries and keys, plus the stationary ``terms``.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``.
    """
    query, key, value, row_offset = augmented
    highest, number, listed = _distances(problem.geometry, fused)
    like = query.new_empty(0, dtype=problem.compute_dtype)
    table = None
    if listed is None:
        table = consecutive_table(terms, highest, highest - number + 1, like)
    else:
        for term in terms:
            part = term.log_prior_at(listed, like.dtype)
            table = part if table is None else table + part
    inside = _inside(terms, highest, number, listed, query.device)
    out, lse = attend_in_tiles(
        query,
        key,
        value,
        table,
        problem.row_scale if problem.scales_prior and table is not None else None,
        inside,
        listed,
        highest,
        number,
        problem.softmax_scale,
        *geometry_arguments(problem.geometry),
        fused,
    )
    if row_offset is not None:
        # Where no key is seen there is nothing to add to, and no gradient.
        lse = torch.where(lse == float("-inf"), lse, lse + row_offset)
    return out.to(problem.query.dtype), lse


def _inside(
    terms: Sequence[Prior], highest: int, number: int, listed: Tensor | None, device: torch.device
) -> Tensor | None:
    """Whether the terms let a query see each distance, ``(N,)``; None if they hide none."""
    inside = None
    distances = torch.arange(highest, highest - number, -1, device=device) if listed is None else listed
    for term in terms:
        seen = term.visible_at(distances)
        if seen is not None:
            inside = seen if inside is None else inside & seen
    return inside


def _distances(geometry: Geometry, fused: bool) -> tuple[int, int, Tensor | None]:
    """A table's distances: the highest, how many fall by one from there, or all of them, rising, if they do not."""
    num_queries, num_keys, offset = geometry.num_queries, geometry.num_keys, None
    if geometry.has_given_positions and torch.compiler.is_compiling():
        # What is compiled does not look at values: the operator does, and refuses positions beyond these.
        highest = max(num_queries, num_keys) - 1
        return highest, 2 * highest + 1, None
    if not geometry.has_given_positions:
        # Documents only ever bring tokens closer together.
        offset = num_keys - num_queries
    elif geometry.offset is not None:
        offset = geometry.offset
    if offset is None and fused:
        # The kernels compute a pair's place: distances must fall by one.
        return *distance_range(geometry), None
    if offset is None:
        keys = geometry.key_positions.unsqueeze(-2)
        blocks = geometry.query_positions.split(256, dim=-1)
        listed = torch.cat([(queries.unsqueeze(-1) - keys).unique() for queries in blocks]).unique()
        return 0, len(listed), listed
    highest = num_queries - 1 + offset
    # A causal tile looks ahead no farther than its own last query.
    lowest = 1 - num_queries if geometry.causal else offset - (num_keys - 1)
    return highest, highest - min(lowest, highest) + 1, None
