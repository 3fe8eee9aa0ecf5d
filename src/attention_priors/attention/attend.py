"""``attend()``: attention with a positional prior. One meaning, several computations."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from attention_priors.attention.lanes import lanes
from attention_priors.attention.logit_scale import SSMax
from attention_priors.attention.null_key import NullKey, gated
from attention_priors.attention.observe import of_thread
from attention_priors.attention.plan import BACKENDS, Backend, make_plan
from attention_priors.attention.problem import Options, Problem, make_problem
from attention_priors.attention.pruning.bounds import KeyBounds
from attention_priors.attention.reference import blockwise, reference
from attention_priors.attention.tiles.backend import attend_in_blocks, tiles
from attention_priors.encodings import ShawVectors
from attention_priors.precision import is_in_autocast, without_autocast
from attention_priors.priors import Prior


@overload
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None = ...,
    *,
    return_lse: Literal[False] = ...,
    backend: Backend = ...,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None = ...,
    *,
    return_lse: Literal[True],
    backend: Backend = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None = None,
    *,
    causal: bool = True,
    logit_scale: SSMax | None = None,
    visible_keys: Tensor | None = None,
    softmax_scale: float | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    relative: ShawVectors | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    tolerance: float = 0.0,
    key_bounds: KeyBounds | None = None,
    key_bias: Tensor | None = None,
    null_logit: NullKey | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with a positional prior.

    ``z_ij = c_i · (<q_i, k_j> · softmax_scale + K_ij)``, ``o_i = Σ_j softmax_j(z_ij) v_j`` over the keys that
    query ``i`` may see; ``K`` is the prior's log-prior in nats, ``c`` the logit scale (1 without one). Masks
    come after the scaling. Gradients reach query, key, value, every parameter of the prior, the logit scale
    and ``relative``.

    Args:
        query: ``(B, H, Lq, D)``, float16, bfloat16, float32 or float64.
        key: ``(B, Hkv, Lk, D)``; ``H`` is a multiple of ``Hkv`` (GQA, MQA).
        value: ``(B, Hkv, Lk, Dv)``.
        prior: a log-prior over positions, or None for the uniform one.
        causal: whether a query sees only keys at positions up to its own.
        logit_scale: :class:`SSMax`, or None.
        visible_keys: ``n``, how many keys each query may see as ``logit_scale`` counts them, integers ``(Lq,)``,
            ``(B, Lq)`` or ``(B, H or 1, Lq)``, at least 1. By default those that are given and not hidden are
            counted; where others have been left out (keys that were forgotten, or that another call has seen to), say
            here how many there would be.
        softmax_scale: of the content, any real number above 0; ``1/sqrt(D)`` by default.
        query_positions: integers ``(Lq,)`` or ``(B, Lq)``, in tokens. By default queries end at the last
            key, as in decoding with a KV cache.
        key_positions: integers ``(Lk,)`` or ``(B, Lk)``; by default ``0..Lk-1``, or from 0 in each document. Priors
            on grids need those of :func:`grid_positions`.
        document_ids: integers ``(B, Lk)``: packed documents do not see each other. Queries are the last
            ``Lq`` tokens.
        key_padding_mask: boolean ``(B, Lk)``, True = ignore.
        attn_mask: boolean (True = forbidden) or added to the scaled logits; ``(Lq, Lk)`` or anything that
            expands to ``(B, H, Lq, Lk)``. It is dense: prefer the arguments above.
        relative: Shaw's vectors, which enter content scores and values.
        dropout_p: probability with which attention weights are dropped.
        return_lse: also return the log-sum-exp of each query's logits, which makes partial results over
            disjoint sets of keys mergeable (with a ``logit_scale``, give both the ``visible_keys`` of the whole).
            Gradients flow through it. It is float32 for all but float64 queries: where a ``key_bias`` or a
            :class:`KeySink` makes it large, merging loses digits (1e-3 at 10⁴ nats).
        tolerance: which share of its weight a query may lose, in [0, 1). Above 0, blocks of keys that provably weigh
            no more than that together are not looked at, so that ``‖o_i - ô_i‖ ≤ 2 tolerance · max_j ‖v_j‖`` and the
            log-sum-exp is low by at most ``-ln(1 - tolerance)``, beside rounding; gradients are exactly those of
            what is computed. Heads whose prior falls off with distance then cost linear time. Positions with gaps
            and an ``attn_mask`` are computed in full, and so is everything by backends other than ``toeplitz`` and
            ``triton``.
        key_bounds: :class:`KeyBounds` of ``key``, kept beside a cache; without them pruning reads every key.
        key_bias: nats, ``(B, H or Hkv, Lk)`` in float32 or float64, finite, added to the log-prior of every query: a
            part of ``K`` that depends on the key and comes from the content, such as a forget gate's sums or weights
            of documents. What it says of hidden keys is ignored. Sums over long texts need float64: then log-weights
            are exact to 1e-4 nats however large the sums are.
        null_logit: ``s`` in nats, a :class:`NullKey` or a tensor ``(H,)`` or ``(B, H, Lq)``: beside the keys stands one
            more, whose value is zero, and takes ``e^s / (e^s + Σ_j e^z_ij)`` of the weight. No logit scale multiplies
            it, and it is not counted as visible. The log-sum-exp is that of the keys alone: to merge results, leave it
            out and call :func:`apply_null` once at the end.
        backend: how it is computed, never what. ``auto`` chooses by the prior's structure. It takes ``lanes`` if all
            of it is factored and nothing but the causal flag hides keys, unless a table does as well (half precision,
            a tolerance, few queries); ``blockwise`` for ``relative``, dropout and an ``attn_mask`` with a gradient;
            else ``toeplitz``. On CUDA it takes ``triton``, the fused kernels, for all that they compute. Under
            ``torch.export`` it takes ``reference``, the dense formula, whose operators are PyTorch's own. ``flex`` is
            compiled FlexAttention: on CPUs without gradients and log-sum-exp, nowhere in float64. Where the keys that a
            query looks at have log-priors beyond 400 nats, ``toeplitz`` and ``triton`` compute its row less a constant,
            or in float64: float32 would not hold them.

    Returns:
        Output ``(B, H, Lq, Dv)`` in the query's dtype; with ``return_lse`` also ``(B, H, Lq)`` in float32
        (float64 for float64 queries). A query that may see no key gets zeros, and ``-inf``. A key that is NaN or
        infinite changes only queries that see the key. Hidden values that are not finite may change any query, and
        gradients too.

    Raises:
        ValueError: if an argument is impossible or does not fit the others; it says which and why.
        RuntimeError: for ``backend="flex"`` on a CPU, if there is no C++ compiler; under ``torch.jit.trace``.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    query, key, value = as_autocast_has_it(query, key, value)
    problem = make_problem(
        query,
        key,
        value,
        prior,
        causal=causal,
        logit_scale=logit_scale,
        visible_keys=visible_keys,
        softmax_scale=softmax_scale,
        query_positions=query_positions,
        key_positions=key_positions,
        document_ids=document_ids,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        relative=relative,
        dropout_p=dropout_p,
        tolerance=tolerance,
        key_bounds=key_bounds,
        key_bias=key_bias,
        null_logit=null_logit,
    )
    for see in getattr(of_thread, "told", ()):
        see(problem)
    out, lse = solve(problem, backend, need_lse=return_lse or problem.null_logit is not None)
    if problem.null_logit is not None:
        assert lse is not None
        out = gated(out, lse, problem.null_logit)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse.to(problem.compute_dtype)


def solve(problem: Problem, backend: Backend, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """What :func:`attend` does once its arguments are checked.

    Returns:
        Output, and the log-sum-exp, in float64 where a constant of the row is a part of it: then results over
        different keys can be merged however large the constant is. Without ``need_lse`` it may be None.
    """
    plan = make_plan(problem, backend, need_lse=need_lse)
    # Each backend states the precision of every step; autocast would change it behind its back.
    with without_autocast(problem.query.device.type):
        if plan.engine == "reference":
            return reference(problem)[:2]
        if plan.engine == "blockwise":
            return blockwise(problem)
        if plan.engine == "lanes":
            return lanes(problem), None
        if plan.engine == "flex":
            # It brings all of PyTorch's compiler, whose import takes a second.
            from attention_priors.attention.flex.backend import flex

            return flex(problem, need_lse=need_lse)
        if plan.engine == "triton":
            return attend_in_blocks(problem, plan, fused=True)
        return tiles(problem, plan, need_lse=need_lse)


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, prior: Prior | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """:func:`attend` by the dense formula, for those who want to see the weights; memory is ``B · H · Lq · Lk``.

    It takes the same, but for ``return_lse`` and ``backend``; with a ``tolerance`` it leaves out nothing.

    Returns:
        Output ``(B, H, Lq, Dv)`` and weights ``(B, H, Lq, Lk)`` before dropout, both in the query's dtype. A query that
        may see no key gets zeros in both. With a ``null_logit`` weights sum to what it leaves to the keys.

    Raises:
        ValueError: as :func:`attend`.
    """
    problem = make_problem(*as_autocast_has_it(query, key, value), prior, **options)
    for see in getattr(of_thread, "told", ()):
        see(problem)
    with without_autocast(query.device.type):
        out, lse, weights = reference(problem)
        if problem.null_logit is not None:
            out, weights = (gated(x, lse, problem.null_logit) for x in (out, weights))
    return out, weights.to(query.dtype)


def as_autocast_has_it(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three in one dtype: rotary positions or a float32 cache may have left them in different ones."""
    if not isinstance(query, Tensor) or not is_in_autocast(query.device.type):
        return query, key, value
    wanted = torch.get_autocast_dtype(query.device.type)

    def cast(given: Any) -> Any:
        # As PyTorch's own attention has it. What is wrong with others is said where arguments are checked.
        return given.to(wanted) if isinstance(given, Tensor) and given.dtype in _AUTOCAST else given

    return cast(query), cast(key), cast(value)


_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
"""What autocast changes."""
