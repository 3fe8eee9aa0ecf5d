"""Factored priors: a few extra query and key dimensions, then one plain attention call on any hardware."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_priors.attention.content import all_of, augment, columns_together
from attention_priors.attention.problem import Problem
from attention_priors.attention.recentred import lanes_are_exact
from attention_priors.attention.reference import blockwise
from attention_priors.attention.tiles.backend import attend_in_blocks
from attention_priors.priors import Prior, Structure


def is_factored(prior: Prior | None, *, causal: bool) -> bool:
    """Whether every term of the prior has lanes under this mask."""
    wanted = Structure.FACTORED | (Structure.FACTORED_IF_CAUSAL if causal else Structure(0))
    return prior is None or all(term.structure & wanted for term in prior.terms())


def lanes(problem: Problem, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attention with the whole prior in lanes.

    Returns:
        Output, and the log-sum-exp; without ``need_lse`` it may be None.

    Raises:
        ValueError: if a term of the prior has no lanes.
    """
    if not is_factored(problem.prior, causal=problem.geometry.causal):
        mask = "under a causal mask" if problem.geometry.causal else "without a causal mask"
        raise ValueError(
            f"backend='lanes' needs a prior that is factored {mask}, got {problem.prior!r}; use backend='toeplitz'"
        )
    augmented = augment(problem, () if problem.prior is None else tuple(problem.prior.terms()))
    if need_lse or augmented.slope is not None or not _is_plain(problem):
        # Masks, offsets, log-sum-exps and slopes are the block-wise engine's.
        return attend_in_blocks(problem, augmented, [])
    if not lanes_are_exact(problem, augmented):
        return blockwise(problem)
    content, query, key, value = augmented.content, problem.query, problem.key, problem.value
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
