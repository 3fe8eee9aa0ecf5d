"""Operators registered with PyTorch. ``torch.compile`` sees each as one opaque call, whose work may depend on data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from attention_priors.attention.geometry import Geometry
from attention_priors.attention.pruning.bounds import BLOCK, Balls
from attention_priors.attention.pruning.certificate import prune
from attention_priors.attention.tiles import backward as tiles_backward
from attention_priors.attention.tiles import forward as tiles_forward
from attention_priors.attention.tiles import one_tile, plain_backward
from attention_priors.attention.tiles.bias import Distances
from attention_priors.attention.tiles.block_problem import BlockProblem, Content, columns_together
from attention_priors.attention.triton import backend as triton_backend
from attention_priors.precision import compute_dtype_of, is_captured, without_autocast
from attention_priors.priors.base import ScaledDistance

GEOMETRY = (
    "Tensor? query_positions, Tensor? key_positions, Tensor? documents, Tensor? key_padding_mask, "
    "Tensor? attn_mask, bool causal"
)
"""Operator parameters of a :class:`Geometry`, besides its sizes."""


def geometry_arguments(geometry: Geometry) -> tuple[Any, ...]:
    """Return the arguments for the parameters in ``GEOMETRY``."""
    return (
        geometry.given_query_positions,
        geometry.given_key_positions,
        geometry.key_documents,
        geometry.key_padding_mask,
        geometry.attn_mask,
        geometry.causal,
    )


def geometry_from(sizes: tuple[int, int, int, int], device: torch.device, arguments: tuple[Any, ...]) -> Geometry:
    """Build a geometry from its sizes (batch, heads, queries, keys) and the arguments for ``GEOMETRY``."""
    query_positions, key_positions, documents, key_padding_mask, attn_mask, causal = arguments
    own = None if documents is None else documents[:, sizes[3] - sizes[2] :]
    given = (query_positions, key_positions, own, documents, key_padding_mask, attn_mask)
    return Geometry(*sizes, device, causal, *given)


def nobody_watches(like: Tensor, learning: bool = False) -> bool:
    """Return whether an operator's body may be called directly. Dispatch takes as long as a short attention.

    Args:
        like: one of the operator's inputs.
        learning: whether the caller records what a backward pass needs.
    """
    return (
        (learning or not torch.is_grad_enabled())
        and type(like) in (Tensor, Parameter)
        and not like.is_meta
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def one_by_one(operator: Any, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    """Run an operator once for each entry of the mapped dimension."""
    results = [
        operator(
            *(
                x.select(dim, index) if isinstance(x, Tensor) and dim is not None else x
                for x, dim in zip(inputs, in_dims, strict=True)
            )
        )
        for index in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


# ---- the keys that each query sees


def _count(like: Tensor, batch: int, heads: int, num_queries: int, num_keys: int, *arguments: Any) -> Tensor:
    geometry = geometry_from((batch, heads, num_queries, num_keys), like.device, arguments)
    return geometry.visible_keys.clone(memory_format=torch.contiguous_format)


_visible_keys = torch.library.custom_op(
    "attention_priors::visible_keys",
    _count,
    mutates_args=(),
    schema=f"(Tensor like, SymInt batch, SymInt heads, SymInt num_queries, SymInt num_keys, {GEOMETRY}) -> Tensor",
)


@_visible_keys.register_fake
def _(like: Tensor, batch: int, heads: int, num_queries: int, num_keys: int, *arguments: Any) -> Tensor:
    attn_mask = arguments[4]
    return like.new_empty((batch, 1 if attn_mask is None else attn_mask.shape[1], num_queries), dtype=torch.int64)


def count_visible_keys(geometry: Geometry, like: Tensor) -> Tensor:
    """Return the number of keys that each query may see, ``(B, H or 1, Lq)``, on the device of ``like``."""
    if nobody_watches(like, learning=True):  # counts have no gradient
        return geometry.visible_keys
    if torch.compiler.is_exporting():
        visible = geometry.visible()
        if visible is None:
            visible = torch.ones(1, 1, 1, geometry.num_keys, dtype=torch.bool, device=geometry.device)
        return visible.sum(-1).expand(geometry.batch, -1, geometry.num_queries)
    sizes = (geometry.batch, geometry.heads, geometry.num_queries, geometry.num_keys)
    return _visible_keys(like.detach(), *sizes, *geometry_arguments(geometry))


# ---- attention in tiles

PROBLEM = (
    "Tensor query, Tensor key, Tensor value, float softmax_scale, Tensor? table, Tensor? key_bias, Tensor? row_scale, "
    "bool scales_prior, Tensor? inside, Tensor? listed, SymInt highest, SymInt number, "
    "Tensor? row, Tensor? distance, Tensor? hidden, Tensor? outer, "
    f"{GEOMETRY}, Tensor? kept, bool fused"
)
"""Operator parameters of a problem: fields of :class:`Content`, :class:`BlockProblem` and, from ``row`` to ``outer``,
:class:`ScaledDistance`. ``row_scale`` multiplies the content and, with ``scales_prior``, the log-prior. ``fused``
selects Triton's kernels instead of tiles."""
_PARAMETERS = tuple(parameter.split()[-1] for parameter in PROBLEM.split(", "))
_LEARNED = (0, 1, 2, 4, 5, 6, 12, 13, 14, 15)
"""Indices of parameters with gradients: query, key, value, table, key bias, row scale, four parts of a network."""


