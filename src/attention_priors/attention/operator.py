"""Operators that PyTorch knows: to ``torch.compile`` each is one opaque call, and its data may decide what it does."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.content import Content, columns_together
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.geometry_operator import GEOMETRY, geometry_from, nobody_watches, one_by_one
from attention_priors.attention.pruning.bounds import BLOCK, Balls
from attention_priors.attention.pruning.certificate import prune
from attention_priors.attention.tiles import backward as tiles_backward
from attention_priors.attention.tiles import forward as tiles_forward
from attention_priors.attention.tiles.bias import Distances
from attention_priors.attention.tiles.block_problem import BlockProblem
from attention_priors.attention.triton import backend as triton_backend
from attention_priors.precision import compute_dtype_of, without_autocast

PROBLEM = (
    "Tensor query, Tensor key, Tensor value, Tensor? query_scale, Tensor? lane_query, Tensor? lane_key, "
    "Tensor? table, Tensor? key_bias, Tensor? row_scale, Tensor? inside, Tensor? listed, SymInt highest, "
    f"SymInt number, float softmax_scale, {GEOMETRY}, Tensor? kept, bool fused"
)
"""The first six, with the scale, are a :class:`Content`. ``kept``: see :class:`BlockProblem`. ``fused``: by
Triton's kernels; else in tiles."""
_PARAMETERS = tuple(parameter.split()[-1] for parameter in PROBLEM.split(", "))
DIFFERENTIABLE = 9
"""How many of them, the first ones, have gradients."""


class OperatorInputs(NamedTuple):
    """What ``PROBLEM`` lists."""

    content: Content
    problem: BlockProblem


def read_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_scale: Tensor | None,
    lane_query: Tensor | None,
    lane_key: Tensor | None,
    table: Tensor | None,
    key_bias: Tensor | None,
    row_scale: Tensor | None,
    inside: Tensor | None,
    listed: Tensor | None,
    highest: int,
    number: int,
    softmax_scale: float,
    *rest: Any,
) -> OperatorInputs:
    """Put together what ``PROBLEM`` lists."""
    batch, heads, num_queries, _ = query.shape
    *arguments, kept, _ = rest
    geometry = geometry_from((batch, heads, num_queries, key.shape[2]), query.device, tuple(arguments))
    if geometry.has_given_positions and listed is None:
        _check_range(geometry, highest, number)
    query, key, value = map(columns_together, (query, key, value))
    content = Content(query, key, value, query_scale, lane_query, lane_key, softmax_scale)
    problem = BlockProblem(
        geometry=geometry,
        distances=Distances(geometry, highest, listed, number),
        # Views are read off it with strides; rows may lie apart.
        table=table if table is None or table.stride(1) == 1 else table.contiguous(),
        key_bias=key_bias,
        inside=inside,
        row_scale=row_scale,
        softmax_scale=softmax_scale,
        dtype=compute_dtype_of(query),
        kept=kept,
    )
    return OperatorInputs(content, problem)


def _check_range(geometry: Geometry, highest: int, number: int) -> None:
    if geometry.key_documents is not None and geometry.offset is not None:
        # Positions of different documents may lie any way apart: such pairs are hidden.
        farthest, nearest = geometry.num_queries - 1 + geometry.offset, geometry.offset - (geometry.num_keys - 1)
    else:
        farthest, nearest = geometry.farthest_and_nearest()
    lowest = highest - number + 1
    if farthest > highest or (nearest < lowest and not geometry.causal):
        raise ValueError(
            f"query_positions and key_positions lie {nearest} to {farthest} tokens apart; a compiled attend() "
            f"takes distances from {lowest} to {highest}, what {geometry.num_queries} queries and "
            f"{geometry.num_keys} keys without gaps have"
        )


# ---- attention in tiles


def _attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp in float64: by Triton's kernels, or in tiles."""
    content, problem = read_inputs(*inputs)
    if inputs[-1]:
        return triton_backend.forward(content, problem)
    return tiles_forward.forward(content, problem)


block_attention = torch.library.custom_op(
    "attention_priors::block_attention", _attend, mutates_args=(), schema=f"({PROBLEM}) -> (Tensor, Tensor)"
)


@block_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor | None, lane_query: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64)
    dtype = query.dtype if lane_query is None else compute_dtype_of(query)
    return query.new_empty(*query.shape[:-1], value.shape[-1], dtype=dtype), lse


def _attend_backward(
    out_grad: Tensor,
    lse_grad: Tensor,
    out: Tensor,
    lse: Tensor,
    wants_query_scale: bool,
    wants_table: bool,
    wants_key_bias: bool,
    wants_row_scale: bool,
    *inputs: Any,
) -> tuple[Tensor, ...]:
    """Gradients of the first inputs; what is not there or not wanted is empty."""
    content, problem = read_inputs(*inputs)
    saved, given, wanted = (out, lse), (out_grad, lse_grad), (wants_table, wants_key_bias, wants_row_scale)
    # A caller who is inside autocast would have the recomputed products rounded.
    with without_autocast(out.device.type):
        engine = triton_backend if inputs[-1] else tiles_backward
        found = engine.backward(content, problem, saved, given, wanted)
        query, key, *of_positions = content.gradients(found.query, found.key, wants_query_scale)
    grads = (query, key, found.value, *of_positions, found.table, found.key_bias, found.row_scale)
    # As it is promised to who compiles, below.
    return tuple(
        lse.new_empty(0) if grad is None else _of_batch(grad, given).contiguous()
        for grad, given in zip(grads, inputs, strict=False)
    )


