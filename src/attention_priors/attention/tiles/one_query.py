"""Decoding as it mostly is: one query, all keys before it, nothing hidden. Two products, and little around them.

What makes thousands of queries fast, tiles and views of a table, takes longer to set up than these products.
"""

from __future__ import annotations

from torch import Tensor

from attention_priors.attention.geometry_operator import nobody_watches
from attention_priors.attention.problem import Problem
from attention_priors.attention.recentred import is_known_near, may_look
from attention_priors.attention.tables import consecutive_table
from attention_priors.attention.tiles.forward import is_one_on_cpu, logits_of_one, mean_of_one
from attention_priors.priors import Prior, Structure


def attend_one_query(problem: Problem) -> Tensor | None:
    """The output for one query per text that sees every key, ``(B, H, 1, Dv)``; None for any other problem.

    Also None where its log-prior is too far from 0 for float32: see ``recentred.py``.
    """
    terms = () if problem.prior is None else tuple(problem.prior.terms())
    if not _sees_every_key(problem) or not all(_is_a_table(term) for term in terms):
        return None
    query, scale, bias = problem.query, problem.row_scale, None
    if terms:
        # Its first entry is that of the first key, which is the farthest.
        bias = consecutive_table(terms, problem.geometry.num_keys - 1, 0, query)
        assert bias is not None
        if may_look(problem) and not is_known_near(terms, scale if problem.scales_prior else None):
            return None
        bias = bias.unsqueeze(1)
    if scale is not None:
        scale = scale.unsqueeze(-1)
        query = query * scale
        bias = bias * scale if bias is not None and problem.scales_prior else bias
    weights = logits_of_one(query, problem.key, bias, problem.softmax_scale).softmax(-1)
    return mean_of_one(weights, problem.value)


def _sees_every_key(problem: Problem) -> bool:
    geometry = problem.geometry
    return (
        is_one_on_cpu(problem.query)
        and not geometry.has_given_positions
        and not geometry.has_masks
        and problem.kept is None
        and problem.tolerance == 0
        and nobody_watches(problem.query)
    )


def _is_a_table(term: Prior) -> bool:
    # A prior that hides keys says so by a method of its own.
    return Structure.STATIONARY in term.structure and type(term).visible_at is Prior.visible_at
