"""Rows that hidden keys have spoiled, computed again."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from attention_priors.attention.content import Content
from attention_priors.attention.geometry import block_length
from attention_priors.attention.tiles.bias import Bias
from attention_priors.attention.tiles.block_problem import BlockProblem
from attention_priors.attention.tiles.tiling import Tile, Tiling, ranges_of


def recompute_spoiled_rows(content: Content, problem: BlockProblem, out: Tensor, lse: Tensor) -> None:
    """Overwrite the rows whose log-sum-exp is NaN with rows whose masks are set instead of added.

    A hidden key that is not finite has a logit of NaN or infinity. With a mask of ``-inf`` added, this logit stays NaN
    and spoils rows that do not see the key. The log-sum-exp shows it, and is ``D`` times smaller than the output.
    Rows that see such a key are NaN either way. Memory: as many logits as :func:`block_length` allows.

    Args:
        content: and
        problem: as for :func:`forward`; blocks of keys that pruning leaves out are computed too.
        out: is written to, ``(B, H, Lq, Dv)``.
        lse: is written to, ``(B, H, Lq)``.
    """
    # One number to look at. A sum is NaN if a term is, and for infinities of both signs: then no row is spoiled.
    if not math.isnan(float(lse.sum())):
        return
    geometry, spoiled = problem.geometry, lse.isnan()
    whole = Tile(slice(0, geometry.batch), 0, geometry.num_queries, 0, geometry.num_keys)
    tiling = Tiling(geometry, None, [whole], geometry.has_masks)
    bias_of = Bias(tiling, problem.distances, problem.table, problem.inside, problem.row_scale, problem.dtype)
    rows = block_length(geometry.batch * geometry.heads * geometry.num_keys)
    for start, stop in ranges_of(0, geometry.num_queries, rows):
        here = spoiled[:, :, start:stop]
        if bool(here.any()):
            first, last = tiling.keys_of(whole, start, stop)
            tile = whole._replace(start=start, stop=stop, first=first, last=last)
            part_out, part_lse = _attend(content, bias_of, tile)
            out[:, :, start:stop] = torch.where(here.unsqueeze(-1), part_out.to(out.dtype), out[:, :, start:stop])
            lse[:, :, start:stop] = torch.where(here, part_lse, lse[:, :, start:stop])


def _attend(content: Content, bias_of: Bias, tile: Tile) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a tile's queries, in order."""
    dtype, (batch, kv_heads) = bias_of.dtype, content.key.shape[:2]
    heads, cut = slice(0, content.query.shape[1]), partial(tile.cut_keys, heads=slice(0, kv_heads))
    query = content.queries(partial(tile.cut_rows, heads=heads), content.width).to(dtype).flip(2)
    key, value = content.keys(cut, content.width).to(dtype), content.values(cut).to(dtype)
    logits = bias_of.write(query.new_empty(*query.shape[:3], tile.shape[1]), tile, heads, None)
    # Query heads that share a key head are one matrix.
    matrices = (batch, kv_heads, -1)
    logits.view(*matrices, tile.shape[1]).add_(
        query.reshape(*matrices, key.shape[-1]) @ key.mT, alpha=content.softmax_scale
    )
    # Only a mask hides: a log-prior is finite.
    mask = bias_of.mask(tile, heads)
    if mask is not None:
        logits.masked_fill_(torch.isneginf(mask), -math.inf)
    lse = logits.logsumexp(-1)
    weights = logits.softmax(-1).masked_fill_(torch.isneginf(lse).unsqueeze(-1), 0.0)
    out = (weights.view(*matrices, tile.shape[1]) @ value).view(*query.shape[:3], -1)
    return out.flip(2), lse.flip(2)
