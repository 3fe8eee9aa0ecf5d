"""Entry to tiles and to Triton's kernels: builds the inputs of the operator in ``operator.py``.

Stationary terms become one number per distance and head, terms of keys one number per key and head. Nothing builds a
bias matrix.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor

from attention_priors.attention.geometry import Geometry
from attention_priors.attention.grids import Grids
from attention_priors.attention.lanes import with_lanes
from attention_priors.attention.observe import note
from attention_priors.attention.operator import attend_in_tiles, choose_kept_blocks, geometry_arguments
from attention_priors.attention.plan import Plan
from attention_priors.attention.problem import Problem
from attention_priors.attention.pruning.bounds import Balls
from attention_priors.attention.pruning.certificate import WEIGHTLESS
from attention_priors.attention.reference import blockwise
from attention_priors.attention.tables import consecutive_table, table_at, table_of_keys, table_of_network, visible_at
from attention_priors.attention.tiles.bare import attend_bare
from attention_priors.attention.triton.backend import distance_range
from attention_priors.precision import can_be_read, is_captured, is_traced
from attention_priors.priors.base import ScaledDistance, checked_scaled_distance

DISTANCES_PER_TOKEN = 16
"""Largest number of table entries, per query and key, for positions that do not step by one. With random gaps, each
pair has its own distance."""
FEW_DISTANCES = 2**16
"""Number of table entries that is always allowed."""
FEWEST_WEIGHTLESS = 1700
"""Mean number of keys without weight per head above which finding them takes less time than computing them."""


def tiles(problem: Problem, plan: Plan, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Compute attention in tiles.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``. Without ``need_lse``, the log-sum-exp may be None.
    """
    return attend_bare(problem, plan, need_lse=need_lse) or attend_in_blocks(problem, plan, fused=False)


def attend_in_blocks(problem: Problem, plan: Plan, *, fused: bool) -> tuple[Tensor, Tensor]:
    """Compute attention as planned, with the operator: in tiles or, if ``fused``, with Triton's kernels.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)`` in float64.
    """
    inputs = operator_inputs(problem, plan, fused)
    if inputs is None:
        return blockwise(problem)
    kept, exact = problem.kept, problem.tolerance == 0
    table, key_bias = inputs[4:6]
    if plan.unpruned is None and (not exact or _weightless_keys(problem, table, key_bias) > FEWEST_WEIGHTLESS):
        tolerance = WEIGHTLESS if exact else problem.tolerance
        chosen = choose_kept_blocks(tolerance, balls_of(problem, plan), *inputs, None, fused)
        if not exact or not bool(chosen.all()):
            kept = chosen if kept is None else kept & chosen
            if exact:
                note("blocks of keys that together weigh less than 2^{} are skipped", round(math.log2(WEIGHTLESS)))
    out, lse = attend_in_tiles(*inputs, kept, fused)
    return out.to(problem.query.dtype), lse


def _weightless_keys(problem: Problem, table: Tensor | None, key_bias: Tensor | None) -> float:
    """Return the mean number of keys per head that would have no weight if contents were equal."""
    nats, share = -math.log(WEIGHTLESS), 0.0
    if problem.row_scale is not None and problem.scales_prior:
        nats = nats / problem.row_scale.detach().abs().amax((0, 2)).unsqueeze(-1)
    for numbers in (table, key_bias):
        if numbers is not None:
            below = numbers.detach().amax(-1, keepdim=True) - numbers.detach()
            share = max(share, float((below > nats).double().mean()))
    return share * problem.geometry.num_keys


