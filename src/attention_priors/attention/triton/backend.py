"""Fused attention on CUDA, forward and backward: preparation and launch of the Triton kernels in ``kernels.py``.

The kernels read the log-prior of each pair from the table of its head. They skip blocks that are hidden by causality,
windows, contiguous documents or pruning. Arbitrary positions are supported; a constant offset between the slots of
queries and keys is faster, because the kernels need not load positions.

Without explicit documents or positions, the host never waits for the device. Rows that need float64 (``exact.py``) are
therefore always computed by a second launch of each kernel, which returns immediately if there are no such rows.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import document_bounds
from attention_priors.attention.key_bias import best_seen, in_two
from attention_priors.attention.pruning.bounds import BLOCK
from attention_priors.attention.tiles.bias import is_far
from attention_priors.attention.tiles.block_problem import BlockProblem, Content, Gradients, columns_together
from attention_priors.precision import is_captured
from attention_priors.priors import Structure

if TYPE_CHECKING:
    from attention_priors.attention.geometry import Geometry
    from attention_priors.attention.problem import Problem

INSTALLED = importlib.util.find_spec("triton") is not None
SLOT = BLOCK
"""Number of queries and of keys per entry of the blocks that pruning keeps."""
FAR = 2**30 - 1
"""Distance above all distances of tokens. Twice this number plus 1 fits the kernels' 32-bit integers."""
FEW_QUERIES = 16
"""Largest number of queries for which several programs share the keys of the only block of queries."""
FEWEST_KEYS = 512
"""Smallest number of keys per program."""
LARGEST_SUM = 2.0**62
"""Upper bound on the magnitude of integer sums of gradients, so that they fit 64 bits."""
LARGEST_HEAD_DIM = 256
MOST_HEADS = 65535
"""Largest product of batch size and heads: the limit of a CUDA grid's second dimension."""
MARGIN = 2 * SLOT
"""Number of unused entries before and after those of a table, which hidden pairs at the edges of tiles read."""
WITH_FRAGMENTS = (8, 9)
"""Major compute capabilities whose matrix products have the layout of ``fragments.py``."""
BITS = 1 / math.log(2.0)
"""Bits per nat."""
LONGEST_TABLE = 16
"""Largest number of table entries per token with explicit positions, whose gaps fill the table with unused entries."""


# ---- supported problems


def why_not(problem: Problem) -> str | None:
    """Return the reason why the kernels cannot compute a problem; None if they can.

    The function reads values of tensors, which waits for the device, only if the problem has explicit positions.
    """
    query, geometry = problem.query, problem.geometry
    if not INSTALLED:
        return "triton is not installed"
    if not query.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it runs on CUDA devices, and query is on {query.device}"
    if query.is_cuda and torch.version.hip is not None:
        return "it is written for CUDA, and this PyTorch is for ROCm"
    if query.is_cuda and torch.cuda.get_device_properties(query.device).major < 8:
        return "it needs a CUDA device of compute capability 8.0 or newer"
    if problem.relative is not None or problem.dropout_p > 0:
        return "it does not support relative or dropout_p; use 'auto'"
    if geometry.attn_mask is not None:
        return "it does not support attn_mask; use document_ids, key_padding_mask or a Window, or backend='toeplitz'"
    if query.dtype == torch.float64:
        return "it does not support float64; use 'toeplitz'"
    if geometry.batch * geometry.heads > MOST_HEADS:
        return f"batch times heads must be at most {MOST_HEADS}, got {geometry.batch} times {geometry.heads}"
    if any(Structure.SCALED_DISTANCE in term.structure for term in problem.terms):
        return "it does not support the network of a scaled distance; use 'toeplitz'"
    if not all(term.structure & (Structure.STATIONARY | Structure.OF_KEYS) for term in problem.terms):
        return "it does not support lanes, which a term of the prior needs; use 'lanes' or 'toeplitz'"
    if max(widths := (query.shape[-1], problem.value.shape[-1])) > LARGEST_HEAD_DIM:
        return f"head dimensions must be at most {LARGEST_HEAD_DIM}, got {widths[0]} and {widths[1]}"
    if geometry.has_given_positions and not torch.compiler.is_compiling() and not is_captured():
        farthest, nearest = geometry.farthest_and_nearest()
        if max(farthest, -nearest) >= FAR:
            return (
                f"query_positions and key_positions lie {nearest} to {farthest} tokens apart, but distances must be "
                f"below {FAR}; use 'toeplitz'"
            )
        number = _down_to_what_matters(geometry, farthest, nearest)
        if number > LONGEST_TABLE * (geometry.num_queries + geometry.num_keys):
            return f"positions lie too far apart and would need a table of {number} distances; use 'toeplitz'"
    return None


