"""Ring attention over a sequence whose tokens are distributed over the processes of a group.

Keys and values travel around a ring of processes. Each process attends with its own queries to one shard of keys at a
time, and merges the results by their log-sum-exps. The backward pass is a second ring. Each process recomputes the
results of a shard, adds its part of the gradients, and sends the gradients of keys and values on with the shard. A
process therefore holds only a few shards at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from attention_priors.attention.attend import BACKENDS, Backend, as_autocast_has_it, solve
from attention_priors.attention.distributed.shards import Piece, Plan, ShardedSequence
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.logit_scale import SSMax
from attention_priors.attention.null_key import NullKey, apply_null
from attention_priors.attention.plan import make_plan
from attention_priors.attention.problem import Options, Problem, make_problem
from attention_priors.attention.pruning.bounds import BLOCK
from attention_priors.precision import compute_dtype_of
from attention_priors.priors import Prior, Structure
from attention_priors.priors.base import check_over_line

KEYS_HAVE_GRADIENTS = "whether key or value needs a gradient"
VANISHING = {torch.float32: -104.0, torch.float64: -746.0}
"""Exponents in nats below which an exponential is 0 in each dtype, so that keys can be skipped exactly."""
GAIN_ROWS = 512
"""Number of queries whose outputs are converted to float64 at a time in the backward pass."""


class _Options(TypedDict, total=False):
    causal: bool
    logit_scale: SSMax | None
    softmax_scale: float | None
    tolerance: float
    key_bias: Tensor | None
    null_logit: NullKey | Tensor | None
    backend: Backend


@overload
def attend_across(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None = ...,
    *,
    sequence: ShardedSequence,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def attend_across(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None = ...,
    *,
    sequence: ShardedSequence,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


def attend_across(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None = None,
    *,
    sequence: ShardedSequence,
    causal: bool = True,
    logit_scale: SSMax | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    tolerance: float = 0.0,
    key_bias: Tensor | None = None,
    null_logit: NullKey | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute :func:`attend` over a sequence whose tokens are distributed over the processes of a group.

    This is a collective operation: every process calls the function with its own tokens, and gets the outputs of these
    tokens. Outputs equal those of :func:`attend` over the whole sequence. Gradients of ``query``, ``key`` and ``value``
    do as well, if every process runs the backward pass.

    **Parameters of prior and logit scale** must be equal in all processes. Each process gets the gradient from its own
    queries. The gradient over the whole sequence is the *sum* over processes, as for any parameter of a layer.
    DistributedDataParallel and FSDP average gradients, so multiply the loss by the number of processes.

    Shards that no query of a process may see, because of causality, documents or a :class:`Window`, are not computed.
    They are sent on only while another process needs them. Far keys are skipped if a bound from norms and log-priors
    shows that their weights are 0 in float32.

    The backward pass recomputes the forward pass of each shard, and cannot be differentiated again. Results are
    deterministic. Dense masks, dropout and Shaw's vectors are not supported; use :func:`attend`.

    Args:
        query: Queries of this process's tokens, shape ``(B, H, L_r, D)``. Tokens are in the order of ``sequence``.
        key: Keys, shape ``(B, Hkv, L_r, D)``.
        value: Values, shape ``(B, Hkv, L_r, Dv)``.
        prior: Log-prior over positions. None is the uniform prior.
        sequence: Places of all tokens, with their documents and padding.
        causal: Whether a query sees only keys at positions up to its own.
        logit_scale: :class:`SSMax` or None. Visible keys are counted over the whole sequence.
        softmax_scale: Scale of the content. The default is ``1/sqrt(D)``.
        return_lse: Whether to also return the log-sum-exp of each query's logits over all keys. It is differentiable.
        tolerance: Share of its weight that a query may lose over all shards. See :func:`attend`.
        key_bias: Bias of this process's keys, shape ``(B, H or Hkv, L_r)``. See :func:`attend`.
        null_logit: Logit of a null key. See :func:`attend`. Its gradient is that of this process's queries.
        backend: Backend of :func:`attend`.

    Returns:
        Output ``(B, H, L_r, Dv)`` in the query's dtype; with ``return_lse`` also ``(B, H, L_r)`` in float32 (float64
        for float64 queries). A query that sees no key gets zeros, and ``-inf``.

    Raises:
        ValueError: The arguments of a process are invalid, or differ between processes. All processes raise an error.
        RuntimeError: Another process does not respond.
    """
    compute: Any = _attend_across
    if torch.compiler.is_compiling():
        # A decorator would import the compiler in every program.
        compute = torch.compiler.disable(compute)
    call = _Call(sequence, prior, causal, logit_scale, softmax_scale, tolerance, backend)
    out, lse = compute(call, query, key, value, key_bias, null_logit)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Call:
    """Arguments that are equal in all processes."""

    sequence: ShardedSequence
    prior: Prior | None
    causal: bool
    logit_scale: SSMax | None
    softmax_scale: float | None
    tolerance: float
    backend: Backend

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of prior and logit scale."""
        return [p for part in (self.prior, self.logit_scale) if part is not None for p in part.parameters()]

    def options(self) -> Options:
        """Return the arguments as options of :func:`make_problem`."""
        return {
            "causal": self.causal,
            "logit_scale": self.logit_scale,
            "softmax_scale": self.softmax_scale,
            "tolerance": self.tolerance,
        }


def _attend_across(
    call: _Call, query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None, null_logit: NullKey | Tensor | None
) -> tuple[Tensor, Tensor]:
    query, key, value = as_autocast_has_it(query, key, value)
    sequence, prior, logit_scale, parameters = call.sequence, call.prior, call.logit_scale, call.parameters()
    of_keys = (key, value) if key_bias is None else (key, value, key_bias)

    def check() -> tuple[dict[str, Any], str]:
        if call.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {call.backend!r}")
        if isinstance(prior, Prior):
            check_over_line(prior)
        options: Options = {**call.options(), "key_bias": key_bias, "null_logit": null_logit}
        problem = make_problem(query, key, value, prior, **options)
        length = sequence.lengths[sequence.rank]
        if query.shape[2] != length or key.shape[2] != length:
            raise ValueError(
                f"query and key must hold the {length} tokens that sequence assigns to this process, got shapes "
                f"{tuple(query.shape)} and {tuple(key.shape)}"
            )
        if sequence.batch not in (1, len(query)):
            raise ValueError(f"sequence has batch size {sequence.batch}, but query has shape {tuple(query.shape)}")
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query, *of_keys, *parameters))
        return {
            "query's batch, heads and head_dim": (*query.shape[:2], query.shape[3]),
            "key's heads": key.shape[1],
            "value's head_dim": value.shape[3],
            "dtype": str(query.dtype),
            **call.options(),
            # Modules are compared by their configs.
            "prior": None if prior is None else prior.to_config(),
            "logit_scale": None if logit_scale is None else logit_scale.to_config(),
            "whether there is a backward pass": trained,
            "key_bias": None if key_bias is None else (str(key_bias.dtype), key_bias.shape[1]),
            KEYS_HAVE_GRADIENTS: trained and any(x.requires_grad for x in of_keys),
        }, make_plan(problem, call.backend, need_lse=True).engine

    agreed, engines = zip(*sequence.exchange("attend_across", check), strict=True)
    _check_same(agreed)
    if len({*engines}) > 1:
        # Fused kernels do not work on some device. All processes then use the backend that works everywhere.
        call = replace(call, backend="toeplitz")
    reach = None if prior is None else _reach(prior, sequence.length, query.device)
    ring = _Ring(call, sequence.plan(call.causal, reach), agreed[0][KEYS_HAVE_GRADIENTS])
    biases = [] if key_bias is None else [key_bias.unsqueeze(-1)]
    out, lse = _Across.apply(ring, query, key, value, *biases, *ring.parameters)  # pyright: ignore[reportGeneralTypeIssues]
    return (out if null_logit is None else apply_null(out, lse, null_logit)), lse


def _check_same(every: Sequence[Any]) -> None:
    for name, first in every[0].items():
        for rank, found in enumerate(every):
            if found[name] != first:
                raise ValueError(
                    f"attend_across: {name} must be the same in all processes of the group, got {first!r} in process 0 "
                    f"and {found[name]!r} in process {rank}"
                )


def _reach(prior: Prior, length: int, device: torch.device) -> tuple[int, int] | None:
    """Return the smallest and the largest distance that the prior leaves visible; None for all distances."""
    distances = torch.arange(1 - length, length, device=device)
    visible = prior.visible_at(distances)
    if visible is None:
        return None
    seen = distances[visible]
    return (int(seen[0]), int(seen[-1])) if len(seen) else (length, -length)


# ---- communication


class _Shard(tuple[Tensor, ...]):
    """Keys, values and optional biases ``(B, H or Hkv, L, 1)`` of one process, or their gradients.

    A shard without tensors stands for keys that this process does not need. Sending or receiving it does nothing.
    """

    __slots__ = ()

    def empty(self, length: int) -> _Shard:
        """Return an uninitialised shard for ``length`` tokens of another process."""
        return _Shard(x.new_empty(*x.shape[:2], length, x.shape[3]) for x in self)

    def zeros(self) -> _Shard:
        """Return zeros as gradients of this shard, in the dtype of accumulation."""
        return _Shard(torch.zeros_like(x, dtype=compute_dtype_of(x)) for x in self)

    def add(self, other: _Shard) -> None:
        """Add another shard in place; it may have no tensors."""
        for mine, theirs in zip(self, other, strict=len(other) > 0):
            mine += theirs


class _Transfer:
    """Asynchronous sends and receives of shards, whose memory is in use until :meth:`wait` returns.

    Args:
        sequence: Sequence whose processes take part.
        moves: For each shard, ``dist.isend`` or ``dist.irecv``, the shard, and the rank of the other process.
        tag: Tag of the first tensor of each shard. The other tensors have the following tags.
    """

    def __init__(
        self, sequence: ShardedSequence, moves: Sequence[tuple[Callable[..., Any], _Shard, int]], tag: int
    ) -> None:
        self._sequence = sequence
        self._operations = [
            dist.P2POp(operation, tensor, group=sequence.group, tag=tag + part, group_peer=rank)
            for operation, shard, rank in moves
            for part, tensor in enumerate(shard)
        ]
        self._works = dist.batch_isend_irecv(self._operations) if self._operations else []

    def wait(self) -> None:
        """Wait until all shards have arrived, and the memory of sent shards can be reused."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as failed:
            sequence = self._sequence
            raise RuntimeError(
                f"attend_across: process {sequence.rank} of {sequence.size} got no keys from another process, which "
                "has stopped or does not run the backward pass"
            ) from failed
        self._operations, self._works = [], []


