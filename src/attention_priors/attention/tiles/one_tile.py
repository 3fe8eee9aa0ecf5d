"""A short context, or one query: all keys are in one tile, whose bias is in memory. There are no sums over tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.tiles.bias import Scratch, far_rows
from attention_priors.attention.tiles.block_problem import BlockProblem, Content, Gradients, all_of
from attention_priors.attention.tiles.exact import without_best
from attention_priors.attention.tiles.forward import attend_plain, finished, keys_and_values
from attention_priors.attention.tiles.scaled import sum_gradients
from attention_priors.attention.tiles.tiling import Tile
from attention_priors.precision import compute_dtype_of, drop_negligible


def forward(content: Content, problem: BlockProblem, tile: Tile) -> tuple[Tensor, Tensor]:
    """Compute the output ``(B, H, Lq, Dv)`` in the queries' dtype, and the log-sum-exp ``(B, H, Lq)`` in float64.

    Args:
        content: queries, keys and values.
        problem: prior and masks.
        tile: all queries, and the keys that any of them sees.
    """
    heads, keys = slice(0, content.query.shape[1]), (slice(None), slice(None), tile.keys)
    key, value = keys_and_values(content, all_of)
    query = content.queries(all_of, key.shape[-1])
    bias_of, constant = problem.bias().centred(tile, heads)
    bias = bias_of(tile, heads) if tile.shape[1] else None
    blind = None if bias is None else bias_of.blind(tile, bias)
    bias, blind = (x if x is None or x.shape[2] == 1 else x.flip(2).contiguous() for x in (bias, blind))
    out, lse = attend_plain(query, key[keys], value[keys], bias, blind, content.softmax_scale)
    return finished(content, problem, out[..., : content.value.shape[-1]], lse, constant)


def backward(
    content: Content,
    problem: BlockProblem,
    tile: Tile,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    wanted: tuple[bool, ...],
) -> Gradients:
    """Compute the gradients of all inputs.

    Args:
        content: queries, keys, values.
        problem: prior and masks.
        tile: as for :func:`forward`.
        saved: output and log-sum-exp.
        grads: gradients of ``saved``.
        wanted: whether to compute gradients of table, key bias, row scale and network.
    """
    heads, lse, num_keys = slice(0, content.query.shape[1]), saved[1], problem.geometry.num_keys
    bias_of, constant = problem.bias().centred(tile, heads)
    if constant is not None:
        lse = lse - (constant if problem.row_scale is None else constant * problem.row_scale)
    if tile.shape[1] and far_rows(lse.to(problem.dtype)) is not None:
        bias = without_best(bias_of.in_full(tile, heads))[0]
    else:
        shape = (problem.geometry.batch, heads.stop, *tile.shape)
        bias = bias_of.write(Scratch("bias", problem.dtype, lse.device).of(*shape), tile, heads, None)
    blind = bias_of.blind(tile, bias) if tile.shape[1] else None
    blind = None if blind is None else blind.flip(2)
    query, key, value = content.queries(all_of), content.key[:, :, tile.keys], content.value[:, :, tile.keys]
    logits = logits_of(query, key, bias.flip(2), problem.softmax_scale)
    if blind is not None:
        logits.masked_fill_(blind, 0.0)
    weights = Scratch("weights", problem.dtype, lse.device).of(*logits.shape)
    # The softmax is recomputed. The gradient of a row that sees one key is then exactly 0, even if the derivative of
    # its log-prior is 1e30.
    torch._softmax(logits, -1, False, out=weights)  # pyright: ignore[reportPrivateImportUsage]
    drop_negligible(weights)
    if blind is not None:
        weights.masked_fill_(blind, 0.0)
    found = gradients(query, key, value, weights, grads, problem.softmax_scale)
    logits_grad, outside = found.logits, (tile.first, num_keys - tile.last)
    scale_grad = table_grad = bias_grad = network_grad = None
    if problem.row_scale is not None:
        if wanted[2]:
            scale_grad = (logits_grad * bias_of.log_prior(tile, heads).flip(2)).sum(-1)
            if constant is not None and grads[1] is not None:
                scale_grad += constant * grads[1]
        logits_grad.mul_(problem.row_scale.unsqueeze(-1))
    if problem.key_bias is not None and wanted[1]:
        bias_grad = pad(logits_grad.sum(2), outside)
    if problem.table is not None and wanted[0]:
        table_grad = torch.zeros_like(problem.table, dtype=problem.dtype)
        problem.distances.add(table_grad, tile, logits_grad.flip(2))
    if bias_of.network is not None and wanted[3]:
        of_texts = [bias_of.network.zero_gradients() for _ in tile.texts()]
        for of_text, text, numbers in zip(of_texts, tile.texts(), logits_grad.flip(2), strict=True):
            bias_of.network.add_gradients(of_text, text, heads, numbers)
        network_grad = sum_gradients(of_texts, len(of_texts))
    key_grad, value_grad = (pad(x, (0, 0, *outside)) if any(outside) else x for x in (found.key, found.value))
    all_found = Gradients(found.query, key_grad, value_grad, table_grad, bias_grad, scale_grad, network_grad)
    return all_found.unscaled(content, wanted[2])


class TileGradients(NamedTuple):
    """Gradients of queries, keys, values and logits, in the dtype of the computation."""

    query: Tensor
    key: Tensor
    value: Tensor
    logits: Tensor
    """Shape ``(B, H, n, e)``; valid until the next call."""


def logits_of(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return the logits of plain attention, ``(B, H, n, e)``, in the memory of the bias if shape and dtype fit.

    Args:
        query: ``(B, H, n, D)``.
        key: ``(B, Hkv, e, D)``.
        bias: expands to ``(B, H, n, e)``.
        scale: factor of the content.
    """
    kv_heads = key.shape[1]
    logits = bias.to(compute_dtype_of(query)).expand(*query.shape[:3], key.shape[2]).contiguous()
    stacked(logits, kv_heads).baddbmm_(stacked(query, kv_heads), stacked(key, kv_heads).mT, alpha=scale)
    return logits