def distance_range(geometry: Geometry) -> tuple[int, int]:
    """Return the highest distance of a query and a key, and the number of distances in the table.

    Under a causal mask, the table ends at distance -1, whose entry serves all later keys.
    """
    farthest, nearest = geometry.farthest_and_nearest()
    return farthest, _down_to_what_matters(geometry, farthest, nearest)


def _down_to_what_matters(geometry: Geometry, farthest: int, nearest: int) -> int:
    # Under a causal mask, the entry of distance -1 serves all later keys.
    lowest = max(nearest, -1) if geometry.causal else nearest
    return farthest - min(lowest, farthest) + 1


# ---- sizes of blocks


class Blocks(NamedTuple):
    """Block sizes and launch parameters of a kernel."""

    rows: int
    """Number of queries per block."""
    keys: int
    """Number of keys per block."""
    warps: int
    stages: int
    """Number of blocks in the software pipeline of loads."""


PREPARED = Blocks(64, 0, 4, 1)
"""Blocks of ``rows_kernel``, which reads no keys."""


class Configuration(NamedTuple):
    """Blocks of all kernels. Their sizes divide ``SLOT``."""

    forward: Blocks
    query_grad: Blocks
    key_grad: Blocks


def configuration(width: int, dtype: torch.dtype, num_queries: int = SLOT, capability: int = 8) -> Configuration:
    """Return the blocks of all kernels.

    The kernels compile with few or no spilled registers, and with at most 99 KiB of shared memory, which every device
    with bfloat16 products has. Those for compute capability 9 need more; they were the fastest of several on an H200.

    Args:
        width: Larger of the two padded head dimensions.
        dtype: Dtype of the queries, or float32 for the float64 launch.
        num_queries: Number of queries.
        capability: Major compute capability of the device.
    """
    if dtype == torch.float32:
        blocks = Blocks(16, 16, 8, 1) if width > 128 else Blocks(32, 32, 8 if width > 64 else 4, 1)
        return Configuration(blocks, blocks, blocks)
    if width > 128:
        found = Configuration(Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 8, 1))
    elif capability == 9 and width > 64:
        found = Configuration(Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 2))
    elif capability == 9:
        found = Configuration(Blocks(64, 64, 4, 3), Blocks(64, 128, 4, 3), Blocks(64, 64, 4, 2))
    elif width > 64:
        found = Configuration(Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(32, 128, 8, 2))
    else:
        found = Configuration(Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 3), Blocks(32, 128, 8, 2))
    if num_queries <= FEW_QUERIES:
        return found._replace(forward=found.forward._replace(rows=FEW_QUERIES, warps=4))
    return found


def has_fragments(capability: int, dtype: torch.dtype, rows: int, warps: int) -> bool:
    """Return whether threads hold the products of a tile of ``rows`` rows as ``fragments.py`` describes."""
    # Only products of half precision are computed by matrix units, which give each warp 16 rows.
    return capability in WITH_FRAGMENTS and dtype != torch.float32 and rows >= 16 * warps


