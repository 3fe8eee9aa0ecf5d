"""Stationary priors in linear memory: one number per distance and head, and no bias matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_priors.attention.augment import Augmented, augment, slope_term
from attention_priors.attention.decoding import attend_one_query
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.geometry_operator import geometry_arguments
from attention_priors.attention.grids import Grids
from attention_priors.attention.key_bounds import Balls
from attention_priors.attention.operators import (
    Table,
    attend_in_tiles,
    choose_kept_blocks,
)
from attention_priors.attention.problem import Problem
from attention_priors.attention.pruning import may_prune
from attention_priors.attention.recentred import (
    attend_recentred,
    is_near,
    lanes_are_exact,
    lowest_distance,
    may_look,
    table_of,
    visible_at,
)
from attention_priors.attention.reference import blockwise
from attention_priors.attention.tables import consecutive_table
from attention_priors.attention.triton_backend import distance_range
from attention_priors.priors import Prior, Structure


def toeplitz(problem: Problem, fused: bool = False, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Attention with the stationary terms of the prior in a table and the others in lanes.

    Args:
        problem: what to compute.
        fused: by Triton's kernels; else in tiles.
        need_lse: whether the log-sum-exp is wanted.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``; without ``need_lse`` it may be None.
    """
    if torch.compiler.is_compiling() and problem.geometry.has_given_positions and _is_on_grids(problem):
        return blockwise(problem)  # what is compiled does not look at values, and a grid's are far apart
    if not need_lse and not fused and (out := attend_one_query(problem)) is not None:
        return out, None
    return attend_in_blocks(problem, *split(problem), fused)


def _is_on_grids(problem: Problem) -> bool:
    return problem.prior is not None and any(term.over_grid for term in problem.prior.terms())


def split(problem: Problem) -> tuple[Augmented, list[Prior]]:
    """Queries and keys with lanes for the terms of the prior that need them, and the other, stationary ones."""
    terms = () if problem.prior is None else tuple(problem.prior.terms())
    stationary = [term for term in terms if Structure.STATIONARY in term.structure]
    return augment(problem, [term for term in terms if Structure.STATIONARY not in term.structure]), stationary


def attend_in_blocks(
    problem: Problem, augmented: Augmented, terms: Sequence[Prior], fused: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention over queries and keys with lanes, plus the stationary ``terms`` and the slope of the lanes.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``, in float64 if it holds a constant of the row.
    """
    if not lanes_are_exact(problem, augmented):
        return blockwise(problem)
    row_offset = augmented.row_offset
    prior = table_for(problem, augmented, terms, fused)
    if may_look(problem) and not is_near(problem, augmented, terms, prior):
        found = attend_recentred(problem, augmented, terms, fused)
        if found is None:
            return blockwise(problem)
        return found[0].to(problem.query.dtype), _with_offset(found[1], row_offset)
    inputs = operator_inputs(problem, augmented, prior)
    kept = problem.kept
    if problem.tolerance > 0 and may_prune(problem.geometry):
        chosen = choose_kept_blocks(problem.tolerance, balls_of(problem), *inputs, None, fused)
        kept = chosen if kept is None else kept & chosen
    out, lse = attend_in_tiles(*inputs, kept, fused)
    return out.to(problem.query.dtype), _with_offset(lse, row_offset)


def table_for(problem: Problem, augmented: Augmented, terms: Sequence[Prior], fused: bool = False) -> Table:
    """The stationary ``terms``, and the slope of the lanes, at every distance of the problem."""
    highest, number, listed = _distances(problem.geometry, fused)
    like = problem.query.new_empty(0, dtype=problem.compute_dtype)
    distances = torch.arange(highest, highest - number, -1, device=like.device) if listed is None else listed
    if listed is None:
        table = consecutive_table(terms, highest, highest - number + 1, like)
        if augmented.slope is not None:
            part = slope_term(augmented.slope, distances).to(like.dtype)
            table = part if table is None else table + part
    else:
        table = table_of(terms, augmented.slope, listed, like.dtype)
    row_scale = problem.row_scale if problem.scales_prior and table is not None else None
    return Table(table, row_scale, visible_at(problem, distances), listed, highest, number)


def operator_inputs(problem: Problem, augmented: Augmented, prior: Table) -> tuple[Any, ...]:
    """What operators take, but for the last two: the blocks that are kept, and by which kernels."""
    content = augmented.content
    parts = (content.query, content.key, content.value, content.query_scale, content.lane_query, content.lane_key)
    return (*parts, *prior, content.softmax_scale, *geometry_arguments(problem.geometry))


def balls_of(problem: Problem) -> Balls | None:
    """Those around blocks of keys that the caller keeps; None for none."""
    return None if problem.key_bounds is None else problem.key_bounds.balls


def _with_offset(lse: Tensor, row_offset: Tensor | None) -> Tensor:
    if row_offset is None:
        return lse
    # Where no key is seen there is nothing to add to, and no gradient.
    return torch.where(lse == float("-inf"), lse, lse + row_offset)


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
    if offset is None and (grids := Grids.of(geometry)) is not None:
        listed = grids.distances(geometry)
        return 0, len(listed), listed
    if offset is None:
        keys = geometry.key_positions.unsqueeze(-2)
        blocks = geometry.query_positions.split(256, dim=-1)
        listed = torch.cat([(queries.unsqueeze(-1) - keys).unique() for queries in blocks]).unique()
        return 0, len(listed), listed
    highest = num_queries - 1 + offset
    return highest, highest - lowest_distance(geometry, offset) + 1, None