def read_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_scale: float,
    table: Tensor | None,
    key_bias: Tensor | None,
    row_scale: Tensor | None,
    scales_prior: bool,
    inside: Tensor | None,
    listed: Tensor | None,
    highest: int,
    number: int,
    row: Tensor | None,
    distance: Tensor | None,
    hidden: Tensor | None,
    outer: Tensor | None,
    *rest: Any,
) -> tuple[Content, BlockProblem]:
    """Assemble the arguments for the parameters in ``PROBLEM``."""
    batch, heads, num_queries, _ = query.shape
    *arguments, kept, _ = rest
    geometry = geometry_from((batch, heads, num_queries, key.shape[2]), query.device, tuple(arguments))
    if geometry.has_given_positions and listed is None:
        _check_range(geometry, highest, number)
    scaled = None
    if row is not None and distance is not None and hidden is not None and outer is not None:
        scaled = ScaledDistance(row, distance, hidden, outer)
    has_prior = table is not None or key_bias is not None or scaled is not None
    query, key, value = map(columns_together, (query, key, value))
    content = Content(query, key, value, row_scale, softmax_scale)
    problem = BlockProblem(
        geometry=geometry,
        distances=Distances(geometry, highest, listed, number),
        # Tiles are strided views of the table: the entries of a row must be adjacent in memory.
        table=table if table is None or table.stride(1) == 1 else table.contiguous(),
        key_bias=key_bias,
        inside=inside,
        scaled=scaled,
        row_scale=row_scale if scales_prior and has_prior else None,
        softmax_scale=softmax_scale,
        dtype=compute_dtype_of(query),
        kept=kept,
    )
    return content, problem


def _check_range(geometry: Geometry, highest: int, number: int) -> None:
    if is_captured():
        # A replay with other positions stops at this assertion.
        queries, keys = geometry.query_positions, geometry.key_positions
        inside = queries.amax(-1) - keys.amin(-1) <= highest
        if not geometry.causal:
            inside &= queries.amin(-1) - keys.amax(-1) > highest - number
        torch.ops.aten._assert_async.msg(inside.all(), "positions have gaps, which a captured graph does not support")
        return
    if geometry.key_documents is not None and geometry.offset is not None:
        # Pairs of different documents are hidden, so their distances do not matter.
        farthest, nearest = geometry.num_queries - 1 + geometry.offset, geometry.offset - (geometry.num_keys - 1)
    else:
        farthest, nearest = geometry.farthest_and_nearest()
    lowest = highest - number + 1
    if farthest > highest or (nearest < lowest and not geometry.causal):
        raise ValueError(
            f"query_positions and key_positions lie {nearest} to {farthest} tokens apart; a compiled attend() "
            f"supports distances from {lowest} to {highest}, those of {geometry.num_queries} queries and "
            f"{geometry.num_keys} keys without gaps"
        )


def _attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute the output, and the log-sum-exp in float64, with Triton's kernels or in tiles."""
    content, problem = read_inputs(*inputs)
    if inputs[-1]:
        return triton_backend.forward(content, problem)
    if problem.whole is not None:
        return one_tile.forward(content, problem, problem.whole)
    return tiles_forward.forward(content, problem)


