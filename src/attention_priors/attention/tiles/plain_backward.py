"""Backward pass of a prior that does not learn: PyTorch's kernel for each tile, with the tile's bias.

The kernel returns no gradient of the bias, so all other problems need ``backward.py``.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from attention_priors.attention.tiles.backward import LARGEST_STORED_LSE, PAIRS
from attention_priors.attention.tiles.bias import Bias
from attention_priors.attention.tiles.block_problem import BlockProblem, Content, Gradients, widened
from attention_priors.attention.tiles.forward import Sizes, blocks_of, sizes_of
from attention_priors.attention.tiles.threads import share
from attention_priors.attention.tiles.tiling import Part
from attention_priors.precision import flushes_denormals

STEEP = 40.0
"""Nats by which a log-prior may be below a row's log-sum-exp. With more, weights may be denormal, which some CPUs
compute very slowly. ``backward.py`` drops them."""
FLASH_BACKWARD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""Backward pass of the CPU's kernel."""


def supports(problem: BlockProblem, lse: Tensor, lse_grad: Tensor | None, wanted: tuple[bool, ...]) -> bool:
    """Return whether the kernel computes all gradients, exactly enough and without denormal numbers.

    Args:
        problem: prior and masks.
        lse: log-sum-exp.
        lse_grad: its gradient.
        wanted: whether to compute the gradients of table, key bias, row scale and network.
    """
    if lse.device.type != "cpu" or lse_grad is not None or problem.key_bias is not None:
        return False
    # With pruned keys, heads that share keys may keep different ones.
    if problem.kept is not None:
        return False
    if wanted[0] or wanted[3] or (wanted[2] and problem.row_scale is not None):
        return False
    seen = lse.masked_fill(torch.isneginf(lse), 0.0)
    lowest, highest = map(float, seen.aminmax())
    if not (lowest >= -LARGEST_STORED_LSE and highest <= LARGEST_STORED_LSE):
        return False
    return flushes_denormals() or problem.table is None or float(problem.table.min()) >= highest - STEEP


def backward(
    content: Content, problem: BlockProblem, saved: tuple[Tensor, Tensor], out_grad: Tensor, wants_scale: bool
) -> Gradients:
    """Compute the gradients of queries, keys, values and, if ``wants_scale``, of the queries' scale.

    Args:
        content: queries, keys and values.
        problem: prior, masks and tiling. :func:`supports` must be true.
        saved: output and log-sum-exp.
        out_grad: gradient of the output.
        wants_scale: whether to compute the gradient of the scale.
    """
    out, lse = saved
    # A query that sees no key then gives each key a weight of 0.
    lse = lse.to(problem.dtype).masked_fill(torch.isneginf(lse), math.inf)
    heads, kv_heads = content.query.shape[1], content.key.shape[1]
    query_grad, key_grad, value_grad = (
        torch.empty_like(x, dtype=problem.dtype, memory_format=torch.contiguous_format) for x in content[:3]
    )
    found = Gradients(query_grad, key_grad, value_grad, None, None, None)
    bias_of = problem.bias()
    sizes, at_once = sizes_of(problem, bias_of), problem.is_large(PAIRS)
    parts = problem.parts(kv_heads, heads // kv_heads, sizes.matrices, at_once)
    of_rows = (out, lse, out_grad)
    work = [partial(_differentiate, part, sizes, content, problem, of_rows, found) for part in parts]
    share(work, bias_of.for_thread, at_once)
    return found.unscaled(content, wants_scale)


def _differentiate(
    part: Part,
    sizes: Sizes,
    content: Content,
    problem: BlockProblem,
    of_rows: tuple[Tensor, Tensor, Tensor],
    found: Gradients,
    bias_of: Bias,
) -> None:
    """Write the gradients of a part's queries, keys and values to ``found``."""
    group = (part.heads.stop - part.heads.start) // (part.kv_heads.stop - part.kv_heads.start)
    width = max(content.key.shape[-1], content.value.shape[-1])
    key, value = (widened(part.of_keys(x), width).repeat_interleave(group, dim=1) for x in content[1:3])
    key_grad, value_grad = (torch.zeros_like(x, dtype=problem.dtype) for x in (key, value))
    for block in blocks_of(part, problem, sizes):
        whole = block.whole
        texts, here = part.within(whole.batches), (whole.batches, part.heads, whole.rows)
        query = content.reversed_queries(lambda x, here=here: x[here], width)
        out, lse, out_grad = (x[here].flip(2) for x in of_rows)
        out, out_grad = widened(out, width), widened(out_grad, width)
        query_grad = torch.zeros_like(query, dtype=problem.dtype)
        for tile in (tile for strip in block.strips for tile in strip if tile.first < tile.last):
            # Queries are in reverse order, so their indices count from the block's end.
            rows = (slice(None), slice(None), slice(whole.stop - tile.stop, whole.stop - tile.start))
            keys = (texts, slice(None), tile.keys)
            bias = bias_of(tile, part.heads)
            bias = None if bias is None else bias.expand(*query.shape[:2], *tile.shape)
            grads = FLASH_BACKWARD_ON_CPU(
                out_grad[rows], query[rows], key[keys], value[keys], out[rows], lse[rows], 0.0, False,
                attn_mask=bias, scale=content.softmax_scale,
            )  # fmt: skip
            for total, grad in zip((query_grad[rows], key_grad[keys], value_grad[keys]), grads, strict=True):
                total += grad
        found.query[here] = query_grad[..., : content.query.shape[-1]].flip(2)
    for target, total in ((found.key, key_grad), (found.value, value_grad)):
        sums = total.unflatten(1, (-1, group)).sum(2) if group > 1 else total
        part.of_keys(target).copy_(sums[..., : target.shape[-1]])
