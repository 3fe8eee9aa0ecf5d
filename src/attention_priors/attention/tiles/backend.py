"""``backend="toeplitz"``: stationary priors in linear memory, one number per distance and head, and no bias matrix.

On CPUs the work is done in ``forward.py``, ``backward.py`` and ``short.py``, on CUDA by Triton's kernels; this file
makes what they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor

from attention_priors.attention.content import Augmented, augment, slope_term
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.geometry_operator import geometry_arguments
from attention_priors.attention.grids import Grids
from attention_priors.attention.operator import (
    Table,
    attend_in_tiles,
    choose_kept_blocks,
)
from attention_priors.attention.problem import Problem
from attention_priors.attention.pruning.bounds import Balls
from attention_priors.attention.pruning.certificate import may_prune
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
from attention_priors.attention.tiles.one_query import attend_one_query
from attention_priors.attention.triton.backend import distance_range
from attention_priors.precision import is_traced
from attention_priors.priors import Prior, Structure

DISTANCES_PER_TOKEN = 16
"""Entries of a table, at most, per query and key, where positions do not step by one: gaps at random make a distance of
each pair."""
FEW_DISTANCES = 2**16
"""Entries that are never too many."""


def toeplitz(problem: Problem, fused: bool = False, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Attention with the stationary terms of the prior in a table and the others in lanes.

    Args:
        problem: what to compute.
        fused: by Triton's kernels; else in tiles.
        need_lse: whether the log-sum-exp is wanted.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``; without ``need_lse`` it may be None.
    """
    if not need_lse and not fused and not _is_on_hidden_grids(problem):
        out = attend_one_query(problem)
        if out is not None:
            return out, None
    return attend_in_blocks(problem, *split(problem), fused)


def _is_on_hidden_grids(problem: Problem) -> bool:
    """Whether distances are those of a grid, which are far apart, and cannot be looked at to be listed."""
    on_grids = problem.prior is not None and any(term.over_grid for term in problem.prior.terms())
    return on_grids and _hides_positions(problem.geometry)


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
    if not terms and augmented.slope is None and not problem.geometry.causal:
        # Nothing is read from a table, and no key is hidden for its place: no distance needs to be listed.
        unplaced = replace(problem.geometry, given_query_positions=None, given_key_positions=None)
        problem = replace(problem, geometry=unplaced)
    elif _is_on_hidden_grids(problem):
        return blockwise(problem)
    row_offset, distances = augmented.row_offset, _distances(problem.geometry, fused)
    if distances is None:
        return blockwise(problem)
    prior = _table_at(problem, augmented, terms, *distances)
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


def table_for(problem: Problem, augmented: Augmented, terms: Sequence[Prior]) -> Table:
    """The stationary ``terms``, and the slope of the lanes, at all distances of the problem, however many there are."""
    distances = _distances(problem.geometry, fused=False, limited=False)
    assert distances is not None
    return _table_at(problem, augmented, terms, *distances)


def _table_at(
    problem: Problem, augmented: Augmented, terms: Sequence[Prior], highest: int, number: int, listed: Tensor | None
) -> Table:
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


def _hides_positions(geometry: Geometry) -> bool:
    """Whether positions are given whose values cannot be looked at."""
    if not geometry.has_given_positions:
        return False
    if is_traced() or geometry.device.type == "meta":
        return True
    return _is_mapped(geometry.given_query_positions) or _is_mapped(geometry.given_key_positions)


def _is_mapped(positions: Tensor | None) -> bool:
    """Whether ``vmap`` runs over them."""
    while positions is not None and is_functorch_wrapped_tensor(positions):
        if is_batchedtensor(positions):
            return True
        positions = get_unwrapped(positions)
    return False


def _distances(geometry: Geometry, fused: bool, limited: bool = True) -> tuple[int, int, Tensor | None] | None:
    """A table's distances: the highest, how many fall by one from there, or all of them, rising, if they do not.

    None if ``limited`` and there are more of them than linear memory holds.
    """
    num_queries, num_keys, offset = geometry.num_queries, geometry.num_keys, None
    if _hides_positions(geometry):
        # What cannot be done here the operator does: it looks, and refuses positions beyond these.
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
        listed = _list_distances(geometry, limited)
        return None if listed is None else (0, len(listed), listed)
    highest = num_queries - 1 + offset
    return highest, highest - lowest_distance(geometry, offset) + 1, None


def _list_distances(geometry: Geometry, limited: bool) -> Tensor | None:
    """All that occur, rising; None if ``limited`` and they are far more than there are queries and keys."""
    keys = geometry.key_positions.unsqueeze(-2)
    most = max(FEW_DISTANCES, DISTANCES_PER_TOKEN * (geometry.query_positions.numel() + keys.numel()))
    # Transformed by torch.func, the dense formula cannot be recomputed block by block.
    limited = limited and not torch._C._are_functorch_transforms_active()
    listed = keys.new_empty(0)
    for queries in geometry.query_positions.split(256, dim=-1):
        listed = torch.cat([listed, (queries.unsqueeze(-1) - keys).unique()]).unique()
        if limited and len(listed) > most:
            return None
    return listed