def shares(programs: int, problem: BlockProblem) -> int:
    """Return the number of programs that share the keys of a block of queries, to occupy the device with few blocks."""
    geometry = problem.geometry
    if geometry.device.type != "cuda" or geometry.num_queries > FEW_QUERIES:
        return 1
    processors = torch.cuda.get_device_properties(geometry.device).multi_processor_count
    return max(1, min(2 * processors // programs, geometry.num_keys // FEWEST_KEYS))


# ---- arguments of the kernels


@dataclass(frozen=True)
class _Launcher:
    """Shared arguments of the kernels, computed when first used."""

    content: Content
    problem: BlockProblem

    @cached_property
    def regular(self) -> bool:
        """Whether slots determine positions and documents."""
        return self.problem.geometry.offset is not None

    @property
    def offset(self) -> int:
        """Position of each query minus the position of the key at its slot; 0 if slots do not determine positions."""
        geometry = self.problem.geometry
        if geometry.causal and geometry.offset is not None:
            # If all keys lie in the future, any such offset is equivalent. The bound keeps it within 32 bits.
            return max(geometry.offset, -geometry.num_queries)
        return geometry.offset or 0

    @cached_property
    def own(self) -> Tensor | None:
        """Approximate largest visible key bias of each query, ``(B, H, Lq)`` in float64; None without key biases.

        The kernels subtract this number from the key biases of the query.
        """
        geometry, key_bias = self.problem.geometry, self.problem.key_bias
        if key_bias is None:
            return None
        return best_seen(key_bias, geometry).expand(geometry.batch, -1, -1)

    @cached_property
    def shift(self) -> Tensor | None:
        """Shift of the kernels' log-sum-exp, to be added to it: ``own`` times the row scale if the prior is scaled."""
        row_scale = self.problem.row_scale
        return self.own if self.own is None or row_scale is None else self.own * row_scale

    def configuration(self, far: bool) -> Configuration:
        """Return the blocks of the first launch, or of the float64 launch if ``far``."""
        width = max(self.sizes["BLOCK_D"], self.sizes["BLOCK_DV"])
        dtype = torch.float32 if far else self.content.query.dtype
        return configuration(width, dtype, self.problem.geometry.num_queries, self.capability)

    @cached_property
    def capability(self) -> int:
        """Major compute capability of the device; 0 for the interpreter."""
        query = self.content.query
        return torch.cuda.get_device_capability(query.device)[0] if query.is_cuda else 0

    @cached_property
    def sizes(self) -> dict[str, int]:
        d, dv = self.content.query.shape[-1], self.content.value.shape[-1]
        return {"D": d, "DV": dv, "BLOCK_D": _padded(d), "BLOCK_DV": _padded(dv)}

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Strides, lengths and distances."""
        geometry, table = self.problem.geometry, self.problem.table
        strides = {
            f"{name}_{part}": tensor.stride(dim)
            for name, tensor in zip(("query", "key", "value"), self.content[:3], strict=True)
            for dim, part in enumerate(("batch", "head", "row"))
        }
        return strides | {
            "table_head": 0 if table is None else table.shape[1] + 2 * MARGIN,
            "heads": geometry.heads,
            "group": geometry.heads // self.content.key.shape[1],
            "num_queries": geometry.num_queries,
            "num_keys": geometry.num_keys,
            "offset": self.offset,
            "highest": self.problem.distances.highest + MARGIN,
            "lowest": 0 if geometry.causal else -FAR,
            "farthest": FAR,
            "softmax_scale": self.problem.softmax_scale,
        }

    @cached_property
    def masks(self) -> dict[str, Tensor | None]:
        """Row scales, the range of distances in the window, and padding."""
        inside, row_scale = self.problem.inside, self.content.scale
        reach = None
        if inside is not None:
            highest = self.problem.distances.highest
            at = torch.arange(highest, highest - len(inside), -1, dtype=torch.int32, device=inside.device)
            # The visible distances form one interval, which may be empty.
            reach = torch.stack([torch.where(inside, at, FAR).amin(), torch.where(inside, at, -FAR).amax()])
        return {
            "ROW_SCALE": None if row_scale is None else row_scale.contiguous(),
            "REACH": reach,
            "PADDING": self._each_batch(self.problem.geometry.key_padding_mask, torch.int8),
        }

    @cached_property
    def bias(self) -> dict[str, Tensor | None]:
        """Table in float32, and biases of keys and rows (``own``), each as a sum of two float32 numbers; in bits."""
        names, key_bias = ("KEY_HIGH", "KEY_LOW", "OWN_HIGH", "OWN_LOW"), self.key_bias
        of_keys: dict[str, Tensor | None] = dict.fromkeys(names)
        if key_bias is not None and self.own is not None:
            numbers = (*in_two(key_bias * BITS), *in_two(self.own * BITS))
            of_keys = {name: x.contiguous() for name, x in zip(names, numbers, strict=True)}
        table = self.table
        if table is not None:
            table = torch.mul(table, BITS, out=torch.empty_like(table, dtype=torch.float32))
        return of_keys | {"TABLE": table}

    @cached_property
    def exact_bias(self) -> dict[str, Tensor | None]:
        """Table and key biases in float64 and in nats, from which nothing is subtracted."""
        return {"KEY_HIGH": self.key_bias, "TABLE": self.table, **dict.fromkeys(("KEY_LOW", "OWN_HIGH", "OWN_LOW"))}

    @cached_property
    def table(self) -> Tensor | None:
        """Table in float64 and in nats, with ``MARGIN`` entries before and after it."""
        table = self.problem.table
        return None if table is None else pad(table.detach().double(), (MARGIN, MARGIN))

    @cached_property
    def key_bias(self) -> Tensor | None:
        """Biases of keys in nats, for each example of the batch."""
        key_bias, batch = self.problem.key_bias, self.problem.geometry.batch
        return None if key_bias is None else key_bias.detach().expand(batch, -1, -1).contiguous()

    @cached_property
    def positions(self) -> dict[str, Tensor | None]:
        """Positions and documents, or None if slots determine them."""
        geometry = self.problem.geometry
        names = ("QUERY_POSITIONS", "KEY_POSITIONS", "QUERY_DOCUMENTS", "KEY_DOCUMENTS")
        if self.regular:
            return dict.fromkeys(names)
        queries, keys = geometry.query_positions, geometry.key_positions
        # Only differences of positions matter. For visible pairs, they fit 32 bits.
        if geometry.causal:
            # Clamp the differences of hidden pairs, which compiled graphs have not checked, to 32 bits as well.
            keys = keys.minimum(queries.amax(-1, keepdim=True) + 1)
            queries = queries.maximum(keys.amin(-1, keepdim=True) - 1)
        origin = keys.amin(-1, keepdim=True)
        found = (
            self._each_batch(queries - origin),
            self._each_batch(keys - origin),
            self._each_batch(geometry.query_documents, torch.int64),
            self._each_batch(geometry.key_documents, torch.int64),
        )
        return dict(zip(names, found, strict=True))

    def ranges(self, of_keys: bool) -> dict[str, Tensor | None]:
        """Return the range of key slots of each query's document or, with ``of_keys``, of query slots of each key's."""
        geometry = self.problem.geometry
        if not self.regular or geometry.key_documents is None:
            return {"FIRST": None, "LAST": None}
        first, last = geometry.document_range
        if of_keys:
            behind = geometry.num_keys - geometry.num_queries
            first, last = ((end - behind).clamp(min=0) for end in document_bounds(geometry.key_documents))
        return {"FIRST": self._each_batch(first), "LAST": self._each_batch(last)}

    def walk(self, of_keys: bool) -> dict[str, Tensor | None]:
        """Return positions, document ranges and lists of kept blocks, which determine the keys that each query visits.

        With ``of_keys``, they determine the queries that each key visits.
        """
        counts, slots = (None, None) if self.kept is None else visited(self.kept.mT if of_keys else self.kept)
        return {**self.positions, **self.ranges(of_keys), "COUNTS": counts, "SLOTS": slots}

    @cached_property
    def kept(self) -> Tensor | None:
        """Blocks that pruning keeps, without blocks of future keys; None for all blocks."""
        kept, geometry = self.problem.kept, self.problem.geometry
        if kept is None or geometry.offset is None or not geometry.causal:
            return kept
        last_query, first_key = (torch.arange(number, device=kept.device) * SLOT for number in kept.shape[2:])
        return kept & (first_key <= last_query.unsqueeze(-1) + SLOT - 1 + geometry.offset)

    def _each_batch(self, tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.to(dtype).expand(self.problem.geometry.batch, -1).contiguous()

    def run(self, kernel: Any, grid: tuple[int, int, int], size: Blocks, own: int, **arguments: Any) -> None:
        """Launch a kernel on the query's device, whose programs hold ``own`` queries or keys."""
        query, key, value = self.content[:3]
        tiled = self.regular and arguments["FAR"] is None
        tiled = tiled and has_fragments(self.capability, query.dtype, own, size.warps)
        constants = {
            **self.sizes,
            "ROWS": size.rows,
            "KEYS": size.keys,
            "SLOT": SLOT,
            "SCALES_PRIOR": self.problem.row_scale is not None,
            "TILED": tiled,
            "WARPS": size.warps,
        }
        launch(
            kernel,
            grid,
            size,
            constants,
            QUERY=query,
            KEY=key,
            VALUE=value,
            **arguments,
            **(self.bias if arguments["FAR"] is None else self.exact_bias),
            **self.masks,
            **self.numbers,
        )


_compiled: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by everything that Triton compiles a kernel for."""


def launch(kernel: Any, grid: tuple[int, int, int], size: Blocks, constants: dict[str, Any], **arguments: Any) -> None:
    """Launch a kernel on the device of its log-sum-exps.

    Triton's own launch takes about 0.05 ms of the CPU, because it looks for the compiled kernel anew. This function
    does so only for the first launch of a kind.
    """
    given = arguments | constants
    ordered = [given[name] for name in kernel.arg_names]
    kind = (kernel.fn, arguments["LSE"].device, size, *constants.values(), *map(_kind, ordered))
    compiled = _compiled.get(kind)
    with torch.cuda.device_of(arguments["LSE"]):
        if compiled is not None:
            compiled[grid](*ordered)
            return
        # Fuse multiplication and addition, with a single rounding.
        options = {"num_warps": size.warps, "num_stages": size.stages, "enable_fp_fusion": True}
        # The interpreter returns None.
        _compiled[kind] = kernel[grid](*ordered, **options)


def _kind(argument: Tensor | float | None) -> Any:
    """Return the properties of an argument that Triton compiles a kernel for.

    Those of a tensor are its dtype and alignment; of an integer, whether it is 1, a multiple of 16 or beyond 32 bits.
    """
    if argument is None or isinstance(argument, float):
        return type(argument)
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() > 31
    return argument.dtype, argument.data_ptr() % 16 == 0


def _padded(width: int) -> int:
    """Return the next power of two, and at least 16, the smallest width of a matrix product."""
    return max(16, 1 << (width - 1).bit_length())


def visited(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return compact lists of kept entries.

    Args:
        kept: Boolean, shape ``(B, H, n, m)``.

    Returns:
        The number of kept entries of each row, ``(B, H, n)``, and their indices in ascending order, ``(B, H, n, m)``,
        followed by unspecified values. Both are int32.
    """
    # A stable sort keeps the ascending order.
    slots = (~kept).to(torch.int8).argsort(dim=-1, stable=True)
    return kept.sum(-1, dtype=torch.int32).contiguous(), slots.to(torch.int32).contiguous()


# ---- forward and backward


def forward(content: Content, problem: BlockProblem) -> tuple[Tensor, Tensor]:
    """Return the output ``(B, H, Lq, Dv)`` in the content's dtype, and the log-sum-exp ``(B, H, Lq)`` in float64.

    Args:
        content: Queries, keys and values.
        problem: Problem with a table whose distances fall by one.
    """
    from attention_priors.attention.triton.kernels import forward_kernel

    launcher = _Launcher(content, problem)
    query, geometry = content.query, problem.geometry
    heads, walk = geometry.batch * geometry.heads, launcher.walk(of_keys=False)

    def run(size: Blocks, number: int, out: Tensor, lse: Tensor, **arguments: Tensor | None) -> None:
        grid = (-(-geometry.num_queries // size.rows), heads, number)
        launcher.run(forward_kernel, grid, size, size.rows, OUT=out, LSE=lse, **arguments, **walk)

    size = launcher.configuration(far=False).forward
    number = shares(-(-geometry.num_queries // size.rows) * heads, problem)
    shape = (geometry.batch, geometry.heads, geometry.num_queries)
    value_dim = content.value.shape[-1]
    if number == 1:
        out, lse = query.new_empty(*shape, value_dim), query.new_empty(shape, dtype=torch.float64)
        far = query.new_empty(shape, dtype=torch.int8)
        run(size, 1, out, lse, IS_FAR=far, FAR=None)
    else:
        shared = (*shape[:2], number, shape[2])
        outs, bits = (query.new_empty(x, dtype=torch.float32) for x in ((*shared, value_dim), shared))
        run(size, number, outs, bits, IS_FAR=None, FAR=None)
        lse, out = _merged(bits.double() / BITS, outs)
        out, far = out.to(query.dtype), is_far(lse).to(torch.int8)
    if launcher.shift is not None:
        lse = lse + launcher.shift
    if problem.table is not None or problem.key_bias is not None:
        run(launcher.configuration(far=True).forward, 1, out, lse, IS_FAR=None, FAR=far)
    return out, lse


def _merged(lse: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the log-sum-exps ``(B, H, S, Lq)`` and outputs ``(B, H, S, Lq, Dv)`` of all shares of keys."""
    total = lse.logsumexp(2)
    # For a row without visible keys, -inf minus -inf is NaN.
    weights = (lse - total.unsqueeze(2)).exp().nan_to_num(nan=0.0).float()
    return total, (out * weights.unsqueeze(-1)).sum(2)


def backward(
    content: Content,
    problem: BlockProblem,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    wanted: tuple[bool, ...],
) -> Gradients:
    """Return all gradients. Arguments are those of :func:`forward` and :func:`tiles.backward.backward`."""
    from attention_priors.attention.triton import kernels as kernels

    launcher, geometry = _Launcher(content, problem), problem.geometry
    heads, number = geometry.batch * geometry.heads, geometry.num_queries
    out_grad = columns_together(grads[0].to(content.query.dtype))
    lse_grad = torch.zeros_like(saved[1], dtype=torch.float32) if grads[1] is None else grads[1].float().contiguous()
    strides = dict(zip(("grad_batch", "grad_head", "grad_row"), out_grad.stride()[:3], strict=True))
    constant, rest, near_lse = (torch.empty_like(lse_grad) for _ in range(3))
    far_lse, far = torch.empty_like(saved[1]), torch.empty_like(lse_grad, dtype=torch.int8)
    largest = torch.zeros(3, dtype=torch.int32, device=out_grad.device)
    shift = launcher.shift
    launch(
        kernels.rows_kernel,
        (-(-number // PREPARED.rows), heads, 1),
        PREPARED,
        {"DV": launcher.sizes["DV"], "BLOCK_DV": launcher.sizes["BLOCK_DV"], "ROWS": PREPARED.rows},
        OUT=saved[0].contiguous(),
        OUT_GRAD=out_grad,
        LSE=saved[1].contiguous(),
        LSE_GRAD=lse_grad,
        SHIFT=None if shift is None else shift.contiguous(),
        CONSTANT=constant,
        NEAR_LSE=near_lse,
        FAR_LSE=far_lse,
        IS_FAR=far,
        LARGEST=largest,
        heads=geometry.heads,
        num_queries=number,
        **strides,
    )
    query_grad, key_grad, value_grad = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in content[:3])
    integers = units = bias_grad = scale_grad = None
    if problem.table is not None and wanted[0]:
        table_heads, entries = problem.table.shape
        integers = far.new_zeros(table_heads, entries + 2 * MARGIN, dtype=torch.int64)
        units = _units(launcher, largest)
    if problem.key_bias is not None and wanted[1]:
        bias_grad = lse_grad.new_empty(geometry.batch, geometry.heads, geometry.num_keys)
    if content.scale is not None and wanted[2]:
        scale_grad = torch.zeros_like(content.scale, memory_format=torch.contiguous_format)
    rows: dict[str, Any] = {"OUT_GRAD": out_grad, "LSE_GRAD": lse_grad, "CONSTANT": constant, "REST": rest, **strides}
    queries_walk, keys_walk = (launcher.walk(of_keys) for of_keys in (False, True))

    def add(lse: Tensor, far: Tensor | None) -> None:
        """Add the gradients of the rows with finite ``lse``."""
        sizes = launcher.configuration(far=far is not None)
        launcher.run(
            kernels.query_grad_kernel,
            (-(-number // sizes.query_grad.rows), heads, 1),
            sizes.query_grad,
            sizes.query_grad.rows,
            LSE=lse,
            FAR=far,
            QUERY_GRAD=query_grad,
            SCALE_GRAD=scale_grad,
            **rows,
            **queries_walk,
        )
        launcher.run(
            kernels.key_grad_kernel,
            (-(-geometry.num_keys // sizes.key_grad.keys), geometry.batch * key_grad.shape[1], 1),
            sizes.key_grad,
            sizes.key_grad.keys,
            LSE=lse,
            FAR=None if far is None else largest,
            KEY_GRAD=key_grad,
            VALUE_GRAD=value_grad,
            BIAS_GRAD=bias_grad,
            TABLE_GRAD=integers,
            UNITS=units,
            **rows,
            **keys_walk,
        )

    add(near_lse, None)
    if problem.table is not None or problem.key_bias is not None:
        add(far_lse, far)
    table_grad = None
    if integers is not None and units is not None and problem.table is not None:
        table_grad = (integers[:, MARGIN:-MARGIN] / units).to(problem.table.dtype)
    if scale_grad is not None and problem.row_scale is not None and launcher.own is not None:
        # In the float64 launch, nothing was subtracted from the key biases.
        scale_grad.add_((launcher.own * lse_grad).masked_fill(far != 0, 0.0).to(scale_grad.dtype))
    return Gradients(query_grad, key_grad, value_grad, table_grad, bias_grad, scale_grad)


def _units(launcher: _Launcher, largest: Tensor) -> Tensor:
    """Return the factor between a sum of the logits' gradient and its integer, from an upper bound on all such sums.

    The weights of a row sum to 1. Norms bound their factors.
    """
    value, scale, geometry = launcher.content.value, launcher.problem.row_scale, launcher.problem.geometry
    of_out, of_lse = largest[1:].view(torch.float32).double()
    of_value = torch.linalg.vector_norm(value, math.inf, dtype=torch.float32)
    of_row = torch.addcmul(of_lse, of_out, of_value, value=value.shape[-1] ** 0.5)
    of_row = of_row if scale is None else of_row * scale.abs().amax()
    return LARGEST_SUM / (2 * geometry.batch * geometry.num_queries) / of_row.clamp(min=1e-200)
