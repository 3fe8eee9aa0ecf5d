"""Forward pass in linear memory, without a bias matrix.

If possible, a block of queries and all keys that they see are one plain attention call, whose bias is a view of a table
(``bias.py``). Otherwise, the bias is in memory, the keys are cut into pieces, and the results are merged by their
log-sum-exps.
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
from attention_priors.attention.tiles.block_problem import BlockProblem, Content, widened
from attention_priors.attention.tiles.exact import recompute_rows
from attention_priors.attention.tiles.threads import share
from attention_priors.attention.tiles.tiling import Part, RowBlock, Tile, ranges_of
from attention_priors.precision import NEAR, compute_dtype_of

ROWS = 1024
"""Queries per block. The CPU's kernel is fastest from 768 queries on."""
LEAST_ROWS = 16
"""Smallest number of queries per block, however steep key biases are."""
AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether PyTorch uses the CPU's AVX-512 instructions."""
DIAGONAL_ROWS = 256 if AVX512 else 128
"""Least number of queries per tile next to the causal diagonal or at the end of a window. Smaller tiles waste less work
on hidden keys. But the CPU's kernel computes 32 queries at a time in tiles of fewer than 192, and 64 in larger ones.
With 32, two threads of an Intel Xeon with AVX-512 are not faster than one."""
KEYS_IN_MEMORY = 512
"""Keys per tile if the bias is in memory."""
PAIRS = 2**26
"""Query-key pairs, over all heads and rows of the batch, from which separate threads pay off. (PyTorch's own threads
spin for some milliseconds, and occupy a core meanwhile.)"""
SMALL_PRODUCT = 3 * 2**17
"""Multiplications for the logits of one query, over all heads and rows of the batch, up to which PyTorch's kernel is
faster than two products. It takes one call, but reads a key again for each query head."""
BIAS_NUMBERS = 2**20
"""Largest bias in memory, in numbers: 4 MiB in float32."""
FLASH_ON_CPU = torch._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateImportUsage]
"""CPU kernel, as in ``torch.ops.aten`` but without a Python wrapper."""


def forward(content: Content, problem: BlockProblem) -> tuple[Tensor, Tensor]:
    """Compute the output ``(B, H, Lq, Dv)`` in the queries' dtype, and the log-sum-exp ``(B, H, Lq)`` in float64."""
    query, bias_of = content.query, problem.bias()
    out = empty_output(query, content.value)
    lse = query.new_empty(query.shape[:-1], dtype=problem.dtype)
    constant = query.new_zeros(query.shape[:-1], dtype=torch.float64)
    if _has_room(content, problem):
        bias_of = replace(problem, key_bias=None).bias()
    sizes, at_once = sizes_of(problem, bias_of), problem.is_large(PAIRS)
    parts = problem.parts(content.key.shape[1], 1, sizes.matrices, at_once)
    work = [partial(_attend_part, part, sizes, content, problem, _Found(out, lse), constant) for part in parts]
    share(work, bias_of.for_thread, at_once)
    return finished(content, problem, out, lse, constant)


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """Return memory for an output ``(B, H, Lq, Dv)``, with the heads of a query side by side.

    PyTorch's kernel has the same layout. Models read the heads of a query as one vector, which then needs no copy.
    """
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)


class Sizes(NamedTuple):
    """Sizes of parts, blocks and tiles. They depend only on the problem, and so do the results."""

    matrices: int | None
    """Largest number of matrices (heads of rows of the batch) in a part; None for no limit."""
    rows: list[int]
    """Queries per block of each head."""
    pairs: int | None
    """Largest number of query-key pairs in a tile of one matrix with many queries; None for no limit."""


