"""Attention over a sequence whose tokens are spread over the processes of a group.

Keys and values travel around a ring of processes; each process attends with its own queries to one shard of keys at a
time and merges the results by their log-sum-exps. The backward pass is another ring: each process computes the results
of a shard anew, finds its share of the gradients, and hands those of keys and values on beside them. So a process
holds a few shards at any time, and never the whole sequence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from attention_priors.attention.attend import BACKENDS, Backend, as_autocast_has_it, solve
from attention_priors.attention.distributed.shards import Piece, Plan, ShardedSequence
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.logit_scale import SSMax
from attention_priors.attention.null_key import NullKey, apply_null, checked_null_logit
from attention_priors.attention.plan import make_plan
from attention_priors.attention.problem import Options, Problem, make_problem
from attention_priors.attention.pruning.bounds import BLOCK
from attention_priors.attention.pruning.certificate import may_prune
from attention_priors.precision import compute_dtype_of
from attention_priors.priors import Prior, Structure
from attention_priors.priors.base import check_over_line

KEYS_HAVE_GRADIENTS = "whether key or value needs a gradient"
VANISHING = {torch.float32: -104.0, torch.float64: -746.0}
"""Nats below which an exponential is 0: such keys add nothing at all."""
GAIN_ROWS = 512
"""Queries whose outputs are in memory in float64 at a time, in the backward pass."""


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
    """:func:`attend` over the whole of a sequence, of which each process of a group holds some tokens.

    Every process calls it at the same time with its own tokens and gets their outputs, which are those that
    :func:`attend` gives for the whole; so are the gradients of ``query``, ``key`` and ``value``, if every process
    also runs the backward pass. **Parameters of prior and logit scale** are taken to be the same in every process. Each
    gets the gradient of its own queries' rows alone: what the whole has is the *sum* over the processes, as for any
    other parameter that a token passes through. (DistributedDataParallel and FSDP take means: multiply the
    loss by the number of processes.)

    Shards that no query of a process may see, because they lie in the future, in other documents or outside of a
    :class:`Window`, are not computed, and are not sent on where no process needs them any more. So are keys so far
    away that their weights are 0 in float32, by a bound over norms and log-priors.

    The backward pass computes the forward pass of each shard once more, and has no derivative itself. Two runs agree
    bit for bit. Dense masks, dropout and Shaw's vectors have no place here; use :func:`attend`.

    Args:
        query: ``(B, H, L_r, D)``: this process's tokens, in the order of ``sequence``.
        key: ``(B, Hkv, L_r, D)``.
        value: ``(B, Hkv, L_r, Dv)``.
        prior: a log-prior over positions, or None for the uniform one.
        sequence: where all tokens stand; documents and padding are its.
        causal: whether a query sees only keys at positions up to its own.
        logit_scale: :class:`SSMax`, which counts the visible keys of the whole sequence, or None.
        softmax_scale: of the content; ``1/sqrt(D)`` by default.
        return_lse: also return the log-sum-exp of each query's logits, over all keys. Gradients flow through it.
        tolerance: as for :func:`attend`: which share of its weight a query may lose, over all shards together.
        key_bias: as for :func:`attend`, ``(B, H or Hkv, L_r)``: of this process's keys.
        null_logit: as for :func:`attend`; its gradient is that of this process's queries.
        backend: as for :func:`attend`.

    Returns:
        Output ``(B, H, L_r, Dv)`` in the query's dtype; with ``return_lse`` also ``(B, H, L_r)`` in float32 (float64
        for float64 queries). A query that may see no key gets zeros, and ``-inf``.

    Raises:
        ValueError: in every process, if the arguments of one of them are impossible or do not fit the others'.
        RuntimeError: if another process does not answer.
    """
    compute: Any = _attend_across
    if torch.compiler.is_compiling():
        # Not as a decorator: that would import the compiler for everyone.
        compute = torch.compiler.disable(compute)
    call = _Call(sequence, prior, causal, logit_scale, softmax_scale, tolerance, backend)
    out, lse = compute(call, query, key, value, key_bias, null_logit)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Call:
    """Arguments that are the same in every process."""

    sequence: ShardedSequence
    prior: Prior | None
    causal: bool
    logit_scale: SSMax | None
    softmax_scale: float | None
    tolerance: float
    backend: Backend

    def parameters(self) -> list[nn.Parameter]:
        """Of prior and logit scale."""
        return [p for part in (self.prior, self.logit_scale) if part is not None for p in part.parameters()]

    def options(self) -> Options:
        """For :func:`make_problem`, which is not told of the logit scale: it would count the keys of one shard."""
        return {"causal": self.causal, "softmax_scale": self.softmax_scale, "tolerance": self.tolerance}


def _attend_across(
    call: _Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor | None,
    null_logit: NullKey | Tensor | None,
) -> tuple[Tensor, Tensor]:
    query, key, value = as_autocast_has_it(query, key, value)
    sequence, prior, logit_scale, parameters = call.sequence, call.prior, call.logit_scale, call.parameters()
    of_keys = (key, value) if key_bias is None else (key, value, key_bias)

    def check() -> tuple[dict[str, Any], str]:
        if call.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {call.backend!r}")
        problem = _check(call, query, key, value, key_bias)
        if null_logit is not None:
            checked_null_logit(null_logit, tuple(query.shape[:3]), query.device)
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query, *of_keys, *parameters))
        return {
            "query's batch, heads and head_dim": (*query.shape[:2], query.shape[3]),
            "key's heads": key.shape[1],
            "value's head_dim": value.shape[3],
            "dtype": str(query.dtype),
            "prior": None if prior is None else json.dumps(prior.to_config(), sort_keys=True),
            "logit_scale": None if logit_scale is None else json.dumps(logit_scale.to_config(), sort_keys=True),
            **call.options(),
            "whether there is a backward pass": trained,
            "key_bias": None if key_bias is None else (str(key_bias.dtype), key_bias.shape[1]),
            KEYS_HAVE_GRADIENTS: trained and any(x.requires_grad for x in of_keys),
        }, make_plan(problem, call.backend, need_lse=True).engine

    agreed, engines = zip(*sequence.exchange("attend_across", check), strict=True)
    _check_same(agreed)
    if len({*engines}) > 1:
        # Kernels are wrong on one of the devices, or there are none: all compute alike.
        call = replace(call, backend="toeplitz")
    reach = None if prior is None else _reach(prior, sequence.length, query.device)
    keys_have_gradients = agreed[0][KEYS_HAVE_GRADIENTS]
    ring = _Ring(call, sequence.plan(call.causal, reach), keys_have_gradients)
    out, lse = _Across.apply(ring, query, key, value, key_bias, *ring.parameters)  # pyright: ignore[reportGeneralTypeIssues]
    return (out if null_logit is None else apply_null(out, lse, null_logit)), lse


def _check(call: _Call, query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> Problem:
    sequence, prior, logit_scale = call.sequence, call.prior, call.logit_scale
    if isinstance(prior, Prior):
        check_over_line(prior)
    options: Options = {**call.options(), "key_bias": key_bias}
    problem = make_problem(query, key, value, prior, **options)
    length = sequence.lengths[sequence.rank]
    if query.shape[2] != length or key.shape[2] != length:
        raise ValueError(
            f"query and key must hold the {length} tokens that sequence says are this process's, got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    if sequence.batch not in (1, len(query)):
        raise ValueError(f"sequence is a batch of {sequence.batch}, but query has shape {tuple(query.shape)}")
    if logit_scale is not None and logit_scale.num_heads != query.shape[1]:
        raise ValueError(f"logit_scale has num_heads={logit_scale.num_heads}, but query has {query.shape[1]} heads")
    return problem


def _check_same(every: Sequence[Any]) -> None:
    for name, first in every[0].items():
        for rank, found in enumerate(every):
            if found[name] != first:
                raise ValueError(
                    f"attend_across: {name} must be the same in all processes of the group, got {first!r} in process 0 "
                    f"and {found[name]!r} in process {rank}"
                )


def _reach(prior: Prior, length: int, device: torch.device) -> tuple[int, int] | None:
    """The smallest and the largest distance that the prior lets a query see; None if all."""
    distances = torch.arange(1 - length, length, device=device)
    visible = prior.visible_at(distances)
    if visible is None:
        return None
    seen = distances[visible]
    return (int(seen[0]), int(seen[-1])) if len(seen) else (length, -length)


# ---- keys on their way


class _Shard(tuple[Tensor, ...]):
    """Keys, values and maybe biases ``(B, H or Hkv, L, 1)`` of one process, or their gradients."""

    __slots__ = ()

    @classmethod
    def of(cls, key: Tensor, value: Tensor, key_bias: Tensor | None) -> _Shard:
        """Those of this process."""
        given = (key, value) if key_bias is None else (key, value, key_bias.unsqueeze(-1))
        return cls(x.contiguous() for x in given)

    @property
    def bias(self) -> Tensor | None:
        """``(B, H or Hkv, L)``."""
        return self[2].squeeze(-1) if len(self) > 2 else None

    def empty(self, length: int) -> _Shard:
        """Room for as many of another process."""
        return _Shard(x.new_empty(*x.shape[:2], length, x.shape[3]) for x in self)

    def zeros(self) -> _Shard:
        """Gradients to add to."""
        return _Shard(torch.zeros_like(x, dtype=compute_dtype_of(x)) for x in self)

    def add(self, other: _Shard) -> None:
        """In place."""
        for mine, theirs in zip(self, other, strict=True):
            mine += theirs


class _Computed(NamedTuple):
    """A piece, and what of it the forward pass looked at: see :class:`Problem`."""

    piece: Piece
    kept: Tensor | None


class _Transfer:
    """What is being sent and received. Its memory stays in use until all of it is done."""

    def __init__(
        self,
        sequence: ShardedSequence,
        sends: Sequence[tuple[_Shard, int]],
        receives: Sequence[tuple[_Shard, int]],
        tag: int,
    ) -> None:
        self._sequence = sequence
        group = sequence.group
        self._operations = [
            dist.P2POp(
                operation, tensor, rank if group is None else dist.get_global_rank(group, rank), group, tag + part
            )
            for operation, batch in ((dist.isend, sends), (dist.irecv, receives))
            for shard, rank in batch
            for part, tensor in enumerate(shard)
        ]
        self._works = dist.batch_isend_irecv(self._operations) if self._operations else []

    def wait(self) -> None:
        """Until all is there, and what was sent may be written to."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as failed:
            sequence = self._sequence
            raise RuntimeError(
                f"attend_across: process {sequence.rank} of {sequence.size} waited for another one's keys in vain; "
                "one of them has stopped, or does not run the backward pass"
            ) from failed
        self._operations, self._works = [], []


