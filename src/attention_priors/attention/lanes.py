"""Factored priors: a few extra query and key dimensions, then one plain attention call on any hardware."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_priors.attention.content import all_of, columns_together, content_of, lanes_are_exact
from attention_priors.attention.plan import Plan
from attention_priors.attention.problem import Problem
from attention_priors.attention.reference import blockwise
from attention_priors.attention.tiles.backend import attend_in_blocks


def lanes(problem: Problem, plan: Plan, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attention with the factored terms of the prior in lanes.

    Returns:
        Output, and the log-sum-exp; without ``need_lse`` it may be None.
    """
    if need_lse or plan.keys or problem.key_bias is not None or not _is_plain(problem):
        # Masks, offsets, log-sum-exps and biases of keys are the block-wise engine's.
        return attend_in_blocks(problem, plan, fused=False)
    *_, terms = plan.parts(problem)
    content, query, key, value = content_of(problem, terms), problem.query, problem.key, problem.value
    if not lanes_are_exact(content, terms):
        return blockwise(problem)
    # Branches and no expressions: where sizes are symbols of a compiled graph, these would be symbols too.
    causal, is_grouped = problem.geometry.causal, False
    if query.shape[2] == 1:
        causal = False
    if query.shape[1] != key.shape[1]:
        is_grouped = True
    # One width for all three: kernels for several are slower. Where columns lie apart PyTorch adds the causal mask to a
    # dense matrix, and a key that is not finite spoils earlier queries.
    width = max(content.width, value.shape[-1])
    out = scaled_dot_product_attention(
        columns_together(content.queries(all_of, width)),
        columns_together(content.keys(all_of, width)),
        columns_together(content.values(all_of, width)),
        is_causal=causal,
        scale=problem.softmax_scale,
        enable_gqa=is_grouped,
    )
    return out[..., : value.shape[-1]].to(problem.query.dtype), None


def _is_plain(problem: Problem) -> bool:
    """Whether PyTorch's own causal flag says all there is to say about masks."""
    geometry = problem.geometry
    if geometry.has_masks:
        return False
    if not geometry.causal:
        return True
    # Given positions are no plain case, though they may amount to one: to see that takes a look at their values.
    return not geometry.has_given_positions and geometry.num_queries in (1, geometry.num_keys)
