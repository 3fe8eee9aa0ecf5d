"""``attend()``: attention with a positional prior, computed by one of several backends."""

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
from attention_priors.attention.tiles.decoding import attend_cached
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
    """Compute attention with a positional prior.

    The logits are ``z_ij = c_i · (<q_i, k_j> · softmax_scale + K_ij)``, with the log-prior ``K`` in nats and the logit
    scale ``c`` (1 without a logit scale; one with ``include_prior=False`` multiplies the content alone). The output is
    ``o_i = Σ_j softmax_j(z_ij) v_j`` over the keys that query ``i`` may see. Masks apply after the scaling. Gradients
    reach query, key, value, ``key_bias``, ``null_logit``, ``relative``, a float ``attn_mask``, and every parameter of
    the prior and of the logit scale.

    Args:
        query: queries ``(B, H, Lq, D)`` in float16, bfloat16, float32 or float64.
        key: keys ``(B, Hkv, Lk, D)``. ``H`` is a multiple of ``Hkv`` (GQA, MQA).
        value: values ``(B, Hkv, Lk, Dv)``.
        prior: log-prior over positions. None is the uniform prior.
        causal: whether a query sees only keys at positions up to its own.
        logit_scale: logit scale ``c``, such as :class:`SSMax`. None is ``c = 1``.
        visible_keys: number of keys that each query may see, for ``logit_scale``: integers ``(Lq,)``, ``(B, Lq)`` or
            ``(B, H or 1, Lq)``, at least 1. By default, all keys of ``key`` that are not hidden count. Pass the full
            counts if ``key`` lacks keys, for example evicted keys or keys that another call computes.
        softmax_scale: positive factor of the content logits. The default is ``1/sqrt(D)``.
        query_positions: positions of the queries in tokens, integers ``(Lq,)`` or ``(B, Lq)``. By default, the last
            query is at the last key, as in decoding with a KV cache.
        key_positions: positions of the keys in tokens, integers ``(Lk,)`` or ``(B, Lk)``. The default is ``0..Lk-1``,
            counted from 0 in each document. Priors on grids need the positions of :func:`grid_positions`.
        document_ids: document of each key, integers ``(B, Lk)``. Packed documents do not see each other. Queries are
            the last ``Lq`` tokens.
        key_padding_mask: boolean ``(B, Lk)``, True = ignore.
        attn_mask: boolean mask (True = forbidden), or floats that are added to the scaled logits. The shape is
            ``(Lq, Lk)`` or expands to ``(B, H, Lq, Lk)``. This mask is dense: prefer the arguments above.
        relative: Shaw's vectors, which enter content logits and values.
        dropout_p: dropout probability of the attention weights.
        return_lse: whether to also return the log-sum-exp of each query's logits. The log-sum-exp merges results over
            disjoint sets of keys. (With a ``logit_scale``, pass each call the ``visible_keys`` of the whole.) Gradients
            flow through the log-sum-exp. In float32, merging loses digits where a ``key_bias`` or a :class:`KeySink`
            makes the log-sum-exp large (1e-3 at 10⁴ nats).
        tolerance: share of its attention weight that a query may lose to pruning, in [0, 1). Above 0, the computation
            skips blocks of keys whose total weight is provably at most this share. Up to rounding,
            ``‖o_i - ô_i‖ ≤ 2 tolerance · max_j ‖v_j‖``, and the log-sum-exp is low by at most ``-ln(1 - tolerance)``.
            Gradients are exact for the pruned computation. Heads whose prior decays with distance then take linear
            time. Only ``toeplitz`` and ``triton`` prune. Positions with gaps or an ``attn_mask`` disable pruning. So do
            up to 3072 keys, on GPUs 524288, because choosing among them takes longer than reading them. At 0,
            ``toeplitz`` still skips blocks that together weigh less than 2^-64, which rounding hides even in float64.
            It does so for at least 256 queries, outside of compiled programs.
        key_bounds: :class:`KeyBounds` of ``key``, stored with a KV cache. Fewer than 32 queries are pruned only with
            bounds, from 16385 keys on.
        key_bias: bias of each key in nats, added to the log-prior of every query: finite, ``(B, H or Hkv, Lk)`` in
            float32 or float64. Examples are the sums of a forget gate and weights of documents. Biases of hidden keys
            are ignored. Sums over long texts need float64. Log-weights are then exact to 1e-4 nats, however large the
            sums are.
        null_logit: logit ``s`` of a null key with the value zero. Pass nats in ``(H,)`` or ``(B, H, Lq)``, or a
            :class:`NullKey`. The null key takes ``e^s / (e^s + Σ_j e^z_ij)`` of the weight. No logit scale multiplies
            ``s``, and ``visible_keys`` does not count the null key. The log-sum-exp excludes the null key. To merge
            results, omit ``null_logit`` and call :func:`apply_null` once at the end.
        backend: engine of the computation. All engines compute the formula above. ``auto`` chooses by the prior's
            structure. Factored priors use ``lanes`` if only the causal flag hides keys, unless a table does as well
            (half precision, a tolerance, few queries). Problems with ``relative``, dropout, or an ``attn_mask`` with a
            gradient use ``blockwise``. Other problems use ``toeplitz``. On CUDA, ``auto`` prefers the fused kernels of
            ``triton`` for every problem that they support. Under ``torch.export``, ``auto`` uses ``reference``, the
            dense formula, whose operators are PyTorch's own. ``flex`` is compiled FlexAttention. On CPUs, ``flex`` has
            no gradients and no log-sum-exp. On no device does ``flex`` support float64. If the keys that a query
            attends to have log-priors beyond 400 nats, float32 is too coarse. ``toeplitz`` and ``triton`` then subtract
            a constant from the row, or compute the row in float64.

    Returns:
        Output ``(B, H, Lq, Dv)`` in the query's dtype. With ``return_lse``, also the log-sum-exp ``(B, H, Lq)`` in
        float32 (float64 for float64 queries). A query that sees no key gets output 0 and log-sum-exp ``-inf``. A key
        that is NaN or infinite changes only queries that see the key. A hidden value that is not finite may change any
        query and any gradient.

    Raises:
        ValueError: an argument is invalid or does not fit the other arguments. The message names the argument.
        RuntimeError: ``backend="flex"`` on a CPU without a C++ compiler, or a call under ``torch.jit.trace``.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    nothing_else = (
        visible_keys
        is query_positions
        is key_positions
        is document_ids
        is key_padding_mask
        is attn_mask
        is relative
        is key_bounds
        is key_bias
        is null_logit
        is None
    )
    if (
        nothing_else
        and causal is True
        and dropout_p == 0
        # Without key_bounds, no key of a single query is pruned.
        and (tolerance == 0 or (type(tolerance) is float and 0 < tolerance < 1))
        and not return_lse
        and backend == "auto"
    ):
        out = attend_cached(query, key, value, prior, logit_scale, softmax_scale)
        if out is not None:
            return out
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
    """Compute the attention of a checked problem.

    Returns:
        Output and log-sum-exp. Without ``need_lse``, the log-sum-exp may be None. If it includes a constant that was
        subtracted from the row, its dtype is float64. Results over different keys can then be merged, however large the
        constant is.
    """
    plan = make_plan(problem, backend, need_lse=need_lse)
    # Each backend sets the precision of every step, and autocast would override it.
    with without_autocast(problem.query.device.type):
        if plan.engine == "reference":
            return reference(problem)[:2]
        if plan.engine == "blockwise":
            return blockwise(problem)
        if plan.engine == "lanes":
            return lanes(problem), None
        if plan.engine == "flex":
            # The backend imports PyTorch's compiler, which takes a second.
            from attention_priors.attention.flex.backend import flex

            return flex(problem, need_lse=need_lse)
        if plan.engine == "triton":
            return attend_in_blocks(problem, plan, fused=True)
        return tiles(problem, plan, need_lse=need_lse)


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, prior: Prior | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Compute attention by the dense formula and also return the attention weights.

    Memory is ``B · H · Lq · Lk``. The arguments are those of :func:`attend`, except ``return_lse`` and ``backend``. A
    ``tolerance`` has no effect.

    Returns:
        Output ``(B, H, Lq, Dv)`` and weights ``(B, H, Lq, Lk)`` before dropout, both in the query's dtype. Both are 0
        for a query that sees no key. With a ``null_logit``, the weights of a query sum to 1 less the null key's share.

    Raises:
        ValueError: as for :func:`attend`.
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
    """Cast query, key and value to autocast's dtype, if autocast is on.

    Rotary positions or a float32 cache may have left the three tensors in different dtypes.
    """
    if not isinstance(query, Tensor) or not is_in_autocast(query.device.type):
        return query, key, value
    wanted = torch.get_autocast_dtype(query.device.type)

    def cast(given: Any) -> Any:
        # PyTorch's own attention casts the same dtypes. `make_problem` rejects all other arguments.
        return given.to(wanted) if isinstance(given, Tensor) and given.dtype in _AUTOCAST else given

    return cast(query), cast(key), cast(value)


_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that autocast converts."""
