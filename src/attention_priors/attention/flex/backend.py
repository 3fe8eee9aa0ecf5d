"""FlexAttention backend: PyTorch's compiled ``flex_attention`` with a prior's ``score_mod`` and ``mask_mod``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from attention_priors.attention.flex.mods import BLOCK, ScoreMod, Visibility, score_mod_of
from attention_priors.attention.problem import Problem

LEAST_WIDTH = 16
"""Smallest head dimension that FlexAttention supports on accelerators."""


def flex(problem: Problem, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Compute attention with compiled FlexAttention.

    Returns:
        Output ``(B, H, Lq, Dv)``, and the log-sum-exp ``(B, H, Lq)``, or None without ``need_lse``.

    Raises:
        RuntimeError: FlexAttention cannot be compiled on this machine, for example without a C++ compiler on a CPU.
    """
    return _attend_on_cpu(problem) if problem.query.device.type == "cpu" else _attend(problem, need_lse)


@torch.compiler.disable(
    reason="backend='flex' compiles FlexAttention by itself on CPUs; PyTorch 2.13 cannot together with what it reads"
)
def _attend_on_cpu(problem: Problem) -> tuple[Tensor, Tensor | None]:
    _check_cpu()
    with torch.no_grad():  # compiled code depends on the gradient mode
        return _attend(problem, False)


def _attend(problem: Problem, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    geometry, device = problem.geometry, problem.query.device
    num_queries, num_keys = slots = _rounded(geometry.num_queries, device), _rounded(geometry.num_keys, device)
    prior, row_scale = problem.prior, problem.row_scale
    score_mod, own = score_mod_of(prior, geometry, row_scale, problem.scales_prior, problem.key_bias, slots)
    visibility = Visibility.of(prior, geometry, slots)
    query, key, value = (
        pad(tensor, (0, 0, 0, length - tensor.shape[2])) if length > tensor.shape[2] else tensor
        for tensor, length in ((problem.query, num_queries), (problem.key, num_keys), (problem.value, num_keys))
    )
    out, lse = _run(query, key, value, score_mod, visibility.block_mask(), problem.softmax_scale, need_lse)
    out = out[:, :, : geometry.num_queries]
    if lse is None:
        return out, None
    lse = lse[:, :, : geometry.num_queries]
    if own is not None:
        constant = own[0][:, :, : geometry.num_queries]
        if row_scale is not None and problem.scales_prior:
            constant = constant * row_scale
        # A query that sees no key keeps -inf, without a gradient.
        lse = torch.where(lse == float("-inf"), lse, lse + constant)
    return out, lse


def _rounded(length: int, device: torch.device) -> int:
    """Return the length to which FlexAttention's inputs are padded.

    On CPUs, FlexAttention is compiled for each length, because its code for dynamic lengths does not compile
    (PyTorch 2.13). Lengths are therefore rounded up to multiples of a block. A single query has a separate kernel.
    """
    return -(-length // BLOCK) * BLOCK if device.type == "cpu" and length > 1 else length


def _check_cpu() -> None:
    """Raise a RuntimeError if FlexAttention cannot be compiled on this machine; uncompiled, it is the dense formula."""
    if sys.platform == "darwin" or not torch.cpu._is_avx2_supported():
        raise RuntimeError("backend='flex' needs a CPU with AVX2 and does not support macOS; use backend='toeplitz'")
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise RuntimeError(
            "backend='flex' compiles FlexAttention, for which PyTorch needs a C++ compiler on CPUs, but found none; "
            "install g++, or set CXX to a compiler before importing torch, or use backend='toeplitz'"
        ) from error


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod,
    block_mask: BlockMask,
    softmax_scale: float,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    # A separate function has its own recompilation limit, so that calls do not use up that of a user's flex_attention.
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "backend='flex' needs torch.compile, which is switched off: uncompiled, FlexAttention is the dense "
            "formula; use backend='toeplitz'"
        )
    grouped, width = query.shape[1] != key.shape[1], value.shape[-1]
    if query.device.type != "cpu":
        query, key, value = (pad(x, (0, max(0, LEAST_WIDTH - x.shape[-1]))) for x in (query, key, value))
    # For several queries, but fewer than 128, PyTorch's kernel of decoding may find no block size (seen with 2.11).
    several = query.device.type != "cpu" and query.shape[2] > 1
    options = {
        "score_mod": score_mod,
        "block_mask": block_mask,
        "scale": softmax_scale,
        "enable_gqa": grouped,
        "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True} if several else None,
    }
    if not need_lse:
        out = flex_attention(query, key, value, **options)
        assert isinstance(out, Tensor)
        return out[..., :width], None
    out, aux = flex_attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
    return out[..., :width], aux.lse


@cache
def _compiled(device: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    return torch.compile(_attention, fullgraph=True, dynamic=False if device == "cpu" else None)


def _run(query: Tensor, *arguments: object) -> tuple[Tensor, Tensor | None]:
    if torch.compiler.is_compiling():
        return _attention(query, *arguments)  # pyright: ignore[reportArgumentType]
    # FlexAttention is compiled for each number of heads, dtype and kind of mask, and on CPUs for each length. With
    # `fullgraph`, PyTorch raises an error at the default recompilation limit.
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000):
        return _compiled(query.device.type)(query, *arguments)
