"""Attention over a short context, forward and backward, with all logits in memory at once.

Tiles and what is merged from them pay at length; over a few hundred tokens their upkeep takes longer than the products.
Here the logits of all queries and keys are one tile, and both passes take its softmax anew.

The same matrix, cut into blocks of queries, computes rows of any problem again that hidden keys have spoiled.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from attention_priors.attention.content import Content
from attention_priors.attention.geometry import Geometry, block_length
from attention_priors.attention.tiles.bias import Bias
from attention_priors.attention.tiles.block_problem import BlockProblem, Gradients
from attention_priors.attention.tiles.tiling import Tile, Tiling

MOST_PAIRS = 2**15
"""Pairs of a query and a key up to which this is the faster way; tiles pass over those that a causal mask hides."""
MOST_NUMBERS = 2**20
"""Logits of all heads and texts likewise: more of them do not stay in a core's own memory."""


def is_short(geometry: Geometry, kept: Tensor | None) -> bool:
    """Whether a problem is one to be computed here."""
    pairs = geometry.num_queries * geometry.num_keys
    numbers = geometry.batch * geometry.heads * pairs
    # One query, as in decoding, is no matrix; where blocks of keys are left out there is more than one block.
    return kept is None and geometry.num_queries > 1 and pairs <= MOST_PAIRS and numbers <= MOST_NUMBERS


def forward(content: Content, problem: BlockProblem) -> tuple[Tensor, Tensor]:
    """Output ``(B, H, Lq, Dv)`` in the content's dtype, and log-sum-exp ``(B, H, Lq)``."""
    short = _Matrix(content, problem, 0, problem.geometry.num_queries)
    if not short.tile.shape[1]:
        out = content.query.new_zeros(*content.query.shape[:-1], content.value.shape[-1], dtype=content.dtype)
        return out, torch.full(content.query.shape[:-1], -math.inf, dtype=problem.dtype, device=out.device)
    return short.attend(short.logits())


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
    batch, heads, num_queries = lse.shape
    rows = block_length(batch * heads * problem.geometry.num_keys)
    spoiled = lse.isnan()
    for start in range(0, num_queries, rows):
        here = slice(start, min(start + rows, num_queries))
        if not bool(spoiled[:, :, here].any()):
            continue
        matrix = _Matrix(content, problem, here.start, here.stop)
        part_out, part_lse = matrix.attend(matrix.hide(matrix.logits()))
        out[:, :, here] = torch.where(spoiled[:, :, here].unsqueeze(-1), part_out, out[:, :, here])
        lse[:, :, here] = torch.where(spoiled[:, :, here], part_lse, lse[:, :, here])


def backward(
    content: Content,
    problem: BlockProblem,
    grads: tuple[Tensor, Tensor],
    wanted: tuple[bool, bool],
) -> Gradients:
    """Gradients of everything.

    Args:
        content: and
        problem: as for :func:`forward`.
        grads: those of output and log-sum-exp.
        wanted: whether to compute those of table and row scale.
    """
    short, table, row_scale = (
        _Matrix(content, problem, 0, problem.geometry.num_queries),
        problem.table,
        problem.row_scale,
    )
    table_grad = torch.zeros_like(table) if table is not None and wanted[0] else None
    scale_grad = torch.zeros_like(row_scale) if row_scale is not None and wanted[1] else None
    if not short.tile.shape[1]:
        query, key = (
            torch.zeros(*x.shape[:-1], content.width, dtype=problem.dtype, device=x.device)
            for x in (content.query, content.key)
        )
        return Gradients(query, key, torch.zeros_like(content.value), table_grad, scale_grad)
    weights = short.weights(short.logits(), short.blind())
    out_grad, lse_grad = (grad.to(problem.dtype).flip(2) for grad in grads)
    out_grad = short.stacked(out_grad)
    weights_grad = torch.bmm(out_grad, short.value.mT).view_as(weights)
    value_grad = torch.bmm(out_grad.mT, short.stacked(weights)).mT
    # Of the weights as they are here, and not of the output that was stored: then the gradient of a row that sees one
    # key is exactly 0, even where the derivative of its log-prior is 1e30.
    logits_grad = torch.ops.aten._softmax_backward_data(weights_grad, weights, -1, problem.dtype)
    if bool(lse_grad.any()):
        logits_grad.addcmul_(weights, lse_grad.unsqueeze(-1))
    stacked, scale = short.stacked(logits_grad), problem.softmax_scale
    query_grad = torch.bmm(stacked, short.key).view(*weights.shape[:3], -1).mul_(scale).flip(2)
    key_grad = torch.bmm(short.query.mT, stacked).mul_(scale).mT
    if scale_grad is not None:
        scale_grad = (logits_grad * short.bias.log_prior(short.tile, short.heads)).sum(-1).flip(2)
    if table_grad is not None:
        short.add_to_table(table_grad, logits_grad)
    return Gradients(
        query_grad, short.all_keys(key_grad), short.all_keys(value_grad).to(content.value.dtype), table_grad, scale_grad
    )