class _Ring:
    """One call: what is computed, and how keys go round. Process ``r`` hands on to process ``r + 1``."""

    def __init__(self, call: _Call, plan: Plan, keys_have_gradients: bool) -> None:
        self.call, self.sequence, self.plan, self.keys_have_gradients = call, call.sequence, plan, keys_have_gradients
        # One half for keys that are left out of a piece, one for pieces that are left out.
        self.tolerance = call.tolerance / 2
        self.parameters = call.parameters()
        self.computed: list[list[_Computed]] = []
        """What the forward pass did not leave out, by owner."""

    # ---- who has what

    def _owner(self, step: int) -> int:
        """Whose keys this process has after so many steps."""
        return (self.sequence.rank - step) % self.sequence.size

    def _travels(self, owner: int, hop: int) -> bool:
        return hop <= self.plan.hops[owner]

    def _hand_on(self, shard: _Shard | None, own: _Shard, step: int) -> tuple[_Transfer, _Shard | None]:
        """Send the keys of this step to the next process, if that or a later one reads them, and get the next ones."""
        sequence, following = self.sequence, self._owner(step + 1)
        sends, receives, received = [], [], None
        if step + 1 < sequence.size and self._travels(self._owner(step), step + 1):
            assert shard is not None
            sends.append((shard, (sequence.rank + 1) % sequence.size))
        if step + 1 < sequence.size and self._travels(following, step + 1):
            received = own.empty(sequence.lengths[following])
            receives.append((received, (sequence.rank - 1) % sequence.size))
        return _Transfer(sequence, sends, receives, tag=0), received

    def _hand_gradients_on(
        self, gradients: _Shard | None, own_grad: _Shard, step: int
    ) -> tuple[_Transfer, _Shard | None, _Shard | None]:
        """Send gradients of the keys of this step to the next process that reads those, after the last one home.

        Returns:
            The transfer; what comes along with the keys of the next step; what comes home.
        """
        sequence, owner, following = self.sequence, self._owner(step), self._owner(step + 1)
        sends, receives, received, home = [], [], None, None
        if gradients is not None:
            sends.append((gradients, (sequence.rank + 1) % sequence.size if self._travels(owner, step + 1) else owner))
        if step + 1 < sequence.size and self._travels(following, step + 1):
            received = own_grad.empty(sequence.lengths[following])
            receives.append((received, (sequence.rank - 1) % sequence.size))
        if self.plan.hops[sequence.rank] == step:
            home = own_grad.empty(sequence.lengths[sequence.rank])
            receives.append((home, (sequence.rank + step) % sequence.size))
        return _Transfer(sequence, sends, receives, tag=3), received, home

    # ---- one piece

    def _problem(self, query: Tensor, shard: _Shard, owner: int, piece: Piece) -> Problem:
        """Attention of this process's queries over some keys, as far as they are in a piece."""
        sequence, batches, batch = self.sequence, piece.batches, len(query)
        documents = sequence.documents_of(piece) if piece.own else None
        padding = sequence.padding_of(owner, piece)
        options: Options = {
            **self.call.options(),
            "tolerance": self.tolerance,
            "query_positions": _cut_rows(sequence.positions, batches, piece.rows),
            "key_positions": sequence.positions_of(owner, piece),
            # The sequence may be on another device: shard_index() makes an index on the CPU.
            "document_ids": None if documents is None else documents.to(query.device).expand(batch, -1),
            "key_padding_mask": None if padding is None else padding.to(query.device).expand(batch, -1),
            "key_bias": shard.bias,
        }
        problem = make_problem(query, shard[0], shard[1], self.call.prior, **options)
        logit_scale = self.call.logit_scale
        if logit_scale is None:
            return problem
        counts = _cut_rows(sequence.visible_keys(self.call.causal), batches, piece.rows).expand(batch, -1, -1)
        row_scale = logit_scale(counts.to(query.device), problem.compute_dtype)
        return replace(problem, row_scale=row_scale, scales_prior=logit_scale.include_prior)

    def _solve(self, problem: Problem) -> tuple[Tensor, Tensor]:
        out, lse = solve(problem, self.call.backend, need_lse=True)
        assert lse is not None
        return out, lse.double()

    @torch.no_grad()
    def _looks_at(self, problem: Problem, lse: Tensor) -> Problem | None:
        """The problem without keys that add nothing, or less than ``tolerance``, to queries with this log-sum-exp.

        A block of keys weighs at most ``Σ_j exp(c (‖q‖ ‖k_j‖ softmax_scale + K_ij) - lse)``, with the largest norms and
        log-prior of its queries and keys.

        Returns:
            None if nothing is left.
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
            scales = [_by_block(scale.double(), 0.0).amin(-1), _by_block(scale.double(), 0.0).amax(-1)]
            content = content * torch.maximum(scales[0].abs(), scales[1].abs())
            if problem.scales_prior:
                products = torch.stack([c.unsqueeze(-1) * bound for c in scales for bound in (low, high)])
                low, high = products.amin(0), products.amax(0)
        longest = longest.repeat_interleave(geometry.heads // problem.key.shape[1], dim=1)
        bound = content.unsqueeze(-1) * longest.unsqueeze(-2) + high + math.log(geometry.num_keys)
        # A bound or a log-sum-exp that is NaN rules nothing out.
        kept = ~(bound - _by_block(lse, math.inf).amin(-1, keepdim=True) <= limit)
        if not bool(kept.any()):
            return None
        some = not bool(kept.all()) and may_prune(geometry)
        return replace(problem, kept=kept if some else None)

    # ---- passes

    @torch.no_grad()
    def forward(self, query: Tensor, own: _Shard) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, in float64."""
        sequence = self.sequence
        out = query.new_zeros(*query.shape[:3], own[1].shape[3], dtype=torch.float64)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=torch.float64)
        self.computed = [[] for _ in range(sequence.size)]
        shard: _Shard | None = own
        for step in range(sequence.size):
            owner = self._owner(step)
            transfer, received = self._hand_on(shard, own, step)
            for piece in self.plan.pieces[owner]:
                assert shard is not None
                keys = _Shard(_cut_rows(x, piece.batches, piece.keys) for x in shard)
                before = _cut_rows(lse, piece.batches, piece.rows)
                problem = self._problem(_cut_rows(query, piece.batches, piece.rows), keys, owner, piece)
                looked_at = problem if piece.own else self._looks_at(problem, before)
                if looked_at is None:
                    continue
                problem = looked_at
                self.computed[owner].append(_Computed(piece, problem.kept))
                into = _cut_rows(out, piece.batches, piece.rows), before
                _merge(into, self._solve(problem))
                if isinstance(piece.rows, Tensor):  # else they are views
                    for whole, part in zip((out, lse), into, strict=True):
                        whole[piece.batches, :, piece.rows] = part
            transfer.wait()
            shard = received
        return out, lse

    def backward(
        self,
        query: Tensor,
        own: _Shard,
        saved: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, _Shard, list[Tensor | None]]:
        """Gradients of queries, of keys and what belongs to them, and of parameters.

        Args:
            query: and
            own: as for :meth:`forward`.
            saved: the output as it was returned, what rounding took from it, and the log-sum-exp.
            grads: the gradients of output and log-sum-exp.
        """
        if any(now is not then for now, then in zip(self.call.parameters(), self.parameters, strict=True)):
            raise RuntimeError(
                "attend_across: the parameters of prior or logit_scale were replaced between the forward and the "
                "backward pass; so its gradients cannot be computed"
            )
        sequence = self.sequence
        query_grad, own_grad = torch.zeros_like(query, dtype=compute_dtype_of(query)), own.zeros()
        parameter_grads: list[Tensor | None] = [
            torch.zeros_like(p, dtype=torch.float64) if p.requires_grad else None for p in self.parameters
        ]
        shard: _Shard | None = own
        coming: tuple[_Transfer, _Shard | None] | None = None
        homes: list[tuple[_Transfer, _Shard]] = []
        for step in range(sequence.size):
            owner = self._owner(step)
            transfer, received = self._hand_on(shard, own, step)
            gradients = own_grad
            if step > 0:
                gradients = None if shard is None else shard.zeros()
            for computed in self.computed[owner]:
                assert shard is not None
                assert gradients is not None
                self._differentiate(query, shard, owner, computed, saved, grads, query_grad, gradients, parameter_grads)
            if step > 0 and self.keys_have_gradients:
                if coming is not None:
                    coming[0].wait()
                    if coming[1] is not None:
                        assert gradients is not None
                        gradients.add(coming[1])
                on_its_way, next_ones, home = self._hand_gradients_on(gradients, own_grad, step)
                coming = on_its_way, next_ones
                if home is not None:
                    homes.append((on_its_way, home))
            transfer.wait()
            shard = received
        if coming is not None:
            coming[0].wait()
        for on_its_way, home in homes:
            on_its_way.wait()
            own_grad.add(home)
        return query_grad, own_grad, parameter_grads

    def _differentiate(
        self,
        query: Tensor,
        shard: _Shard,
        owner: int,
        computed: _Computed,
        saved: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        query_grad: Tensor,
        gradients: _Shard,
        parameter_grads: list[Tensor | None],
    ) -> None:
        """Add a piece's part of all gradients.

        With shares ``w = exp(lse_piece - lse)``, ``out = Σ w out_piece`` over the pieces. So the gradient of
        ``out_piece`` is ``w dout``, and that of ``lse_piece`` is ``w (<dout, out_piece - out> + dlse)``.
        """
        piece = computed.piece
        batches, rows, keys = piece.batches, piece.rows, piece.keys
        with torch.enable_grad():
            leaf, *of_keys = (
                _cut_rows(x, batches, which).detach().requires_grad_()
                for x, which in ((query, rows), *((x, keys) for x in shard))
            )
            problem = self._problem(leaf, _Shard(of_keys), owner, piece)
            part_out, part_lse = self._solve(replace(problem, kept=computed.kept))
        out, rest, lse, out_grad, lse_grad = (_cut_rows(x, batches, rows) for x in (*saved, *grads))
        # Where a query sees no key of the piece, or none at all, it has no share.
        share = (part_lse.detach() - lse).exp().masked_fill(torch.isneginf(part_lse), 0.0)
        gain = _gain(out_grad, part_out.detach(), out, rest)
        cotangents = (
            (out_grad.to(lse_grad.dtype) * share.to(lse_grad.dtype).unsqueeze(-1)).to(part_out.dtype),
            share * (gain + lse_grad),
        )
        trained = [p for p in self.parameters if p.requires_grad]
        leaves = [leaf, *of_keys, *trained]
        found = torch.autograd.grad((part_out, part_lse), leaves, cotangents, allow_unused=True)
        number = 1 + len(of_keys)
        for whole, which, grad in zip(
            (query_grad, *gradients), (rows, *(keys for _ in of_keys)), found[:number], strict=True
        ):
            if grad is not None:
                whole[batches, :, which] += grad.to(whole.dtype)
        for whole, grad in zip((g for g in parameter_grads if g is not None), found[number:], strict=True):
            if grad is not None:
                whole += grad