def _of_batch(grad: Tensor, given: Tensor) -> Tensor:
    """The gradient of something that all examples may share, in its dtype."""
    return (grad if len(grad) == len(given) else grad.sum(0, keepdim=True)).to(given.dtype)


block_attention_backward = torch.library.custom_op(
    "attention_priors::block_attention_backward",
    _attend_backward,
    mutates_args=(),
    schema=(
        "(Tensor out_grad, Tensor lse_grad, Tensor out, Tensor lse, bool wants_query_scale, bool wants_table, "
        f"bool wants_key_bias, bool wants_row_scale, {PROBLEM}) -> ({', '.join(['Tensor'] * DIFFERENTIABLE)})"
    ),
)


@block_attention_backward.register_fake
def _(
    out_grad: Tensor,
    lse_grad: Tensor,
    out: Tensor,
    lse: Tensor,
    wants_query_scale: bool,
    wants_table: bool,
    wants_key_bias: bool,
    wants_row_scale: bool,
    *inputs: Any,
) -> tuple[Tensor, ...]:
    def like(tensor: Tensor | None, wanted: bool = True) -> Tensor:
        if tensor is None or not wanted:
            return lse.new_empty(0)
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    wanted = (True, True, True, wants_query_scale, True, True, wants_table, wants_key_bias, wants_row_scale)
    return tuple(like(tensor, want) for tensor, want in zip(inputs[:DIFFERENTIABLE], wanted, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.save_for_backward(*output, *tensors)
    ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def _differentiate(ctx: Any, out_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    remaining = iter(tensors)
    inputs = [next(remaining) if other is None else other[0] for other in ctx.others]
    wanted = ctx.needs_input_grad[:DIFFERENTIABLE]
    grads = _apply_backward(out_grad, lse_grad, out, lse, wanted[3], *wanted[6:], *inputs)
    found = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return (*found, *(None,) * (len(_PARAMETERS) - DIFFERENTIABLE))


block_attention.register_autograd(_differentiate, setup_context=_save)


def _apply_backward(*inputs: Any) -> tuple[Tensor, ...]:
    if torch._C._are_functorch_transforms_active():
        return _TransformableBackward.apply(*inputs)  # pyright: ignore[reportGeneralTypeIssues]
    return (_attend_backward if nobody_watches(inputs[0]) else block_attention_backward)(*inputs)


def _refuse(ctx: Any, *grads: Tensor) -> Any:
    raise NotImplementedError(
        "this backend of attend() has no second derivative; use backend='reference' or 'blockwise' for it"
    )


block_attention_backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)


def _refuse_forward_mode(ctx: Any, *tangents: Tensor | None) -> Any:
    raise NotImplementedError("this backend of attend() has no forward-mode derivative; use backend='reference'")


class _Eager(torch.autograd.Function):
    """The same without the operator, which takes longer than a short context's attention."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _attend(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, *grads)

    jvp = staticmethod(_refuse_forward_mode)


class _Transformable(torch.autograd.Function):
    """The same operator for ``torch.func``, whose ``grad`` does not know what ``register_autograd`` registers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return block_attention(*inputs)

    setup_context = staticmethod(_save)
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, *grads)


class _TransformableBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return block_attention_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(_refuse)
    jvp = staticmethod(_refuse_forward_mode)


def attend_in_tiles(*inputs: Any) -> tuple[Tensor, Tensor]:
    """:func:`block_attention`, whatever transforms it."""
    if torch._C._are_functorch_transforms_active():
        return _Transformable.apply(*inputs)  # pyright: ignore[reportGeneralTypeIssues]
    if not nobody_watches(inputs[0], learning=True):
        return block_attention(*inputs)
    return _Eager.apply(*inputs) if torch.is_grad_enabled() else _attend(*inputs)


@block_attention.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    """More examples for one table are a larger batch; more tables are worked off one by one."""
    if any(dim is not None for dim in in_dims[3:]):
        return one_by_one(block_attention, info, in_dims, inputs)
    given = dict(zip(_PARAMETERS, inputs, strict=True))
    of_examples = ("lane_query", "lane_key", "key_bias", *_PARAMETERS[-8:-3])
    if given["kept"] is not None or any(given[name] is not None and len(given[name]) > 1 for name in of_examples):
        # They have one entry per example of the batch that is about to grow.
        return one_by_one(block_attention, info, in_dims, inputs)
    number, batch = info.batch_size, inputs[0].shape[0 if in_dims[0] != 0 else 1]
    dims = dict(zip(("query", "key", "value"), in_dims[:3], strict=True)) | {"query_scale": None, "row_scale": None}
    for name, dim in dims.items():
        x = given[name]
        if x is not None:
            wide = x.expand(number, *x.shape) if dim is None else x.movedim(dim, 0)
            given[name] = wide.flatten(0, 1)
    results = block_attention(*given.values())
    return tuple(result.unflatten(0, (number, batch)) for result in results), (0, 0)


@block_attention_backward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    return one_by_one(block_attention_backward, info, in_dims, inputs)


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


@_kept_blocks.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    return one_by_one(_kept_blocks, info, in_dims, inputs)


def choose_kept_blocks(tolerance: float, balls: Balls | None, *inputs: Any) -> Tensor:
    """Which blocks of keys each block of queries looks at, of what ``PROBLEM`` lists; no gradient flows through it."""
    parts = (None, None) if balls is None else balls
    detached = (x.detach() if isinstance(x, Tensor) else x for x in inputs)
    return _kept_blocks(tolerance, *parts, *detached)


for _device in ("cpu", "cuda"):
    # Called inside autocast, it takes everything in float32. attend() casts as autocast asks before it calls, and
    # the backward operator switches autocast off: its inputs are what the forward one had.
    block_attention.register_autocast(_device, torch.float32)