def stacked(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape ``(B, H, n, e)`` to ``(B * Hkv, H / Hkv * n, e)``: heads that share a key head form one matrix."""
    x, heads = x.to(compute_dtype_of(x)), x.shape[1]
    return (x if heads == kv_heads else x.unflatten(1, (kv_heads, -1)).flatten(2, 3)).flatten(0, 1)


def gradients(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor, grads: tuple[Tensor, Tensor | None], scale: float
) -> TileGradients:
    """Return the gradients of plain attention with a bias.

    Args:
        query: ``(B, H, n, D)``.
        key: ``(B, Hkv, e, D)``.
        value: ``(B, Hkv, e, Dv)``.
        weights: ``(B, H, n, e)``. They are not rounded to the dtype of the output.
        grads: gradients of output and log-sum-exp.
        scale: factor of the content.
    """
    dtype, kv_heads = weights.dtype, key.shape[1]
    queries, keys, values, factor, out_grad = (stacked(x, kv_heads) for x in (query, key, value, weights, grads[0]))
    value_grad = torch.bmm(factor.mT, out_grad)
    logits = Scratch("logits' gradient", dtype, query.device).of(*weights.shape)
    # Gradient of the weights, which the softmax's backward pass turns into the gradient of the logits, row by row.
    of_weights = torch.bmm(out_grad, values.mT, out=stacked(logits, kv_heads)).view(logits.shape)
    backward = torch._softmax_backward_data  # pyright: ignore[reportPrivateImportUsage]
    backward(of_weights, weights, -1, dtype, grad_input=logits)
    if grads[1] is not None:
        logits.addcmul_(weights, grads[1].to(dtype).unsqueeze(-1))
    factor = stacked(logits, kv_heads)
    query_grad = torch.baddbmm(queries, factor, keys, beta=0, alpha=scale).view(query.shape)
    key_grad = torch.baddbmm(keys, factor.mT, queries, beta=0, alpha=scale).view(key.shape)
    return TileGradients(query_grad, key_grad, value_grad.view(value.shape), logits)