def operator_inputs(problem: Problem, plan: Plan, fused: bool = False) -> tuple[Any, ...] | None:
    """Build the inputs of the operators, except the last two, ``kept`` and ``fused``.

    Args:
        problem: checked problem.
        plan: engine and form of each term.
        fused: whether Triton's kernels compute the problem.

    Returns:
        Inputs, or None if only the dense formula supports the problem. Reasons are lanes that are too large for
        float32, positions on a grid whose values cannot be read, and too many distances.
    """
    terms, of_keys, factored, scaled = plan.parts(problem)
    longer, geometry = with_lanes(problem, factored) if factored else problem, problem.geometry
    if longer is None:
        return None
    key_bias = table_of_keys(of_keys, geometry, problem.key_bias)
    if not terms and not scaled and not geometry.causal:
        # There is no table, and no position hides a key, so distances do not matter.
        geometry = replace(geometry, given_query_positions=None, given_key_positions=None)
    elif any(term.over_grid for term in problem.terms) and _hides_positions(geometry):
        return None
    distances = _distances(geometry, fused)
    if distances is None:
        return None
    highest, number, listed = distances
    if listed is None:
        table = consecutive_table(terms, highest, highest - number + 1, geometry.device)
        inside = visible_at(problem.terms, highest, number, geometry.device)
        if inside is not None and table is not None and not fused and _is_zero(table):
            table = None  # a window: where no distance is hidden, there is no bias
    else:
        table, inside = table_at(terms, listed), None if problem.prior is None else problem.prior.visible_at(listed)
    network = nothing = (None,) * len(ScaledDistance._fields)
    if scaled:
        at = torch.arange(highest, highest - number, -1, device=geometry.device) if listed is None else listed
        network = checked_scaled_distance(scaled[0], geometry.query_positions, at)
        alike = table_of_network(network)
        if alike is not None:
            table, network = alike if table is None else table + alike, nothing
    content = (longer.query, longer.key, longer.value, longer.softmax_scale)
    of_prior = (table, key_bias, longer.row_scale, problem.scales_prior, inside, listed, highest, number)
    return (*content, *of_prior, *network, *geometry_arguments(geometry))


def balls_of(problem: Problem, plan: Plan) -> Balls | None:
    """Return the caller's bounds of key blocks as balls; None without bounds, or if lanes extend the keys."""
    return None if problem.key_bounds is None or plan.lanes else problem.key_bounds.balls


def _is_zero(table: Tensor) -> bool:
    """Return whether a table needs no gradient and holds zeros only; False if its values cannot be read."""
    return not table.requires_grad and can_be_read(table) and not bool(table.any())


def _hides_positions(geometry: Geometry) -> bool:
    """Return whether the caller gave positions whose values cannot be read."""
    if not geometry.has_given_positions:
        return False
    if is_traced() or is_captured() or geometry.device.type == "meta":
        return True
    return _is_mapped(geometry.given_query_positions) or _is_mapped(geometry.given_key_positions)


def _is_mapped(positions: Tensor | None) -> bool:
    """Return whether ``vmap`` maps over the positions."""
    while positions is not None and is_functorch_wrapped_tensor(positions):
        if is_batchedtensor(positions):
            return True
        positions = get_unwrapped(positions)
    return False


def _distances(geometry: Geometry, fused: bool) -> tuple[int, int, Tensor | None] | None:
    """Return a table's highest distance, its number of distances, and a list of all if they do not fall by one.

    The list is in increasing order. The result is None if the distances do not fit in linear memory.
    """
    num_queries, num_keys, offset = geometry.num_queries, geometry.num_keys, None
    if _hides_positions(geometry):
        # The operator reads the values later, and rejects positions out of this range.
        highest = max(num_queries, num_keys) - 1
        return highest, 2 * highest + 1, None
    if not geometry.has_given_positions:
        # Documents only ever bring tokens closer together.
        offset = num_keys - num_queries
    elif geometry.offset is not None:
        offset = geometry.offset
    if offset is None and fused:
        # The kernels compute the table index of a pair, so distances must fall by one.
        return *distance_range(geometry), None
    if offset is None and (grids := Grids.of(geometry)) is not None:
        listed = grids.distances(geometry)
        return 0, len(listed), listed
    if offset is None:
        listed = _list_distances(geometry)
        return None if listed is None else (0, len(listed), listed)
    highest, lowest = num_queries - 1 + offset, offset - (num_keys - 1)
    return highest, highest - min(max(lowest, 0) if geometry.causal else lowest, highest) + 1, None


def _list_distances(geometry: Geometry) -> Tensor | None:
    """Return all distances in increasing order; None if there are far more than queries and keys."""
    keys = geometry.key_positions.unsqueeze(-2)
    most = max(FEW_DISTANCES, DISTANCES_PER_TOKEN * (geometry.query_positions.numel() + keys.numel()))
    # Under torch.func, the dense formula cannot be recomputed block by block, so there is no fallback.
    limited = not torch._C._are_functorch_transforms_active()
    listed = keys.new_empty(0)
    for queries in geometry.query_positions.split(256, dim=-1):
        listed = torch.cat([listed, (queries.unsqueeze(-1) - keys).unique()]).unique()
        if limited and len(listed) > most:
            return None
    return listed
