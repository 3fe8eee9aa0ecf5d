"""Factored priors as a few extra query and key dimensions ("lanes"), in one plain attention call on any hardware.

``<q_i, k_j> · softmax_scale + <phi(i), psi(j)>`` is the scaled dot product of ``[q_i, phi(i) / softmax_scale]`` and
``[k_j, psi(j)]``. (GOAT, equations 20 to 24. Here, the content keeps its full width.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_priors.attention.problem import Problem
from attention_priors.attention.reference import blockwise
from attention_priors.attention.tiles.block_problem import Content, all_of, columns_together, widened
from attention_priors.precision import NEAR, is_traced
from attention_priors.priors import Prior, Structure
from attention_priors.priors.base import checked_lanes

LANES_AT_A_TIME = 8
"""Number of float32 in a vector register. Products are faster for multiples: 82 columns are slower than 88."""


def lanes(problem: Problem) -> Tensor:
    """Compute attention with the whole prior in lanes, ``(B, H, Lq, Dv)``."""
    longer = with_lanes(problem, problem.terms) if problem.terms else problem
    if longer is None:
        return blockwise(problem)[0]
    content = Content(longer.query, longer.key, longer.value, longer.row_scale, longer.softmax_scale)
    query, key, value = content.queries(all_of), longer.key, longer.value
    # Branches instead of expressions: with symbolic sizes in a compiled graph, expressions would be symbolic too.
    causal, is_grouped = problem.geometry.causal, False
    if query.shape[2] == 1:
        # Heads that share a key become queries, so that PyTorch does not copy the key for each.
        query, causal = query.reshape(*key.shape[:2], -1, query.shape[-1]), False
    elif query.shape[1] != key.shape[1]:
        is_grouped = True
    # Query, key and value get one width, because kernels for different widths are slower. Columns must be adjacent in
    # memory. Otherwise, PyTorch adds the causal mask to a dense matrix, and a key that is not finite spoils earlier
    # queries.
    width = max(query.shape[-1], value.shape[-1])
    out = scaled_dot_product_attention(
        columns_together(widened(query, width)),
        columns_together(widened(key, width)),
        columns_together(widened(value, width)),
        is_causal=causal,
        scale=problem.softmax_scale,
        enable_gqa=is_grouped,
    )
    return out[..., : value.shape[-1]].reshape(*problem.query.shape[:3], -1).to(problem.query.dtype)


def with_lanes(problem: Problem, factored: Sequence[Prior]) -> Problem | None:
    """Return the problem with some terms of its prior as extra columns of queries and keys, in float32.

    The result is None if a lane that grows with position is too large for float32. Values that cannot be read (traced,
    or on the meta device) count as small.
    """
    geometry, dtype, row_scale = problem.geometry, problem.compute_dtype, problem.row_scale
    query, key, value = (x.to(dtype) for x in (problem.query, problem.key, problem.value))
    if row_scale is not None and not problem.scales_prior:
        query, row_scale = query * row_scale.unsqueeze(-1), None
    columns: list[tuple[Tensor, Tensor]] = []
    for term in factored:
        phi, psi = checked_lanes(term, geometry.query_positions, geometry.key_positions, dtype)
        if Structure.STATIONARY not in term.structure and not _is_small(phi, psi.unsqueeze(-3)):
            return None
        columns.append((phi / problem.softmax_scale, psi.unsqueeze(-3)))
    missing = -(query.shape[-1] + sum(phi.shape[-1] for phi, _ in columns)) % LANES_AT_A_TIME
    columns.append((query.new_zeros(missing), key.new_zeros(missing)))
    of_queries, of_keys = (
        [x.expand(*given.shape[:3], -1) for x in part]
        for given, part in zip((query, key), zip(*columns, strict=True), strict=True)
    )
    query, key = torch.cat([query, *of_queries], dim=-1), torch.cat([key, *of_keys], dim=-1)
    return replace(problem, query=query, key=key, value=value, row_scale=row_scale)


def _is_small(phi: Tensor, psi: Tensor) -> bool:
    if phi.is_meta or phi.dtype == torch.float64 or is_traced() or torch._C._are_functorch_transforms_active():
        return True
    with torch.no_grad():
        return bool(((phi.abs().amax(-2) * psi.abs().amax(-2)).sum(-1) <= NEAR).all())
