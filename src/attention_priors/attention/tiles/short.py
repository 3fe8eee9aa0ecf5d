"""The backward pass of a short context, or of one query: all keys are in one tile, and nothing is summed over tiles."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.tiles.bias import Scratch, far_rows
from attention_priors.attention.tiles.block_problem import BlockProblem, Content, Gradients, all_of
from attention_priors.attention.tiles.exact import without_best
from attention_priors.attention.tiles.tiling import Tile


def backward_at_once(
    content: Content,
    problem: BlockProblem,
    tile: Tile,
    lse: Tensor,
    grads: tuple[Tensor, Tensor],
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """Gradients of everything, as :func:`backward` has them.

    The softmax is computed anew: then the gradient of a row that sees one key is exactly 0, even where the derivative
    of its log-prior is 1e30.

    Args:
        content: and
        problem: as for :func:`forward`.
        tile: all queries, and the keys that any of them sees.
        lse: the log-sum-exp.
        grads: those of output and log-sum-exp.
        wanted: whether to compute those of table, biases of keys and row scale.
    """
    (batch, kv_heads), heads = content.key.shape[:2], slice(0, content.query.shape[1])
    dtype, scale = problem.dtype, problem.softmax_scale
    bias_of, constant = problem.bias().centred(tile, heads)

    def stacked(rows: Tensor) -> Tensor:
        # Query heads that share a key head are one matrix.
        return rows.reshape(batch * kv_heads, rows.shape[1] // kv_heads * rows.shape[2], rows.shape[3])

    def all_keys(rows: Tensor) -> Tensor:
        if tile.shape[1] < problem.geometry.num_keys:
            rows = pad(rows, (0, 0, tile.first, problem.geometry.num_keys - tile.last))
        return rows.view(batch, kv_heads, -1, rows.shape[2])

    query, out_grad = (stacked(x.to(dtype).flip(2)) for x in (content.queries(all_of), grads[0]))
    key, value = (stacked(x[:, :, tile.keys].to(dtype)) for x in (content.key, content.value))
    names, shape = ("weights", "their gradient", "logits' gradient", "product"), (batch, heads.stop, *tile.shape)
    buffers = [Scratch(name, dtype, query.device) for name in names]
    weights, weights_grad, logits = (buffer.of(*shape) for buffer in buffers[:3])
    if constant is not None:
        scaled = constant if problem.row_scale is None else constant * problem.row_scale
        lse = (lse - scaled).to(dtype)
    if tile.shape[1] and far_rows(lse.to(dtype)) is not None:
        bias = logits.copy_(without_best(bias_of.in_full(tile, heads))[0])
    else:
        bias = bias_of.write(logits, tile, heads, None)
    blind = bias_of.blind(tile, bias) if tile.shape[1] else None
    stacked(logits).baddbmm_(query, key.mT, alpha=scale)
    if blind is not None:
        logits.masked_fill_(blind, 0.0)
    torch._softmax(logits, -1, False, out=weights)  # pyright: ignore[reportPrivateImportUsage]
    if blind is not None:
        weights.masked_fill_(blind, 0.0)
    value_grad = torch.bmm(stacked(weights).mT, out_grad)
    torch.bmm(out_grad, value.mT, out=stacked(weights_grad))
    # Of the weights as they are here, and not of the output that was stored.
    backward = torch._softmax_backward_data  # pyright: ignore[reportPrivateImportUsage]
    logits_grad = backward(weights_grad, weights, -1, dtype, grad_input=logits)
    if bool(grads[1].any()):
        logits_grad.addcmul_(weights, grads[1].to(dtype).flip(2).unsqueeze(-1))
    query_grad = torch.bmm(stacked(logits_grad), key).mul_(scale).view(*weights.shape[:3], -1).flip(2)
    key_grad = torch.bmm(stacked(logits_grad).mT, query).mul_(scale)
    scale_grad = table_grad = bias_grad = None
    if problem.row_scale is not None:
        if wanted[2]:
            scale_grad = (logits_grad * bias_of.log_prior(tile, heads)).sum(-1).flip(2)
            if constant is not None:
                scale_grad += constant * grads[1]
        logits_grad.mul_(bias_of.scale(tile, heads))
    if problem.key_bias is not None and wanted[1]:
        bias_grad = pad(logits_grad.sum(2), (tile.first, problem.geometry.num_keys - tile.last))
    if problem.table is not None and wanted[0]:
        table_grad = pad(torch.zeros_like(problem.table, dtype=dtype), (0, problem.distances.overhang))
        # After as many columns of zeros as there are rows: see Distances.add.
        padded = buffers[3].of(*shape[:-1], sum(tile.shape))
        padded[..., : tile.shape[0]] = 0
        padded[..., tile.shape[0] :] = logits_grad
        problem.distances.add(table_grad, tile, padded)
        table_grad = table_grad[:, : problem.distances.number]
    value_grad = all_keys(value_grad).to(content.value.dtype)
    return Gradients(query_grad, all_keys(key_grad), value_grad, table_grad, bias_grad, scale_grad)