def _attend_as_promised(*inputs: Any) -> tuple[Tensor, ...]:
    out, lse = _attend(*inputs)
    # Layouts that the fake implementation promises. PyTorch's kernel may return others.
    out = out.transpose(1, 2).contiguous().transpose(1, 2) if out.is_cpu else out.contiguous()
    return out, lse.contiguous()


block_attention = torch.library.custom_op(
    "attention_priors::block_attention", _attend_as_promised, mutates_args=(), schema=f"({PROBLEM}) -> (Tensor, Tensor)"
)


@block_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    is_cpu = query.device.type == "cpu"
    out = tiles_forward.empty_output(query, value) if is_cpu else query.new_empty(*query.shape[:-1], value.shape[-1])
    return out, query.new_empty(query.shape[:-1], dtype=torch.float64)


def _attend_backward(
    out_grad: Tensor,
    lse_grad: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: Sequence[bool],
    *inputs: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of the ``_LEARNED`` parameters. Gradients of absent or unwanted parameters are empty."""
    content, problem = read_inputs(*inputs)
    # Under the caller's autocast, the recomputed products would be rounded.
    with without_autocast(out.device.type):
        saved, wanted_of_prior = (out, lse), (wanted[3], wanted[4], wanted[5], any(wanted[6:]))
        if problem.whole is not None and not inputs[-1]:
            found = one_tile.backward(content, problem, problem.whole, saved, (out_grad, lse_grad), wanted_of_prior)
        elif not inputs[-1] and plain_backward.supports(problem, lse, lse_grad, wanted_of_prior):
            found = plain_backward.backward(content, problem, saved, out_grad, wanted[5])
        else:
            engine = triton_backend if inputs[-1] else tiles_backward
            found = engine.backward(content, problem, saved, (out_grad, lse_grad), wanted_of_prior)
    grads = (*found[:-1], *(found.scaled or [None] * 4))
    # Contiguous, as the fake implementation below promises.
    return tuple(
        _of_batch(grad, inputs[place]).contiguous() if grad is not None and (place < 3 or want) else lse.new_empty(0)
        for grad, place, want in zip(grads, _LEARNED, wanted, strict=True)
    )


def _of_batch(grad: Tensor, given: Tensor) -> Tensor:
    """Return a gradient in the dtype of its input, summed over examples if they share the input."""
    return (grad if len(grad) == len(given) else grad.sum(0, keepdim=True)).to(given.dtype)


block_attention_backward = torch.library.custom_op(
    "attention_priors::block_attention_backward",
    _attend_backward,
    mutates_args=(),
    schema=(
        "(Tensor out_grad, Tensor? lse_grad, Tensor out, Tensor lse, bool[] wanted, "
        f"{PROBLEM}) -> ({', '.join(['Tensor'] * len(_LEARNED))})"
    ),
)


@block_attention_backward.register_fake
def _(
    out_grad: Tensor,
    lse_grad: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: Sequence[bool],
    *inputs: Any,
) -> tuple[Tensor, ...]:
    given = [inputs[place] if place < 3 or want else None for place, want in zip(_LEARNED, wanted, strict=True)]
    return tuple(lse.new_empty(0) if x is None else x.new_empty(x.shape) for x in given)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)
    ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    (out_grad, lse_grad), (out, lse, *tensors) = grads, ctx.saved_tensors
    out_grad = torch.zeros_like(out) if out_grad is None else out_grad
    remaining = iter(tensors)
    inputs = [next(remaining) if other is None else other[0] for other in ctx.others]
    wanted = [ctx.needs_input_grad[place] for place in _LEARNED]
    found: list[Tensor | None] = [None] * len(_PARAMETERS)
    for place, want, grad in zip(
        _LEARNED, wanted, attend_backward(out_grad, lse_grad, out, lse, wanted, *inputs), strict=True
    ):
        found[place] = grad if want else None
    return tuple(found)


block_attention.register_autograd(_differentiate, setup_context=_save)


def attend_backward(*inputs: Any) -> tuple[Tensor, ...]:
    """Call :func:`block_attention_backward`, also under the transforms of ``torch.func``."""
    if torch._C._are_functorch_transforms_active():
        return _TransformableBackward.apply(*inputs)  # pyright: ignore[reportGeneralTypeIssues]
    return (_attend_backward if nobody_watches(inputs[0]) else block_attention_backward)(*inputs)


def _refuse(ctx: Any, *grads: Tensor) -> Any:
    raise NotImplementedError(
        "this backend of attend() has no second derivative; use backend='reference' or 'blockwise'"
    )


block_attention_backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)


def refuse_forward_mode(ctx: Any, *tangents: Tensor | None) -> Any:
    """Raise the error of functions without a forward-mode derivative, as their ``jvp``."""
    raise NotImplementedError("this backend of attend() has no forward-mode derivative; use backend='reference'")


class _Eager(torch.autograd.Function):
    """Attention in tiles without the operator, whose dispatch takes longer than a short attention."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _attend(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)
    jvp = staticmethod(refuse_forward_mode)


class _Transformable(torch.autograd.Function):
    """Attention operator for ``torch.func``, whose ``grad`` ignores formulas of ``register_autograd``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return block_attention(*inputs)

    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(refuse_forward_mode)


class _TransformableBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return block_attention_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(_refuse)
    jvp = staticmethod(refuse_forward_mode)


def attend_in_tiles(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Call :func:`block_attention`, also under the transforms of ``torch.func``, and without dispatch if possible."""
    if torch._C._are_functorch_transforms_active():
        return _Transformable.apply(*inputs)  # pyright: ignore[reportGeneralTypeIssues]
    if not nobody_watches(inputs[0], learning=True):
        return block_attention(*inputs)
    return _Eager.apply(*inputs) if torch.is_grad_enabled() else _attend(*inputs)


@block_attention.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    """Map over examples as a larger batch, and over tables one by one."""
    if any(dim is not None for dim in in_dims[3:]):
        return one_by_one(block_attention, info, in_dims, *inputs)
    given = dict(zip(_PARAMETERS, inputs, strict=True))
    of_examples = ("key_bias", "row", *_PARAMETERS[-8:-3])
    if given["kept"] is not None or any(given[name] is not None and len(given[name]) > 1 for name in of_examples):
        # These inputs have one entry per example of the batch, which is about to grow.
        return one_by_one(block_attention, info, in_dims, *inputs)
    number, batch = info.batch_size, inputs[0].shape[0 if in_dims[0] != 0 else 1]
    dims = dict(zip(("query", "key", "value"), in_dims[:3], strict=True)) | {"row_scale": None}
    for name, dim in dims.items():
        x = given[name]
        if x is not None:
            wide = x.expand(number, *x.shape) if dim is None else x.movedim(dim, 0)
            given[name] = wide.flatten(0, 1)
    results = block_attention(*given.values())
    return tuple(result.unflatten(0, (number, batch)) for result in results), (0, 0)


# ---- pruning


@torch.library.custom_op(
    "attention_priors::kept_blocks",
    mutates_args=(),
    schema=f"(float tolerance, Tensor? balls, Tensor? reach, {PROBLEM}) -> Tensor",
)
def _kept_blocks(tolerance: float, balls: Tensor | None, reach: Tensor | None, *inputs: Any) -> Tensor:
    known = None if balls is None or reach is None else Balls(balls, reach)
    return prune(*read_inputs(*inputs), tolerance, known).kept


@_kept_blocks.register_fake
def _(tolerance: float, balls: Tensor | None, reach: Tensor | None, query: Tensor, key: Tensor, *rest: Any) -> Tensor:
    blocks_of = [-(-tensor.shape[2] // BLOCK) for tensor in (query, key)]
    return query.new_empty((*query.shape[:2], *blocks_of), dtype=torch.bool)


def choose_kept_blocks(tolerance: float, balls: Balls | None, *inputs: Any) -> Tensor:
    """Return which blocks of keys each block of queries looks at, without gradient, for the arguments of ``PROBLEM``.

    The result is boolean, ``(B, H, ⌈Lq / 256⌉, ⌈Lk / 256⌉)``.
    """
    parts = (None, None) if balls is None else balls
    detached = (x.detach() if isinstance(x, Tensor) else x for x in inputs)
    return _kept_blocks(tolerance, *parts, *detached)


for _operator in (_visible_keys, block_attention_backward, _kept_blocks):
    _operator.register_vmap(partial(one_by_one, _operator))

for _device in ("cpu", "cuda"):
    # Under autocast, a direct call of the operator computes in float32. attend() itself casts to autocast's dtype. The
    # backward operator turns autocast off, because its inputs are those of the forward operator.
    block_attention.register_autocast(_device, torch.float32)