def _extremes(prior: Prior, geometry: Geometry, offset: int) -> tuple[Tensor, Tensor]:
    """The lowest and the highest log-prior between each block of queries and of keys, ``(H, ⌈Lq / B⌉, ⌈Lk / B⌉)``."""
    queries, keys = (-(-number // BLOCK) for number in (geometry.num_queries, geometry.num_keys))
    # Blocks lie as far apart as their first tokens, give or take a block.
    lowest = offset - BLOCK * (keys - 1) - (BLOCK - 1)
    distances = torch.arange(lowest, lowest + BLOCK * (queries + keys) - 1, device=geometry.device)
    # Where the last blocks are not full, no token is at the outermost distances.
    distances = distances.clamp(offset - (geometry.num_keys - 1), geometry.num_queries - 1 + offset)
    low, high = prior.log_prior_at(distances, torch.float64).unfold(1, 2 * BLOCK - 1, BLOCK).aminmax(dim=-1)
    blocks = torch.arange(max(queries, keys), device=geometry.device)
    apart = blocks[:queries].unsqueeze(1) - blocks[:keys] + keys - 1
    return low[:, apart], high[:, apart]


def _by_block(numbers: Tensor, padding: float) -> Tensor:
    """``(..., L)`` in blocks, ``(..., ⌈L / B⌉, B)``."""
    return nn.functional.pad(numbers, (0, -numbers.shape[-1] % BLOCK), value=padding).unflatten(-1, (-1, BLOCK))


def _cut_rows(tensor: Tensor, batches: slice, rows: slice | Tensor) -> Tensor:
    """Some rows of ``(B, H, L, ...)`` or ``(1 or B, 1, L)``, or of positions ``(1 or B, L)``."""
    part = tensor[batches] if len(tensor) > 1 else tensor
    return part[:, rows] if tensor.dim() == 2 else part[:, :, rows]


def _merge(into: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> None:
    """Add keys that were not there before, in place: outputs weigh as much as their exponentials sum to."""
    (out, lse), (part, part_lse) = into, found
    # Where neither sees a key, the difference is nan, and either output is 0.
    weight = torch.sigmoid((part_lse - lse).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
    out.lerp_(part.double(), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def _gain(out_grad: Tensor, part: Tensor, out: Tensor, rest: Tensor) -> Tensor:
    """``<dout, out_piece - out>`` in float64, some rows at a time."""
    blocks = zip(*(x.split(GAIN_ROWS, dim=2) for x in (out_grad, part, out, rest)), strict=True)
    return torch.cat([torch.linalg.vecdot(g.double(), p.double() - o - r) for g, p, o, r in blocks], dim=2)


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: _Ring,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        whole, lse = ring.forward(query, _Shard.of(key, value, key_bias))
        out = whole.to(query.dtype)
        ctx.ring = ring
        # The gradients of the pieces' log-sum-exps add up to 0 in each row, and a prior with a slope multiplies what is
        # left of that by the row's position: so what is subtracted there must not be rounded.
        rest = (whole - out).to(compute_dtype_of(query))
        ctx.save_for_backward(query, key, value, key_bias, out, rest, lse, *parameters)
        return out, lse.to(compute_dtype_of(query))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, key_bias, out, rest, lse, *parameters = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            query_grad, (key_grad, value_grad, *bias_grad), of_parameters = ctx.ring.backward(
                query, _Shard.of(key, value, key_bias), (out, rest, lse), (grads[0], grads[1])
            )
        given = (query, key, value, key_bias, *parameters)
        bias = bias_grad[0].squeeze(-1) if bias_grad else None
        found = (
            None if grad is None else grad.to(x.dtype)
            for grad, x in zip((query_grad, key_grad, value_grad, bias, *of_parameters), given, strict=True)
        )
        wanted = ctx.needs_input_grad[1:]
        return None, *(grad if want else None for grad, want in zip(found, wanted, strict=True))