def sizes_of(problem: BlockProblem, bias_of: Bias) -> Sizes:
    """Return the sizes of parts, blocks and tiles of a problem."""
    geometry = problem.geometry
    largest, most, pairs = ROWS, None, None
    if bias_of.in_memory:
        # The features of a network take memory too.
        largest = ROWS if bias_of.network is None else max(1, ROWS // 4)
        matrices = geometry.batch
        # Otherwise, heads share a bias that is only a mask.
        if bias_of.differs_between_heads:
            tile = min(largest, geometry.num_queries) * min(KEYS_IN_MEMORY, geometry.num_keys)
            most = matrices = min(geometry.batch * geometry.heads, max(2, block_length(tile, BIAS_NUMBERS)))
        largest = min(largest, max(DIAGONAL_ROWS, block_length(matrices * KEYS_IN_MEMORY, BIAS_NUMBERS)))
        pairs = block_length(matrices, BIAS_NUMBERS)
    rows = problem.levels(largest, 0.75 * NEAR, LEAST_ROWS)
    if len({*rows}) > 1:
        most = 1  # each head is computed alone, in blocks of its own length
    return Sizes(most, rows, pairs)


def _has_room(content: Content, problem: BlockProblem) -> bool:
    """Return whether key biases may be an extra column of the keys, so that the table's bias is a view.

    This requires that values are wider than keys, because keys are then padded anyway (not for one query), and that
    nothing else needs a bias in memory.
    """
    of_keys = problem.key_bias is not None and problem.table is not None and problem.row_scale is None
    (_, kv_heads, _, width), heads = content.key.shape, content.query.shape[1]
    fits = kv_heads == heads and width < content.value.shape[-1] and not is_one_on_cpu(content.query)
    return of_keys and fits and not problem.tiling.masked


def finished(
    content: Content, problem: BlockProblem, out: Tensor, lse: Tensor, constant: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add the constants back to the log-sum-exps, and recompute rows for which float32 is not exact enough."""
    if constant is not None and problem.row_scale is not None:
        constant = constant * problem.row_scale
    whole = lse.double() if constant is None else lse + constant
    far = far_rows(lse)
    if far is not None:
        recompute_rows(content, problem, out, whole, far)
    return out, whole


def keys_and_values(content: Content, cut: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the keys and values that ``cut`` selects, padded to one width, as the CPU's kernel requires."""
    width = None if is_one_on_cpu(content.query) else max(content.key.shape[-1], content.value.shape[-1])
    return widened(cut(content.key), width), widened(cut(content.value), width)


def _attend_part(
    part: Part,
    sizes: Sizes,
    content: Content,
    problem: BlockProblem,
    result: _Found,
    constants: Tensor,
    bias_of: Bias,
) -> None:
    """Write the ``result`` of a part, and the constants that its log-sum-exps lack."""
    key, value = keys_and_values(content, part.of_keys)
    in_column, column = problem.key_bias is not None and bias_of.key_bias is None, content.key.shape[-1]
    far = False
    for block in blocks_of(part, problem, sizes):
        whole = block.whole
        texts, here = part.within(whole.batches), (whole.batches, part.heads, whole.rows)
        query, best = content.reversed_queries(lambda x, here=here: x[here], key.shape[-1]), None
        if in_column and whole.shape[1]:
            assert problem.key_bias is not None
            numbers = whole.cut_keys(problem.key_bias.expand(problem.geometry.batch, -1, -1), part.heads)
            best = numbers.amax(-1, keepdim=True)
            key[texts, :, whole.keys, column] = (numbers - best).to(key.dtype)
            query[..., column] = 1 / content.softmax_scale

        def attend(tile: Tile, query: Tensor, bias_of: Bias, texts: slice = texts) -> _Found:
            keys = (texts, slice(None), slice(tile.first, tile.last))
            bias = bias_of(tile, part.heads) if tile.first < tile.last else None
            blind = None if bias is None else bias_of.blind(tile, bias)
            return _Found(*attend_plain(query, key[keys], value[keys], bias, blind, content.softmax_scale))

        centred, constant = bias_of.centred(whole, part.heads, far)
        found = _attend_block(block, query, partial(attend, bias_of=centred))
        if not far and problem.table is not None and any(far_rows(one.lse) is not None for _, one in found):
            far = True
            note("from query {} on, a constant is subtracted from the table for each block of queries", whole.start)
            centred, constant = bias_of.centred(whole, part.heads, far)
            found = _attend_block(block, query, partial(attend, bias_of=centred))
        constant = constant if best is None else best if constant is None else best + constant
        if constant is not None:
            constants[here] = constant
        _write(result, found, part.heads)
        del query, found  # frees memory for the next block


def _write(result: _Found, found: list[tuple[Tile, _Found]], heads: slice) -> None:
    """Write the results of tiles, whose queries are in reverse order, to their place in ``result``."""
    for tile, one in found:
        tile.cut_rows(result.out, heads).copy_(one.out[..., : result.out.shape[-1]].flip(2))
        tile.cut_rows(result.lse, heads).copy_(one.lse.flip(2))


def _attend_block(
    block: RowBlock, query: Tensor, attend: Callable[[Tile, Tensor], _Found]
) -> list[tuple[Tile, _Found]]:
    """Compute attention of a block's queries, in reverse order, over all keys that they see.

    Returns:
        Tiles that divide the queries, with the results of their queries.
    """
    (_, _, stop, _, _), found = block.whole, None
    for strip in block.strips:
        # Queries are in reverse order, so their indices count from the block's end.
        parts = [(tile, attend(tile, query[:, :, stop - tile.stop : stop - tile.start])) for tile in reversed(strip)]
        if len(block.strips) == 1:
            return parts
        results = [one for _, one in parts]
        one = results[0] if len(parts) == 1 else _Found(*(torch.cat(xs, dim=2) for xs in zip(*results, strict=True)))
        found = one if found is None else _merge(found, one)
    assert found is not None
    return [(block.whole, found)]


def blocks_of(part: Part, problem: BlockProblem, sizes: Sizes) -> Iterator[RowBlock]:
    """Yield the blocks of a part's queries, with the tiles of the keys that they see."""
    tiling, rows, keys = problem.tiling.of_texts(part.batches), min(sizes.rows[part.heads]), None
    if sizes.pairs is not None:
        keys = max(KEYS_IN_MEMORY, block_length(min(rows, problem.geometry.num_queries), sizes.pairs))
    if problem.kept is None or problem.whole_heads[part.batches.start][part.heads.start]:
        yield from tiling.row_blocks(rows, DIAGONAL_ROWS, keys)
        return
    # Blocks of queries divide the blocks of pruning, so each lies within one.
    for block in tiling.blocks(min(BLOCK, 2 ** (rows.bit_length() - 1))):
        ranges = problem.kept_keys(block, part.heads.start)
        tiles = [block._replace(first=a, last=b) for first, last in ranges for a, b in ranges_of(first, last, keys)]
        yield RowBlock(block, [[tile] for tile in tiles or [block._replace(last=block.first)]])


class _Found(NamedTuple):
    """Attention over the keys of one tile or several."""

    out: Tensor
    lse: Tensor


def _merge(before: _Found, found: _Found) -> _Found:
    """Merge attention over disjoint sets of keys, with weights from the log-sum-exps."""
    # If a query sees no key in either set, the difference is NaN, and both outputs are 0.
    weight = torch.sigmoid((found.lse - before.lse).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
    out = before.out.to(before.lse.dtype).lerp_(found.out.to(before.lse.dtype), weight.unsqueeze(-1))
    return _Found(out, torch.logaddexp(before.lse, found.lse))


def attend_plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, blind: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute plain attention with a bias ``(1 or B, 1 or H, 1 or Lq, Lk)``, and its log-sum-exp.

    Queries that are ``blind`` see no key.
    """
    if not key.shape[2]:
        lse = query.new_full(query.shape[:-1], -math.inf, dtype=compute_dtype_of(query))
        return query.new_zeros(*query.shape[:-1], value.shape[-1]), lse
    is_small = query.numel() * key.shape[2] <= SMALL_PRODUCT and key.shape[-1] == value.shape[-1]
    if is_one_on_cpu(query) and not is_small:
        out, lse = _attend_one(query, key, value, bias, scale)
    elif query.is_cpu:
        out, lse = FLASH_ON_CPU(query, key, value, attn_mask=bias, scale=scale)
    else:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        # Products of half-precision numbers are exact in float32. In half precision, logits and log-sum-exps would be
        # rounded.
        compute = compute_dtype_of(query)
        logits = (query.to(compute) @ key.to(compute).mT) * scale
        logits = logits if bias is None else logits + bias
        out, lse = logits.softmax(-1).to(value.dtype) @ value, logits.logsumexp(-1)
    return (out, lse) if blind is None else (out.masked_fill(blind, 0.0), lse.masked_fill(blind.squeeze(-1), -math.inf))


def is_one_on_cpu(query: Tensor) -> bool:
    """Return whether :func:`_attend_one` supports the query: one per row of the batch, on the CPU."""
    return query.is_cpu and query.shape[2] == 1 and query.dtype in (torch.float32, torch.float64)


def _attend_one(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with one query per row of the batch, reading each key and value once."""
    (batch, heads, _, width), (kv_heads, number) = query.shape, key.shape[1:3]
    # Query heads that share a key head are rows of one product.
    rows = query.reshape(batch * kv_heads, heads // kv_heads, width)
    key, value = (x.reshape(batch * kv_heads, number, x.shape[-1]) for x in (key, value))
    if bias is None:
        logits = torch.bmm(rows, key.mT).mul_(scale)
    else:
        bias = bias.expand(batch, heads, 1, number).reshape(*rows.shape[:2], number).to(query.dtype)
        logits = torch.baddbmm(bias, rows, key.mT, alpha=scale)
    weights = logits.softmax(-1)
    # The largest weight is exp(highest - lse). A separate exponential would be slow where it underflows.
    lse = logits.amax(-1) - weights.amax(-1).log()
    return torch.bmm(weights, value).view(*query.shape[:-1], -1), lse.view(query.shape[:-1])
