"""Recomputation of rows that are far from 0: there, float32 or an added mask is not exact enough.

A float32 of size ``z`` has an error of up to ``z · 2^-24``: 3e-4 for a log-prior of -5000 nats. Usually, this error
does not matter: a query attends where the log-prior is near 0, and a key at -5000 nats has no weight. But if all keys
are far, or the logit scale is negative, the best keys have such log-priors, and the log-sum-exp shows the error. In
float64, the same happens to rows that subtract the bias of a key that they do not see, if it is 1e20 nats.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from attention_priors.attention.geometry import block_length
from attention_priors.attention.observe import note
from attention_priors.attention.tiles.bias import Bias
from attention_priors.attention.tiles.block_problem import BlockProblem, Content
from attention_priors.attention.tiles.tiling import Tile, Tiling
from attention_priors.precision import log_sum_exp


def recompute_rows(content: Content, problem: BlockProblem, out: Tensor, whole: Tensor, far: Tensor) -> None:
    """Overwrite rows whose log-sum-exp is NaN, or far from 0, with exact results.

    Log-priors are computed in float64, minus the best that the row sees, and masks are set instead of added. (A hidden
    key that is not finite has a logit of NaN or infinity. With a mask of ``-inf`` added, this logit is NaN and spoils
    rows that do not see the key. Rows that see such a key are NaN either way.) Memory: as many logits as
    :func:`block_length` allows.

    Args:
        content: queries, keys and values.
        problem: prior and masks. Blocks of keys that pruning skips are computed too.
        out: output ``(B, H, Lq, Dv)``, overwritten.
        whole: full log-sum-exp in float64, overwritten.
        far: rows to recompute.
    """
    note("{} of {} rows are computed in float64, block by block", int(far.sum()), far.numel())
    geometry = problem.geometry
    tile = Tile(slice(0, geometry.batch), 0, geometry.num_queries, 0, geometry.num_keys)
    tiling = Tiling(geometry, problem.tiling.reach, [tile], geometry.has_masks)
    bias_of = Bias(problem, tiling)
    rows = block_length(geometry.batch * geometry.heads * geometry.num_keys)
    for block in tiling.blocks(rows):
        own = (slice(None), slice(None), block.rows)
        here = far[own]
        if bool(here.any()):
            part_out, part_lse = _attend(content, bias_of, block)
            out[own] = torch.where(here.unsqueeze(-1), part_out.to(out.dtype), out[own])
            whole[own] = torch.where(here, part_lse, whole[own])


def without_best(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return biases ``(..., e)`` minus each row's best, and the best ``(..., 1)``, 0 for a row that sees no key."""
    best = bias.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    return bias - best, best


def _attend(content: Content, bias_of: Bias, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of a tile's queries, in order."""
    dtype, (batch, kv_heads) = bias_of.dtype, content.key.shape[:2]
    heads, cut = slice(0, content.query.shape[1]), partial(tile.cut_keys, heads=slice(0, kv_heads))
    query = content.reversed_queries(partial(tile.cut_rows, heads=heads)).to(dtype)
    key, value = cut(content.key).to(dtype), cut(content.value).to(dtype)
    bias, best = without_best(bias_of.in_full(tile, heads))
    logits = bias.to(dtype)
    # Query heads that share a key head form one matrix.
    matrices = (batch, kv_heads, -1)
    products = query.reshape(*matrices, key.shape[-1]) @ key.mT
    logits = logits + products.view_as(logits) * content.softmax_scale
    # Log-priors are finite, so only masks are -inf.
    logits.masked_fill_(torch.isneginf(bias), -math.inf)
    lse = log_sum_exp(logits)
    weights = logits.softmax(-1).masked_fill_(torch.isneginf(lse).unsqueeze(-1), 0.0)
    out = (weights.view(*matrices, tile.shape[1]) @ value).view(*query.shape[:3], -1)
    return out.flip(2), (lse + best.squeeze(-1)).flip(2)