class _Ring:
    """Computation and communication of one call. Process ``r`` sends shards to process ``r + 1``."""

    def __init__(self, call: _Call, plan: Plan, keys_have_gradients: bool) -> None:
        self.call, self.sequence, self.plan, self.keys_have_gradients = call, call.sequence, plan, keys_have_gradients
        # Half of the tolerance is for keys pruned within pieces, and half is for skipped pieces.
        self.tolerance = call.tolerance / 2
        self.parameters = call.parameters()
        self.computed: list[list[tuple[Piece, Tensor | None]]] = []
        """Pieces that the forward pass computed, by owner of the keys, each with its kept blocks (see
        :class:`Problem`)."""

    # ---- routes of shards

    def _behind(self, steps: int) -> int:
        """Return the process ``steps`` before this process in the ring, whose keys arrive after ``steps`` steps."""
        return (self.sequence.rank - steps) % self.sequence.size

    def _hand_on(
        self, shard: _Shard, own: _Shard, step: int, *, come_home: bool = False
    ) -> tuple[_Transfer, _Shard, _Shard]:
        """Send the shard of this step to the next process, if the next or a later process reads its keys.

        Args:
            shard: Keys and values, or their gradients.
            own: Shard of this process. Received shards have its dtypes and, except for the length, its shapes.
            step: Steps that the shard has travelled.
            come_home: Whether the last reader of the keys sends the shard back to its owner. True for gradients.

        Returns:
            The transfer, the shard of the next step, and the shard of this process's own keys if it returns now.
        """
        lengths, hops, rank = self.sequence.lengths, self.plan.hops, self.sequence.rank
        owner, following = self._behind(step), self._behind(step + 1)
        is_read_on = step < hops[owner]
        sent = shard if is_read_on or come_home else _Shard()
        received = own.empty(lengths[following]) if step < hops[following] else _Shard()
        returned = own.empty(lengths[rank]) if come_home and step == hops[rank] else _Shard()
        moves = (
            (dist.isend, sent, self._behind(-1) if is_read_on else owner),
            (dist.irecv, received, self._behind(1)),
            (dist.irecv, returned, self._behind(-step)),
        )
        return _Transfer(self.sequence, moves, tag=3 if come_home else 0), received, returned

    def _go_round(self, own: _Shard) -> Iterator[tuple[int, _Shard]]:
        """Yield the owner and the keys of each step, while the keys of the next step are in transfer."""
        shard = own
        for step in range(self.sequence.size):
            transfer, following, _ = self._hand_on(shard, own, step)
            yield self._behind(step), shard
            transfer.wait()
            shard = following

    # ---- computation of a piece

    def _problem(self, query: Tensor, shard: _Shard, owner: int, piece: Piece) -> Problem:
        """Return the problem of a piece from the queries and keys of that piece."""
        sequence, (key, value, *biases) = self.sequence, shard
        options: Options = {
            **self.call.options(),
            **sequence.keys_of(owner, piece, len(query)),
            "tolerance": self.tolerance,
            "query_positions": _cut_rows(sequence.positions, piece.batches, piece.rows),
            "key_bias": biases[0].squeeze(-1) if biases else None,
        }
        if self.call.logit_scale is not None:
            counts = _cut_rows(sequence.visible_keys(self.call.causal), piece.batches, piece.rows)
            # Queries without visible keys may have any scale, but SSMax refuses a count of 0.
            options["visible_keys"] = counts.clamp(min=1)
        return make_problem(query, key, value, self.call.prior, **options)

    def _solve(self, problem: Problem) -> tuple[Tensor, Tensor]:
        out, lse = solve(problem, self.call.backend, need_lse=True)
        assert lse is not None
        return out, lse.double()

    @torch.no_grad()
    def _looks_at(self, problem: Problem, lse: Tensor) -> Problem | None:
        """Prune blocks of keys whose weight is 0, or below ``tolerance``, given the queries' log-sum-exp so far.

        The weight of a block is at most ``Σ_j exp(c (‖q‖ ‖k_j‖ softmax_scale + K_ij) - lse)``, with the largest norms
        and log-prior of its queries and keys.

        Returns:
            The problem of the remaining keys, or None if no key remains.
        """
        prior, geometry, scale = problem.prior, problem.geometry, problem.row_scale
        offset = geometry.offset
        if offset is None or prior is None or any(Structure.STATIONARY not in x.structure for x in prior.terms()):
            return problem
        limit = VANISHING[problem.compute_dtype]
        if self.tolerance > 0:
            number = sum(len(pieces) for pieces in self.plan.pieces)
            limit = max(limit, math.log(self.tolerance / number))
        low, high = _extremes(prior, geometry, offset)
        if problem.key_bias is not None:
            least, most = (_by_block(problem.key_bias, end) for end in (math.inf, -math.inf))
            low, high = low + least.amin(-1).unsqueeze(-2), high + most.amax(-1).unsqueeze(-2)
        content = _by_block(problem.query.norm(dim=-1, dtype=torch.float64) * problem.softmax_scale, -math.inf).amax(-1)
        longest = _by_block(problem.key.norm(dim=-1, dtype=torch.float64), -math.inf).amax(-1)
        if scale is not None:
            scales = _by_block(scale.double(), 0.0).aminmax(dim=-1)
            content = content * torch.maximum(scales[0].abs(), scales[1].abs())
            if problem.scales_prior:
                products = torch.stack([c.unsqueeze(-1) * bound for c in scales for bound in (low, high)])
                low, high = products.amin(0), products.amax(0)
        longest = longest.repeat_interleave(geometry.heads // problem.key.shape[1], dim=1)
        bound = content.unsqueeze(-1) * longest.unsqueeze(-2) + high + math.log(geometry.num_keys)
        # Keep blocks whose bound or log-sum-exp is NaN.
        kept = ~(bound - _by_block(lse, math.inf).amin(-1, keepdim=True) <= limit)
        if not bool(kept.any()):
            return None
        # Up to two blocks, one large tile is faster.
        some = not bool(kept.all()) and geometry.num_keys > 2 * BLOCK
        return replace(problem, kept=kept if some else None)

    # ---- passes

    @torch.no_grad()
    def forward(self, query: Tensor, own: _Shard) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp in float64."""
        sequence = self.sequence
        out = query.new_zeros(*query.shape[:3], own[1].shape[3], dtype=torch.float64)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=torch.float64)
        self.computed = [[] for _ in range(sequence.size)]
        for owner, shard in self._go_round(own):
            for piece in self.plan.pieces[owner]:
                keys = _Shard(_cut_rows(x, piece.batches, piece.keys) for x in shard)
                rows, out_rows, lse_rows = (_cut_rows(x, piece.batches, piece.rows) for x in (query, out, lse))
                problem = self._problem(rows, keys, owner, piece)
                looked_at = problem if piece.own else self._looks_at(problem, lse_rows)
                if looked_at is None:
                    continue
                self.computed[owner].append((piece, looked_at.kept))
                _merge(out_rows, lse_rows, *self._solve(looked_at))
                if isinstance(piece.rows, Tensor):  # slices are views, which are updated in place
                    out[piece.batches, :, piece.rows] = out_rows
                    lse[piece.batches, :, piece.rows] = lse_rows
        return out, lse

    def backward(
        self, query: Tensor, own: _Shard, results: tuple[Tensor, ...], grads: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, of the tensors of this process's shard, and of parameters.

        Args:
            query: Queries of this process.
            own: Shard of this process.
            results: Returned output, its rounding error, and log-sum-exp.
            grads: Gradients of the output and of the log-sum-exp.
        """
        if any(now is not then for now, then in zip(self.call.parameters(), self.parameters, strict=True)):
            raise RuntimeError(
                "attend_across: parameters of prior or logit_scale were replaced between the forward and the backward "
                "pass, so gradients cannot be computed"
            )
        query_grad, own_grad = torch.zeros_like(query, dtype=compute_dtype_of(query)), own.zeros()
        parameter_grads = {p: torch.zeros_like(p, dtype=torch.float64) for p in self.parameters if p.requires_grad}
        results_and_grads = (*results, *grads)
        transfer, coming, returned = _Transfer(self.sequence, [], tag=0), _Shard(), _Shard()
        for step, (owner, shard) in enumerate(self._go_round(own)):
            gradients = shard.zeros() if step > 0 else own_grad
            given, into = (query, *shard), (query_grad, *gradients)
            for piece, kept in self.computed[owner]:
                self._differentiate(given, owner, piece, kept, results_and_grads, into, parameter_grads)
            if step > 0 and self.keys_have_gradients:
                transfer.wait()
                gradients.add(coming)
                own_grad.add(returned)
                transfer, coming, returned = self._hand_on(gradients, own_grad, step, come_home=True)
        transfer.wait()
        own_grad.add(returned)
        return query_grad, *own_grad, *map(parameter_grads.get, self.parameters)

    def _differentiate(
        self,
        given: tuple[Tensor, ...],
        owner: int,
        piece: Piece,
        kept: Tensor | None,
        results_and_grads: tuple[Tensor, ...],
        into: tuple[Tensor, ...],
        parameter_grads: dict[nn.Parameter, Tensor],
    ) -> None:
        """Add the gradients of a piece.

        With shares ``w = exp(lse_piece - lse)``, ``out = Σ w out_piece`` over the pieces. So the gradient of
        ``out_piece`` is ``w dout``, and the gradient of ``lse_piece`` is ``w (<dout, out_piece - out> + dlse)``.

        Args:
            given: Queries of this process and tensors of the owner's shard.
            owner: Process that owns the keys.
            piece: Queries and keys of the piece.
            kept: Blocks that the forward pass kept.
            results_and_grads: ``results`` and ``grads`` of :meth:`backward`, concatenated.
            into: Gradients of ``given``. They are updated in place.
            parameter_grads: Gradients of the trained parameters. They are updated in place.
        """
        places = (piece.rows, *(piece.keys for _ in given[1:]))
        with torch.enable_grad():
            leaves = [
                _cut_rows(x, piece.batches, where).detach().requires_grad_()
                for x, where in zip(given, places, strict=True)
            ]
            problem = self._problem(leaves[0], _Shard(leaves[1:]), owner, piece)
            part_out, part_lse = self._solve(replace(problem, kept=kept))
        out, rest, lse, out_grad, lse_grad = (_cut_rows(x, piece.batches, piece.rows) for x in results_and_grads)
        # A query without visible keys in the piece has share 0.
        share = (part_lse.detach() - lse).exp().masked_fill(torch.isneginf(part_lse), 0.0)
        gain = _gain(out_grad, part_out.detach(), out, rest)
        cotangents = (
            (out_grad.to(lse_grad.dtype) * share.to(lse_grad.dtype).unsqueeze(-1)).to(part_out.dtype),
            share * (gain + lse_grad),
        )
        found = torch.autograd.grad(
            (part_out, part_lse), [*leaves, *parameter_grads], cotangents, allow_unused=True, materialize_grads=True
        )
        for whole, where, grad in zip(into, places, found[: len(into)], strict=True):
            whole[piece.batches, :, where] += grad
        for whole, grad in zip(parameter_grads.values(), found[len(into) :], strict=True):
            whole += grad


def _extremes(prior: Prior, geometry: Geometry, offset: int) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest log-prior of each pair of query and key blocks, ``(H, ⌈Lq / B⌉, ⌈Lk / B⌉)``."""
    queries, keys = (-(-number // BLOCK) for number in (geometry.num_queries, geometry.num_keys))
    # Distances between tokens of two blocks differ from the distance of their first tokens by less than a block.
    lowest = offset - BLOCK * (keys - 1) - (BLOCK - 1)
    distances = torch.arange(lowest, lowest + BLOCK * (queries + keys) - 1, device=geometry.device)
    # Partly filled last blocks have no tokens at the outermost distances.
    distances = distances.clamp(offset - (geometry.num_keys - 1), geometry.num_queries - 1 + offset)
    low, high = prior.log_prior_at(distances, torch.float64).unfold(1, 2 * BLOCK - 1, BLOCK).aminmax(dim=-1)
    blocks = torch.arange(max(queries, keys), device=geometry.device)
    apart = blocks[:queries].unsqueeze(1) - blocks[:keys] + keys - 1
    return low[:, apart], high[:, apart]


def _by_block(numbers: Tensor, padding: float) -> Tensor:
    """Split ``(..., L)`` into padded blocks, ``(..., ⌈L / B⌉, B)``."""
    return nn.functional.pad(numbers, (0, -numbers.shape[-1] % BLOCK), value=padding).unflatten(-1, (-1, BLOCK))


def _cut_rows(tensor: Tensor, batches: slice, rows: slice | Tensor) -> Tensor:
    """Select examples and rows of ``(B, H, L, ...)``, ``(1 or B, 1, L)`` or ``(1 or B, L)``."""
    part = tensor[batches] if len(tensor) > 1 else tensor
    return part[:, rows] if tensor.dim() == 2 else part[:, :, rows]


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the result over further keys in place, with the sums of exponentials as weights of the outputs."""
    # If neither result has visible keys, the difference is nan, and both outputs are 0.
    weight = torch.sigmoid((part_lse - lse).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
    out.lerp_(part.double(), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def _gain(out_grad: Tensor, part: Tensor, out: Tensor, rest: Tensor) -> Tensor:
    """Return ``<dout, out_piece - out>`` in float64, computed in chunks of rows to save memory."""
    blocks = zip(*(x.split(GAIN_ROWS, dim=2) for x in (out_grad, part, out, rest)), strict=True)
    return torch.cat([torch.linalg.vecdot(g.double(), p.double() - o - r) for g, p, o, r in blocks], dim=2)


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, query: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        """Run the ring; ``given`` has the tensors of this process's :class:`_Shard`, then the ring's parameters."""
        ctx.ring, ctx.number = ring, len(given) - len(ring.parameters)
        whole, lse = ring.forward(query, _Shard(x.contiguous() for x in given[: ctx.number]))
        out = whole.to(query.dtype)
        # The gradients of the pieces' log-sum-exps cancel in each row. A prior with a slope multiplies their rounding
        # error by the position, so the output that is subtracted in them must not be rounded.
        rest = (whole - out).to(compute_dtype_of(query))
        ctx.save_for_backward(out, rest, lse, query, *given)
        return out, lse.to(compute_dtype_of(query))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        out, rest, lse, query, *given = ctx.saved_tensors
        own = _Shard(x.contiguous() for x in given[: ctx.number])
        with torch.autocast(query.device.type, enabled=False):
            found = ctx.ring.backward(query, own, (out, rest, lse), grads)
        inputs = (query, *given)
        return None, *(None if grad is None else grad.to(x.dtype) for grad, x in zip(found, inputs, strict=True))
