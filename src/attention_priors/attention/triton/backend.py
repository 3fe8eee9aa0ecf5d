"""Fused attention on CUDA, forward and backward: what Triton's kernels (``triton_kernels.py``) are given to read.

The kernels read the log-prior of each pair from its head's table, and walk only those blocks that masks that can be
told by slots leave over. Queries and keys at any positions are computed, with those read in; a common offset between
slots makes it faster.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.content import Content, all_of, columns_together
from attention_priors.attention.geometry import document_bounds
from attention_priors.attention.key_bias import best_seen, in_two
from attention_priors.attention.pruning.bounds import BLOCK
from attention_priors.attention.tiles import backward as tiles_backward
from attention_priors.attention.tiles.block_problem import BlockProblem, Gradients
from attention_priors.attention.tiles.exact import far_rows, recompute_rows
from attention_priors.priors import Structure

if TYPE_CHECKING:
    from attention_priors.attention.geometry import Geometry
    from attention_priors.attention.problem import Problem

INSTALLED = importlib.util.find_spec("triton") is not None
SLOT = BLOCK
"""Queries and keys per entry of the blocks that pruning keeps."""
FAR = 2**30 - 1
"""A distance that no two tokens have: the kernels add two such ones and 1, in 32-bit integers."""
LARGEST_HEAD_DIM = 256
MOST_HEADS = 65535
"""Of all examples together: a CUDA grid has no more rows."""
LONGEST_TABLE = 16
"""Distances per token in a table over the range of given positions, at most: gaps fill it with numbers nobody reads."""


# ---- what is supported


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot compute this; None if they can. It looks at values only where positions are given."""
    query, geometry = problem.query, problem.geometry
    if not INSTALLED:
        return "triton is not installed"
    if not query.is_cuda and not _interpreted():
        return f"it runs on CUDA devices, and query is on {query.device}"
    if query.is_cuda and torch.version.hip is not None:
        return "it is written for CUDA, and this PyTorch is for ROCm"
    if query.is_cuda and torch.cuda.get_device_properties(query.device).major < 8:
        return "it needs a CUDA device of compute capability 8.0 or newer"
    if problem.relative is not None or problem.dropout_p > 0:
        return "it does not compute relative or dropout_p; use 'auto'"
    if geometry.attn_mask is not None:
        return "it does not compute attn_mask; use document_ids, key_padding_mask or a Window, or backend='toeplitz'"
    if query.dtype == torch.float64:
        return "it does not compute float64; use 'toeplitz'"
    if geometry.batch * geometry.heads > MOST_HEADS:
        return f"batch times heads is at most {MOST_HEADS} there, and here {geometry.batch} times {geometry.heads}"
    widths = (query.shape[-1] + _lane_number(problem), problem.value.shape[-1])
    if max(widths) > LARGEST_HEAD_DIM:
        return f"head dimensions with lanes are at most {LARGEST_HEAD_DIM} there, and here {widths[0]} and {widths[1]}"
    if geometry.has_given_positions and not torch.compiler.is_compiling():
        farthest, nearest = geometry.farthest_and_nearest()
        if max(farthest, -nearest) >= FAR:
            return (
                f"query_positions and key_positions lie {nearest} to {farthest} tokens apart, and it takes distances "
                f"below {FAR}; use 'toeplitz'"
            )
        number = _down_to_what_matters(geometry, farthest, nearest)
        if number > LONGEST_TABLE * (geometry.num_queries + geometry.num_keys):
            return f"positions lie too far apart: a table of {number} distances would be needed; use 'toeplitz'"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _lane_number(problem: Problem) -> int:
    """How many lanes the terms that have no table bring."""
    number = 0
    for term in problem.terms:
        if not term.structure & (Structure.STATIONARY | Structure.OF_KEYS):
            one = torch.zeros(1, dtype=torch.int64, device=problem.query.device)
            number += term.lanes(one, one).key.shape[-1]
    return number


def distance_range(geometry: Geometry) -> tuple[int, int]:
    """The highest distance between a query and a key, and how many there are down to the lowest that matters."""
    farthest, nearest = geometry.farthest_and_nearest()
    return farthest, _down_to_what_matters(geometry, farthest, nearest)


