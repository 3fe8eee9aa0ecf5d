"""Stationary priors in linear memory: one number per distance and head, and no bias matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_priors.attention.augment import Augmented, augment
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.key_bounds import Balls
from attention_priors.attention.operators import attend_in_tiles, choose_kept_blocks, geometry_arguments
from attention_priors.attention.problem import Problem
from attention_priors.attention.pruning import may_prune
from attention_priors.attention.tables import consecutive_table
from attention_priors.priors import Prior, Structure


def toeplitz(problem: Problem) -> tuple[Tensor, Tensor]:
    """Attention with the stationary terms of the prior in a table and the others in lanes.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``.
    """
    return attend_in_blocks(problem, *split(problem))


def split(problem: Problem) -> tuple[Augmented, list[Prior]]:
    """Queries and keys with lanes for the terms of the prior that need them, and the other, stationary ones."""
    terms = () if problem.prior is None else tuple(problem.prior.terms())
    stationary = [term for term in terms if Structure.STATIONARY in term.structure]
    return augment(problem, [term for term in terms if Structure.STATIONARY not in term.structure]), stationary


def attend_in_blocks(problem: Problem, augmented: Augmented, terms: Sequence[Prior]) -> tuple[Tensor, Tensor]:
    """Attention over augmented queries and keys, plus the stationary ``terms``.

    Returns:
        Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)``.
    """
    inputs = operator_inputs(problem, augmented, terms)
    kept = None
    if problem.tolerance > 0 and may_prune(problem.geometry):
        kept = choose_kept_blocks(problem.tolerance, balls_of(problem, augmented.key), *inputs, None)
    out, lse = attend_in_tiles(*inputs, kept)
    if augmented.row_offset is not None:
        # Where no key is seen there is nothing to add to, and no gradient.
        lse = torch.where(lse == float("-inf"), lse, lse + augmented.row_offset)
    return out.to(problem.query.dtype), lse


def operator_inputs(problem: Problem, augmented: Augmented, terms: Sequence[Prior]) -> tuple[Any, ...]:
    """What operators take, but for the last, the blocks that are kept."""
    query, key, value, _ = augmented
    highest, number, listed = _distances(problem.geometry)
    like = query.new_empty(0, dtype=problem.compute_dtype)
    table = None
    if listed is None:
        table = consecutive_table(terms, highest, highest - number + 1, like)
    else:
        for term in terms:
            part = term.log_prior_at(listed, like.dtype)
            table = part if table is None else table + part
    return (
        query,
        key,
        value,
        table,
        problem.row_scale if problem.scales_prior and table is not None else None,
        _inside(terms, highest, number, listed, query.device),
        listed,
        highest,
        number,
        problem.softmax_scale,
        *geometry_arguments(problem.geometry),
    )


def balls_of(problem: Problem, key: Tensor) -> Balls | None:
    """Those the caller keeps, and around the lanes beside the keys; None if the caller keeps none."""
    if problem.key_bounds is None:
        return None
    balls = problem.key_bounds.balls
    width = problem.key.shape[-1]
    return balls if key.shape[-1] == width else balls.beside(Balls.around(key[..., width:]))


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


def _distances(geometry: Geometry) -> tuple[int, int, Tensor | None]:
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
    if offset is None:
        keys = geometry.key_positions.unsqueeze(-2)
        blocks = geometry.query_positions.split(256, dim=-1)
        listed = torch.cat([(queries.unsqueeze(-1) - keys).unique() for queries in blocks]).unique()
        return 0, len(listed), listed
    highest = num_queries - 1 + offset
    # A causal tile looks ahead no farther than its own last query.
    lowest = 1 - num_queries if geometry.causal else offset - (num_keys - 1)
    return highest, highest - min(lowest, highest) + 1, None