class _Matrix:
    """The queries ``start..stop`` of a problem and all keys, as one tile.

    Its queries are in reverse order: the bias is then a view of a table, see ``bias.py``.
    """

    def __init__(self, content: Content, problem: BlockProblem, start: int, stop: int) -> None:
        geometry, self.problem, self.content = problem.geometry, problem, content
        whole = Tile(slice(0, geometry.batch), start, stop, 0, geometry.num_keys)
        tiling = Tiling(geometry, None, [whole], geometry.has_masks)
        # A table ends where causality hides what comes after.
        first, last = tiling.keys_of(whole, start, stop)
        self.tile = whole._replace(first=first, last=last)
        self.heads = slice(0, geometry.heads)
        table, inside = problem.table, problem.inside
        self.bias = Bias(tiling, problem.distances, table, inside, problem.row_scale, problem.dtype)
        self.batch, self.kv_heads = content.key.shape[:2]
        cut = partial(self.tile.cut_keys, heads=slice(0, self.kv_heads))
        cut_rows = partial(self.tile.cut_rows, heads=self.heads)
        self.query = self.stacked(content.queries(cut_rows, content.width).to(problem.dtype).flip(2))
        self.key = content.keys(cut, content.width).to(problem.dtype).flatten(0, 1)
        self.value = content.values(cut).to(problem.dtype).flatten(0, 1)

    def stacked(self, tensor: Tensor) -> Tensor:
        """``(B, H, Lq, n)`` as ``(B · Hkv, H / Hkv · Lq, n)``: query heads that share a key head are one matrix."""
        return tensor.reshape(self.batch * self.kv_heads, -1, tensor.shape[-1])

    def logits(self) -> Tensor:
        """``(B, H, Lq, Lk)``, ``-inf`` where hidden."""
        geometry = self.problem.geometry
        shape = (geometry.batch, geometry.heads, *self.tile.shape)
        logits = torch.empty(shape, dtype=self.problem.dtype, device=geometry.device)
        self.bias.write(logits, self.tile, self.heads, None)
        self.stacked(logits).baddbmm_(self.query, self.key.mT, alpha=self.problem.softmax_scale)
        return logits

    def hide(self, logits: Tensor) -> Tensor:
        """Set the logits of hidden keys to ``-inf``, whatever they are."""
        # Only a mask hides: a log-prior is finite.
        mask = self.bias.mask(self.tile, self.heads)
        return logits if mask is None else logits.masked_fill_(torch.isneginf(mask), -math.inf)

    def attend(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the tile's queries, in order. Writes to the logits."""
        highest, blind = logits.amax(-1), self.blind()
        weights = self.weights(logits, blind)
        # The largest weight is exp(highest - lse): much the faster way.
        lse = highest - weights.amax(-1).log()
        if blind is not None:
            lse.masked_fill_(blind.squeeze(-1), -math.inf)
        out = torch.bmm(self.stacked(weights), self.value).view(*weights.shape[:3], -1).flip(2)
        return out.to(self.content.dtype).contiguous(), lse.flip(2)

    def weights(self, logits: Tensor, blind: Tensor | None) -> Tensor:
        """Their softmax, 0 in rows that see no key. Writes to the logits."""
        if blind is None:
            return logits.softmax(-1)
        return logits.masked_fill_(blind, 0.0).softmax(-1).masked_fill_(blind, 0.0)

    def blind(self) -> Tensor | None:
        """Which queries see no key, ``(B or 1, H or 1, Lq, 1)``; None if every one sees one."""
        # Only a mask hides: a log-prior is finite.
        mask = self.bias.mask(self.tile, self.heads)
        if mask is None:
            return None
        blind = mask.amax(-1, keepdim=True) == -math.inf
        return blind if bool(blind.any()) else None

    def all_keys(self, tensor: Tensor) -> Tensor:
        """``(B · Hkv, e, n)`` of the tile's keys as ``(B, Hkv, Lk, n)``, 0 elsewhere."""
        missing = self.problem.geometry.num_keys - self.tile.last
        return torch.nn.functional.pad(tensor, (0, 0, self.tile.first, missing)).view(
            self.batch, self.kv_heads, -1, tensor.shape[-1]
        )

    def add_to_table(self, table_grad: Tensor, logits_grad: Tensor) -> None:
        """Add the logits' gradients to those of their distances."""
        if self.problem.row_scale is not None:
            logits_grad = logits_grad * self.bias.scale(self.tile, self.heads)
        if self.problem.geometry.offset is not None:
            logits_grad = logits_grad.sum(0, keepdim=True)
        # After as many columns of zeros as there are rows: see Distances.add.
        padded = torch.nn.functional.pad(logits_grad, (self.tile.shape[0], 0))
        self.problem.distances.add(table_grad, self.tile, padded)