def _down_to_what_matters(geometry: Geometry, farthest: int, nearest: int) -> int:
    """How many distances there are."""
    # One distance in the future stands for all of them.
    lowest = max(nearest, -1) if geometry.causal else nearest
    return farthest - min(lowest, farthest) + 1


# ---- sizes of blocks


class Blocks(NamedTuple):
    """What one program of a kernel works on at a time."""

    rows: int
    """Queries."""
    keys: int
    warps: int
    stages: int
    """Blocks that are loaded ahead."""


class Configuration(NamedTuple):
    """The blocks of all kernels. They divide ``SLOT``, and ``table_grad.keys`` divides ``table_grad.rows``."""

    forward: Blocks
    query_grad: Blocks
    key_grad: Blocks
    table_grad: Blocks


def configuration(width: int, dtype: torch.dtype) -> Configuration:
    """Blocks for the wider of the head dimensions, padded.

    They compile with few or no registers spilled, and with less shared memory than any device has that multiplies
    bfloat16 (99 KiB). They have not been timed on one.
    """
    if dtype == torch.float32:
        blocks = Blocks(16, 16, 8, 1) if width > 128 else Blocks(32, 32, 8 if width > 64 else 4, 1)
        return Configuration(blocks, blocks, blocks, blocks)
    if width <= 64:
        return Configuration(Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 3), Blocks(32, 128, 8, 2), Blocks(64, 64, 4, 2))
    if width <= 128:
        return Configuration(Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(32, 128, 8, 2), Blocks(64, 32, 4, 2))
    return Configuration(Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 8, 1), Blocks(64, 32, 8, 1))


# ---- what the kernels read


