"""The forward pass in linear memory: no bias matrix.

A block of queries and all keys that they see are one plain attention call whose bias is a view of a table, where that
is possible (``bias.py``). Elsewhere the bias is in memory, the keys are cut into pieces, and the results are merged by
their log-sum-exps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.geometry import block_length
from attention_priors.attention.observe import note
from attention_priors.attention.pruning.bounds import BLOCK
from attention_priors.attention.tiles.bias import Bias, far_rows
from attention_priors.attention.tiles.block_problem import EVERY, BlockProblem, Content, widened
from attention_priors.attention.tiles.exact import recompute_rows
from attention_priors.attention.tiles.threads import share
from attention_priors.attention.tiles.tiling import Part, RowBlock, Tile, ranges_of
from attention_priors.precision import NEAR, compute_dtype_of

ROWS = 1024
"""Queries per block: the CPU's kernel is at its best from 768 on."""
DIAGONAL_ROWS = 128
"""Queries per tile beside the causal diagonal: smaller ones waste less on keys nobody sees."""
KEYS_IN_MEMORY = 512
"""Keys per tile where the bias is in memory."""
PAIRS = 2**26
"""Pairs of a query and a key, all texts and heads counted, from which on threads of their own pay: PyTorch's own
threads wait in a loop for some milliseconds, and take a core meanwhile."""
BIAS_NUMBERS = 2**20
"""Numbers that a bias in memory may take: 4 MiB in float32."""
FLASH_ON_CPU = torch._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateImportUsage]
"""As ``torch.ops.aten`` has it, without a function of Python around it."""


def forward(content: Content, problem: BlockProblem) -> tuple[Tensor, Tensor]:
    """Output ``(B, H, Lq, Dv)`` in the queries' dtype, and log-sum-exp ``(B, H, Lq)`` in float64."""
    query, bias_of = content.query, problem.bias()
    out = query.new_empty(*query.shape[:-1], content.value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=problem.dtype)
    constant = query.new_zeros(query.shape[:-1], dtype=torch.float64)
    if _has_room(content, problem):
        bias_of = replace(problem, key_bias=None).bias()
    sizes, at_once = _sizes_of(problem, bias_of), problem.is_large(PAIRS)
    parts = problem.parts(content.key.shape[1], 1, sizes.matrices, at_once)
    work = [partial(_attend_part, part, sizes, content, problem, _Found(out, lse), constant) for part in parts]
    share(work, bias_of.for_thread, at_once)
    return finished(content, problem, out, lse, constant)


class _Sizes(NamedTuple):
    """How texts, heads, queries and keys are cut. It depends on the problem alone, and so do the numbers."""

    matrices: int | None
    """Of a part, one for each text and head, at most; None for any number."""
    rows: int
    """Queries of a block."""
    keys: int | None
    """Keys of a tile, at most; None for all."""


