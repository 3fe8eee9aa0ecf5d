"""A geometry as operators of PyTorch take it, the count of the keys that each query sees, and what operators share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from attention_priors.attention.geometry import Geometry

GEOMETRY = (
    "Tensor? query_positions, Tensor? key_positions, Tensor? documents, Tensor? key_padding_mask, "
    "Tensor? attn_mask, bool causal"
)
"""Parameters that make a :class:`Geometry`, once sizes are known."""


def geometry_arguments(geometry: Geometry) -> tuple[Any, ...]:
    """What ``GEOMETRY`` lists."""
    return (
        geometry.given_query_positions,
        geometry.given_key_positions,
        geometry.key_documents,
        geometry.key_padding_mask,
        geometry.attn_mask,
        geometry.causal,
    )


def geometry_from(sizes: tuple[int, int, int, int], device: torch.device, arguments: tuple[Any, ...]) -> Geometry:
    """The geometry of a batch, its heads, queries and keys, from what ``GEOMETRY`` lists."""
    query_positions, key_positions, documents, key_padding_mask, attn_mask, causal = arguments
    batch, heads, num_queries, num_keys = sizes
    return Geometry(
        batch=batch,
        heads=heads,
        num_queries=num_queries,
        num_keys=num_keys,
        device=device,
        causal=causal,
        given_query_positions=query_positions,
        given_key_positions=key_positions,
        query_documents=None if documents is None else documents[:, num_keys - num_queries :],
        key_documents=documents,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
    )


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
def _(
    like: Tensor,
    batch: int,
    heads: int,
    num_queries: int,
    num_keys: int,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    documents: Tensor | None,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    causal: bool,
) -> Tensor:
    heads = 1 if attn_mask is None else attn_mask.shape[1]
    return like.new_empty((batch, heads, num_queries), dtype=torch.int64)


def count_visible_keys(geometry: Geometry, like: Tensor) -> Tensor:
    """``n_i`` of :attr:`Geometry.visible_keys`, ``(B, H or 1, Lq)``, on the device of ``like``."""
    if nobody_watches(like):
        return geometry.visible_keys
    sizes = (geometry.batch, geometry.heads, geometry.num_queries, geometry.num_keys)
    return _visible_keys(like.detach(), *sizes, *geometry_arguments(geometry))


@_visible_keys.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    return one_by_one(_visible_keys, info, in_dims, inputs)


def nobody_watches(like: Tensor, learning: bool = False) -> bool:
    """Whether an operator's body may as well be called: to dispatch an operator takes as long as a short attention.

    Args:
        like: one of its inputs.
        learning: whether who calls it records what a backward pass needs.
    """
    return (
        (learning or not torch.is_grad_enabled())
        and type(like) in (Tensor, Parameter)
        and not like.is_meta
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def one_by_one(operator: Any, info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> Any:
    """Run an operator for each entry of the mapped dimension."""
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