@dataclass(frozen=True)
class _Launcher:
    """Arguments that several kernels share."""

    query: Tensor
    key: Tensor
    value: Tensor
    problem: BlockProblem

    @cached_property
    def regular(self) -> bool:
        """Whether slots tell positions and documents."""
        return self.problem.geometry.offset is not None

    @property
    def offset(self) -> int:
        """How far queries lie after the keys of their slots; 0 where slots do not tell that."""
        geometry = self.problem.geometry
        if geometry.causal and geometry.offset is not None:
            # Where all keys are in the future, it does not matter how far, and a kernel's numbers have 32 bits.
            return max(geometry.offset, -geometry.num_queries)
        return geometry.offset or 0

    @cached_property
    def table(self) -> Tensor | None:
        """In float32."""
        table = self.problem.table
        return None if table is None else table.to(torch.float32).contiguous()

    @cached_property
    def own(self) -> Tensor | None:
        """What is taken from the biases of keys, ``(B, H, Lq)`` in float64."""
        geometry, key_bias = self.problem.geometry, self.problem.key_bias
        if key_bias is None:
            return None
        return best_seen(key_bias, geometry).expand(geometry.batch, -1, -1)

    def without_own(self, lse: Tensor) -> Tensor:
        """A log-sum-exp as the kernels have it, in float32."""
        return lse.float() if self.own is None else (lse - self._scaled(self.own)).float()

    def with_own(self, lse: Tensor) -> Tensor:
        """The log-sum-exp itself, in float64."""
        return lse.double() if self.own is None else lse + self._scaled(self.own)

    def _scaled(self, own: Tensor) -> Tensor:
        row_scale = self.problem.row_scale
        return own if row_scale is None else own * row_scale

    @cached_property
    def configuration(self) -> Configuration:
        width = max(self.sizes["BLOCK_D"], self.sizes["BLOCK_DV"])
        return configuration(width, self.query.dtype)

    @cached_property
    def sizes(self) -> dict[str, int]:
        d, dv = self.query.shape[-1], self.value.shape[-1]
        return {"D": d, "DV": dv, "BLOCK_D": _padded(d), "BLOCK_DV": _padded(dv)}

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Strides, lengths and distances."""
        geometry, table = self.problem.geometry, self.table
        strides = {
            f"{name}_{part}": tensor.stride(dim)
            for name, tensor in (("query", self.query), ("key", self.key), ("value", self.value))
            for dim, part in enumerate(("batch", "head", "row"))
        }
        return strides | {
            "table_head": 0 if table is None else table.stride(0),
            "heads": geometry.heads,
            "group": geometry.heads // self.key.shape[1],
            "num_queries": geometry.num_queries,
            "num_keys": geometry.num_keys,
            "offset": self.offset,
            "highest": self.problem.distances.highest,
            "lowest": 0 if geometry.causal else -FAR,
            "farthest": FAR,
            "softmax_scale": self.problem.softmax_scale,
        }

    @cached_property
    def bias(self) -> dict[str, Tensor | None]:
        """Table, row scales, and the range of distances that a window leaves over."""
        inside = self.problem.inside
        reach = None
        if inside is not None:
            places = torch.arange(len(inside), device=inside.device)
            nearest = torch.where(inside, places, -1).amax()
            farthest = torch.where(inside, places, len(inside)).amin()
            # The visible distances form one interval. If there are none, it is empty.
            reach = (self.problem.distances.highest - torch.stack([nearest, farthest])).to(torch.int32)
        row_scale, names = self.problem.row_scale, ("KEY_HIGH", "KEY_LOW", "OWN_HIGH", "OWN_LOW")
        of_keys: dict[str, Tensor | None] = dict.fromkeys(names)
        if self.problem.key_bias is not None and self.own is not None:
            key_bias = self.problem.key_bias.detach().expand(self.problem.geometry.batch, -1, -1)
            numbers = (*in_two(key_bias), *in_two(self.own))
            of_keys = {name: x.contiguous() for name, x in zip(names, numbers, strict=True)}
        return of_keys | {
            "TABLE": self.table,
            "ROW_SCALE": None if row_scale is None else row_scale.contiguous(),
            "REACH": reach,
            "PADDING": self._each_batch(self.problem.geometry.key_padding_mask, torch.int8),
        }

    @cached_property
    def positions(self) -> dict[str, Tensor | None]:
        """Positions and documents, where slots do not tell them."""
        geometry = self.problem.geometry
        names = ("QUERY_POSITIONS", "KEY_POSITIONS", "QUERY_DOCUMENTS", "KEY_DOCUMENTS")
        if self.regular:
            return dict.fromkeys(names)
        queries, keys = geometry.query_positions, geometry.key_positions
        # Only differences matter, and those fit 32 bits ...
        if geometry.causal:
            # ... but for those of hidden pairs, which a compiled graph has not looked at.
            keys = keys.minimum(queries.amax(-1, keepdim=True) + 1)
            queries = queries.maximum(keys.amin(-1, keepdim=True) - 1)
        origin = keys.amin(-1, keepdim=True)
        found = (
            self._each_batch(queries - origin),
            self._each_batch(keys - origin),
            *map(self._each_batch, _ranks(geometry)),
        )
        return dict(zip(names, found, strict=True))

    def ranges(self, of_keys: bool) -> dict[str, Tensor | None]:
        """The range of key slots that each query's document has, or the other way round."""
        documents = self.problem.geometry.key_documents
        if not self.regular or documents is None:
            return {"FIRST": None, "LAST": None}
        behind = self.problem.geometry.num_keys - self.problem.geometry.num_queries
        first, last = document_bounds(documents)
        if of_keys:
            first, last = (first - behind).clamp(min=0), (last - behind).clamp(min=0)
        else:
            first, last = first[:, behind:], last[:, behind:]
        return {"FIRST": self._each_batch(first), "LAST": self._each_batch(last)}

    def lists(self, of_keys: bool) -> dict[str, Tensor | None]:
        """Which slots of keys each slot of queries visits, or the other way round."""
        if self.kept is None:
            return {"COUNTS": None, "SLOTS": None}
        counts, slots = visited(self.kept.mT if of_keys else self.kept)
        return {"COUNTS": counts, "SLOTS": slots}

    @cached_property
    def kept(self) -> Tensor | None:
        """The blocks that pruning keeps, but for those in the future; None for all."""
        kept, geometry = self.problem.kept, self.problem.geometry
        if kept is None or geometry.offset is None or not geometry.causal:
            return kept
        last_query, first_key = (torch.arange(number, device=kept.device) * SLOT for number in kept.shape[2:])
        return kept & (first_key <= last_query.unsqueeze(-1) + SLOT - 1 + geometry.offset)

    def _each_batch(self, tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.to(dtype).expand(self.problem.geometry.batch, -1).contiguous()

    def run(self, kernel: Any, grid: tuple[int, ...], size: Blocks, **arguments: Any) -> None:
        """Start a kernel on the query's device."""
        constants = {"ROWS": size.rows, "KEYS": size.keys, "SLOT": SLOT}
        with torch.cuda.device_of(self.query):
            kernel[grid](
                self.query,
                self.key,
                self.value,
                **arguments,
                **self.numbers,
                **self.sizes,
                **constants,
                num_warps=size.warps,
                num_stages=size.stages,
                # A multiplication and an addition in one, rounded once.
                enable_fp_fusion=True,
            )


def _padded(width: int) -> int:
    """The next power of two; a matrix product takes no fewer than 16 columns."""
    return max(16, 1 << (width - 1).bit_length())


def _ranks(geometry: Geometry) -> tuple[Tensor | None, Tensor | None]:
    """Documents of queries and keys, numbered so that they fit 32 bits."""
    if geometry.key_documents is None:
        return None, None
    numbers = geometry.key_documents.unique(return_inverse=True)[1]
    return numbers[:, geometry.num_keys - geometry.num_queries :], numbers


def visited(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Compact lists of the entries that are kept.

    Args:
        kept: boolean, ``(B, H, n, m)``.

    Returns:
        How many entries of each row are kept, ``(B, H, n)``, and which, in order, ``(B, H, n, m)``; what follows
        them has no meaning. 32-bit integers.
    """
    # A stable sort keeps the order among equals.
    slots = (~kept).to(torch.int8).argsort(dim=-1, stable=True)
    return kept.sum(-1, dtype=torch.int32).contiguous(), slots.to(torch.int32).contiguous()


# ---- forward and backward


def forward(content: Content, problem: BlockProblem) -> tuple[Tensor, Tensor]:
    """Output ``(B, H, Lq, Dv)`` in the content's dtype, and log-sum-exp ``(B, H, Lq)`` in float64.

    Args:
        content: queries, keys, values.
        problem: with a table whose distances fall by one.
    """
    from attention_priors.attention.triton import kernels as kernels

    query, key, value = _joined(content)
    launcher = _Launcher(query, key, value, problem)
    geometry, size = problem.geometry, launcher.configuration.forward
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    launcher.run(
        kernels.forward_kernel,
        (-(-geometry.num_queries // size.rows), geometry.batch * geometry.heads),
        size,
        OUT=out,
        LSE=lse,
        **launcher.bias,
        **launcher.positions,
        **launcher.ranges(of_keys=False),
        **launcher.lists(of_keys=False),
    )
    whole = launcher.with_own(lse)
    recompute_rows(content, problem, out, lse, whole)
    return out, whole


def _joined(content: Content) -> tuple[Tensor, ...]:
    found = content.queries(all_of, content.width), content.keys(all_of, content.width), content.values(all_of)
    return tuple(map(columns_together, found))


def backward(
    content: Content,
    problem: BlockProblem,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """Gradients of everything; arguments as for :func:`forward` and :func:`block_attention.backward`."""
    from attention_priors.attention.triton import kernels as kernels

    table, row_scale = problem.table, problem.row_scale
    wants_table = table is not None and wanted[0]
    query, key, value = _joined(content)
    launcher = _Launcher(query, key, value, problem)
    relative = launcher.without_own(saved[1])
    if (wants_table and problem.geometry.offset is None) or far_rows(relative) is not None:
        # The pairs of a distance lie on no diagonal there. (Nor is anything pruned.) Or float32 is not exact enough.
        return tiles_backward.backward(content, problem, saved, grads, wanted)
    geometry = problem.geometry
    heads = geometry.batch * geometry.heads
    lse = relative.masked_fill(torch.isneginf(relative), 0.0)
    out_grad, lse_grad = columns_together(grads[0].to(query.dtype)), grads[1].to(torch.float32).contiguous()
    constant = torch.linalg.vecdot(saved[0].float(), out_grad.float()) - lse_grad
    rest = torch.empty_like(lse)
    rows = {
        "OUT_GRAD": out_grad,
        "LSE": lse,
        "CONSTANT": constant,
        "REST": rest,
        "grad_batch": out_grad.stride(0),
        "grad_head": out_grad.stride(1),
        "grad_row": out_grad.stride(2),
    }
    query_grad, key_grad, value_grad = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    scale_grad = (
        torch.empty_like(row_scale, memory_format=torch.contiguous_format)
        if row_scale is not None and wanted[2]
        else None
    )
    bias_grad = None
    if problem.key_bias is not None and wanted[1]:
        bias_grad = torch.empty(geometry.batch, geometry.heads, geometry.num_keys, device=query.device)
    size = launcher.configuration.query_grad
    launcher.run(
        kernels.query_grad_kernel,
        (-(-geometry.num_queries // size.rows), heads),
        size,
        LSE_GRAD=lse_grad,
        QUERY_GRAD=query_grad,
        SCALE_GRAD=scale_grad,
        **rows,
        **launcher.bias,
        **launcher.positions,
        **launcher.ranges(of_keys=False),
        **launcher.lists(of_keys=False),
    )
    size = launcher.configuration.key_grad
    launcher.run(
        kernels.key_grad_kernel,
        (-(-geometry.num_keys // size.keys), geometry.batch * key.shape[1]),
        size,
        KEY_GRAD=key_grad,
        VALUE_GRAD=value_grad,
        BIAS_GRAD=bias_grad,
        **rows,
        **launcher.bias,
        **launcher.positions,
        **launcher.ranges(of_keys=True),
        **launcher.lists(of_keys=True),
    )
    table_grad = None
    if wants_table:
        table_grad = _table_grad(launcher, rows | {"LSE_GRAD": lse_grad})
    if scale_grad is not None and launcher.own is not None:
        scale_grad += (launcher.own * lse_grad).to(scale_grad.dtype)
    return Gradients(query_grad, key_grad, value_grad.to(content.value.dtype), table_grad, bias_grad, scale_grad)


def _table_grad(launcher: _Launcher, rows: dict[str, Any]) -> Tensor:
    """The gradient of the table: sums of ``dS`` along diagonals, ``(H, N)``."""
    from attention_priors.attention.triton import kernels as kernels

    problem, size = launcher.problem, launcher.configuration.table_grad
    geometry, table = problem.geometry, launcher.table
    assert geometry.offset is not None
    assert table is not None
    # A strip holds the tiles whose first key lies so many blocks of keys after their first query.
    below = (geometry.num_queries - 1) // size.rows * size.rows // size.keys
    above = (geometry.num_keys - 1) // size.keys
    if geometry.causal:
        above = min(above, (geometry.offset + size.rows - 1) // size.keys)
    strips = below + above + 1
    if strips < 1:
        return torch.zeros_like(table)
    per_tile = size.rows // size.keys + 1
    parts = table.new_empty(geometry.batch * geometry.heads, strips, per_tile, size.keys)
    launcher.run(
        kernels.table_grad_kernel,
        (strips, geometry.batch * geometry.heads),
        size,
        PARTS=parts,
        KEPT=None if launcher.kept is None else launcher.kept.to(torch.int8).contiguous(),
        number=problem.distances.number,
        strips_below=below,
        **rows,
        **launcher.bias,
        **launcher.ranges(of_keys=False),
    )
    parts = parts.unflatten(0, (geometry.batch, geometry.heads)).sum(0)
    # Block b of a strip lies b blocks lower; neighbouring strips overlap.
    reach = per_tile - 1
    total = parts.new_zeros(geometry.heads, strips + reach, size.keys)
    for block in range(per_tile):
        total[:, reach - block : reach - block + strips] += parts[:, :, block]
    # The place in the table of its first number; places outside of the table belong to no visible pair.
    first = problem.distances.highest - geometry.offset - (below + reach) * size.keys
    flat = total.flatten(1)
    return pad(flat, (first, problem.distances.number - first - flat.shape[1])).to(table.dtype)