def _sizes_of(problem: BlockProblem, bias_of: Bias, heads: slice = EVERY) -> _Sizes:
    geometry = problem.geometry
    if not bias_of.in_memory:
        return _Sizes(None, problem.level(ROWS, 0.75 * NEAR, heads), None)
    # Heads share what is a mask alone.
    most, matrices = None, geometry.batch
    # The features of a network take memory too.
    largest = ROWS if bias_of.network is None else max(1, ROWS // 4)
    if bias_of.differs_between_heads:
        tile = min(largest, geometry.num_queries) * min(KEYS_IN_MEMORY, geometry.num_keys)
        most = matrices = min(geometry.batch * geometry.heads, max(2, block_length(tile, BIAS_NUMBERS)))
    rows = min(largest, max(DIAGONAL_ROWS, block_length(matrices * KEYS_IN_MEMORY, BIAS_NUMBERS)))
    keys = block_length(matrices * min(rows, geometry.num_queries), BIAS_NUMBERS)
    return _Sizes(most, problem.level(rows, 0.75 * NEAR, heads), max(KEYS_IN_MEMORY, keys))


def _has_room(content: Content, problem: BlockProblem) -> bool:
    """Whether biases of keys may be one more column of the keys, beside a table whose biases then are a view.

    Values are wider than keys, which are widened anyway (not for one query), and nothing else has biases in memory.
    """
    of_keys = problem.key_bias is not None and problem.table is not None and problem.row_scale is None
    (_, kv_heads, _, width), heads = content.key.shape, content.query.shape[1]
    fits = kv_heads == heads and width < content.value.shape[-1] and not is_one_on_cpu(content.query)
    return of_keys and fits and not problem.tiling.masked


def finished(
    content: Content, problem: BlockProblem, out: Tensor, lse: Tensor, constant: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add what was taken from the rows' log-priors to their log-sum-exp; compute what float32 does not hold again."""
    if constant is not None and problem.row_scale is not None:
        constant = constant * problem.row_scale
    whole = lse.double() if constant is None else lse + constant
    far = far_rows(lse)
    if far is not None:
        recompute_rows(content, problem, out, whole, far)
    return out, whole


def keys_and_values(content: Content, cut: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The keys and values that ``cut`` takes, with zeros up to one width, which the CPU's kernel wants."""
    width = None if is_one_on_cpu(content.query) else max(content.key.shape[-1], content.value.shape[-1])
    return widened(cut(content.key), width), widened(cut(content.value), width)


def _attend_part(
    part: Part,
    sizes: _Sizes,
    content: Content,
    problem: BlockProblem,
    result: _Found,
    constants: Tensor,
    bias_of: Bias,
) -> None:
    """Write the ``result`` of some texts and heads, and what is left out of their log-sum-exps."""
    key, value = keys_and_values(content, part.of_keys)
    if problem.kept is not None:
        # Its heads are computed one by one, and may have larger tiles than the steepest of them all.
        sizes = _sizes_of(problem, bias_of, part.heads)
    in_column, column = problem.key_bias is not None and bias_of.key_bias is None, content.key.shape[-1]
    far = False
    for block in _blocks(part, problem, sizes):
        whole = block.whole
        texts, here = part.within(whole.batches), (whole.batches, part.heads, whole.rows)
        query, best = content.queries(lambda x, here=here: x[here], key.shape[-1]).flip(2), None
        if in_column and whole.shape[1]:
            assert problem.key_bias is not None
            numbers = whole.cut_keys(problem.key_bias.expand(problem.geometry.batch, -1, -1), part.heads)
            best = numbers.amax(-1, keepdim=True)
            key[texts, :, whole.keys, column] = (numbers - best).to(key.dtype)
            query[..., column] = 1 / content.softmax_scale

        def attend(tile: Tile, query: Tensor, bias_of: Bias, texts: slice = texts) -> _Found:
            keys = (texts, slice(None), slice(tile.first, tile.last))
            return _Found(
                *_attend_tile(query, key[keys], value[keys], bias_of, tile, part.heads, content.softmax_scale)
            )

        centred, constant = bias_of.centred(whole, part.heads, far)
        found = _attend_block(block, query, partial(attend, bias_of=centred))
        if not far and problem.table is not None and far_rows(found.lse) is not None:
            far = True
            note("from query {} on, a constant is taken from the table for each block of queries", whole.start)
            centred, constant = bias_of.centred(whole, part.heads, far)
            found = _attend_block(block, query, partial(attend, bias_of=centred))
        constant = constant if best is None else best if constant is None else best + constant
        if constant is not None:
            constants[here] = constant
        result.out[here] = found.out[..., : result.out.shape[-1]].flip(2)
        result.lse[here] = found.lse.flip(2)
        del query, found  # the next block's memory


def _attend_block(block: RowBlock, query: Tensor, attend: Callable[[Tile, Tensor], _Found]) -> _Found:
    """Attention of a block's queries, in reverse order, over all that they see."""
    if len(block.own) == 1:
        found = attend(block.own[0], query)
    else:
        parts = []
        for tile in reversed(block.own):
            # Reversed, the tile's queries end where the block's begin.
            stop = block.whole.stop
            parts.append(attend(tile, query[:, :, stop - tile.stop : stop - tile.start]))
        found = _Found(*(torch.cat(numbers, dim=2) for numbers in zip(*parts, strict=True)))
    for tile in block.others:
        found = _merge(found, attend(tile, query))
    return found


def _blocks(part: Part, problem: BlockProblem, sizes: _Sizes) -> Iterator[RowBlock]:
    """The queries of a part, and the tiles of what they see."""
    tiling, keys = problem.tiling.of_texts(part.batches), sizes.keys
    if problem.keeps_all(part.batches.start, part.heads.start):
        yield from tiling.row_blocks(sizes.rows, DIAGONAL_ROWS, keys)
        return
    for block in tiling.blocks(BLOCK):
        ranges = problem.kept_keys(block, part.heads.start)
        tiles = [block._replace(first=a, last=b) for first, last in ranges for a, b in ranges_of(first, last, keys)]
        tiles = tiles or [block._replace(last=block.first)]
        yield RowBlock(block, tiles[:1], tiles[1:])


class _Found(NamedTuple):
    """What a tile gives: attention over its keys alone."""

    out: Tensor
    lse: Tensor


def _merge(before: _Found, found: _Found) -> _Found:
    """Add keys that were not there before: outputs weigh as much as their exponentials sum to."""
    # Where neither sees a key, the difference is nan, and either output is 0.
    weight = torch.sigmoid((found.lse - before.lse).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
    out = before.out.to(before.lse.dtype).lerp_(found.out.to(before.lse.dtype), weight.unsqueeze(-1))
    return _Found(out, torch.logaddexp(before.lse, found.lse))


def _attend_tile(
    query: Tensor, key: Tensor, value: Tensor, bias_of: Bias, tile: Tile, heads: slice, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of a tile's queries, in reverse order, over its keys."""
    bias = bias_of(tile, heads) if tile.first < tile.last else None
    return attend_plain(query, key, value, bias, None if bias is None else bias_of.blind(tile, bias), scale)


def attend_plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, blind: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Plain attention with a bias, and its log-sum-exp; the queries that are ``blind`` see no key."""
    _, heads, rows, _ = query.shape
    if not key.shape[2]:
        lse = query.new_full(query.shape[:-1], -math.inf, dtype=compute_dtype_of(query))
        return query.new_zeros(*query.shape[:-1], value.shape[-1]), lse
    if rows == 1 and is_one_on_cpu(query):
        out, lse = _attend_one(query, key, value, bias, scale)
    elif query.device.type == "cpu":
        bias = None if bias is None else bias.expand(-1, heads, rows, -1)
        out, lse = FLASH_ON_CPU(query, key, value, attn_mask=bias, scale=scale)
    else:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        # Products of half-precision numbers are exact in float32; in half precision logits would be rounded, and the
        # log-sum-exp with them.
        compute = compute_dtype_of(query)
        logits = (query.to(compute) @ key.to(compute).mT) * scale
        logits = logits if bias is None else logits + bias
        out, lse = logits.softmax(-1).to(value.dtype) @ value, logits.logsumexp(-1)
    return (out, lse) if blind is None else (out.masked_fill(blind, 0.0), lse.masked_fill(blind.squeeze(-1), -math.inf))


def is_one_on_cpu(query: Tensor) -> bool:
    """Whether it is one query per text, whose products :func:`logits_of_one` takes."""
    return query.device.type == "cpu" and query.shape[2] == 1 and query.dtype in (torch.float32, torch.float64)


def logits_of_one(query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The logits of one query per text, ``(B * Hkv, H / Hkv, Lk)``, by a product that reads each key once.

    Args:
        query: ``(B, H, 1, D)``.
        key: ``(B, Hkv, Lk, D)``.
        bias: what expands to ``(B, H, 1, Lk)``; None for none.
        scale: of the content.
    """
    batch, heads, _, width = query.shape
    kv_heads, number = key.shape[1:3]
    # Query heads that share a key head are rows of one product.
    query = query.reshape(batch * kv_heads, heads // kv_heads, width)
    key = key.reshape(batch * kv_heads, number, width)
    if bias is None:
        return torch.bmm(query, key.mT).mul_(scale)
    bias = bias.expand(batch, heads, 1, number).reshape(*query.shape[:2], number).to(query.dtype)
    return torch.baddbmm(bias, query, key.mT, alpha=scale)


def mean_of_one(weights: Tensor, value: Tensor) -> Tensor:
    """The output ``(B, H, 1, Dv)`` of such weights, by a product that reads each value once."""
    batch, kv_heads, number, width = value.shape
    return torch.bmm(weights, value.reshape(batch * kv_heads, number, width)).view(batch, -1, 1, width)


def _attend_one(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    logits = logits_of_one(query, key, bias, scale)
    weights = logits.softmax(-1)
    # The largest weight is exp(highest - lse); exponentials of our own would be slow where they underflow.
    lse = logits.amax(-1) - weights.amax(-1).log()
    return mean_of_one(weights, value), lse.view(query.shape[:-1])
