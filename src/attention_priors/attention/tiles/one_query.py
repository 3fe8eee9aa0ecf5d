"""Decoding as it mostly is: one query, all keys before it, nothing hidden. Two products, and little around them.

What makes thousands of queries fast, tiles and views of a table, takes longer to set up than these products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention_priors.attention.operator import nobody_watches
from attention_priors.attention.plan import Plan
from attention_priors.attention.problem import Problem
from attention_priors.attention.tables import consecutive_table
from attention_priors.attention.tiles.bias import far_rows
from attention_priors.attention.tiles.forward import is_one_on_cpu, logits_of_one, mean_of_one
from attention_priors.priors import Prior
from attention_priors.priors.base import checked_lanes


def attend_one_query(problem: Problem, plan: Plan) -> Tensor | None:
    """The output for one query per text that sees every key, ``(B, H, 1, Dv)``; None for any other problem.

    Also None where a row's best logit is too far from 0 for float32.
    """
    geometry = problem.geometry
    if not _sees_every_key(problem):
        return None
    query, scale, dtype, number = problem.query, problem.row_scale, problem.compute_dtype, geometry.num_keys
    stationary, of_keys, factored = plan.parts(problem)
    # The first entry is that of the first key, which is the farthest.
    bias = consecutive_table(stationary, number - 1, 0, query.device, dtype)
    growing = [problem.key_bias, consecutive_table(of_keys, 0, 1 - number, query.device)]
    for term in factored:
        phi, psi = checked_lanes(term, geometry.query_positions, geometry.key_positions, torch.float64)
        growing.append((phi @ psi.unsqueeze(-3).mT).squeeze(-2))
    for part in growing:
        if part is not None:
            # Less that of the last key, before it is rounded.
            part = (part - part[..., -1:]).to(dtype)
            bias = part if bias is None else bias + part
    bias = None if bias is None else bias.unsqueeze(-2)
    if scale is not None:
        scale = scale.unsqueeze(-1)
        query = query * scale
        bias = bias * scale if bias is not None and problem.scales_prior else bias
    logits = logits_of_one(query, problem.key, bias, problem.softmax_scale)
    if bias is not None and far_rows(logits.amax(-1)) is not None:
        return None
    return mean_of_one(logits.softmax(-1), problem.value)


def _sees_every_key(problem: Problem) -> bool:
    geometry = problem.geometry
    return (
        is_one_on_cpu(problem.query)
        and not geometry.has_given_positions
        and not geometry.has_masks
        and problem.kept is None
        and problem.tolerance == 0
        and nobody_watches(problem.query)
        and all(type(term).visible_at is Prior.visible_at for term in problem.terms)
    )
