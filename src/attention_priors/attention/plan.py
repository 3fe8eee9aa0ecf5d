"""Dispatch: which engine computes a problem, and why. No other module chooses an engine.

A plan is static and holds no tensors. It depends on shapes, dtypes, devices, the arguments that are passed, and the
kinds of the prior's terms. Numbers that are too large for float32 depend on values: each engine handles them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from attention_priors.attention.problem import Problem
from attention_priors.attention.pruning.certificate import why_not_prune
from attention_priors.attention.selftest import CHECKED, Variant, fault
from attention_priors.attention.triton.backend import why_not as why_not_triton
from attention_priors.precision import can_be_read
from attention_priors.priors import Prior, Structure

Backend = Literal["auto", "reference", "blockwise", "lanes", "toeplitz", "flex", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "blockwise", "lanes", "toeplitz", "flex", "triton")
PRUNING: tuple[Backend, ...] = ("triton", "toeplitz")
"""Engines that prune."""
KEYS_PER_QUERY = 64
"""Keys per query from which a table is faster than lanes."""


class Plan(NamedTuple):
    """Engine of a problem, and how each term of the prior reaches the engine. Terms are indices into the sum."""

    engine: Backend
    why: str
    """Reason for this engine."""
    table: tuple[int, ...]
    """Stationary terms: one number per distance and head."""
    keys: tuple[int, ...]
    """Terms that depend only on the key: one number per key and head."""
    lanes: tuple[int, ...]
    """Factored terms: extra columns of queries and keys."""
    scaled: tuple[int, ...]
    """Terms of a scaled distance: a ReLU network."""
    unpruned: str | None
    """Reason why no key is pruned; None if keys are pruned."""

    def parts(self, problem: Problem) -> tuple[list[Prior], list[Prior], list[Prior], list[Prior]]:
        """Return the terms in the table, of the key alone, in lanes, and of a scaled distance."""
        term = problem.terms.__getitem__
        return [*map(term, self.table)], [*map(term, self.keys)], [*map(term, self.lanes)], [*map(term, self.scaled)]


def make_plan(problem: Problem, backend: Backend, *, need_lse: bool) -> Plan:
    """Choose the engine and the form of each term of the prior.

    Args:
        problem: checked problem.
        backend: name of the engine, or ``auto``.
        need_lse: whether the caller needs the log-sum-exp.

    Raises:
        ValueError: the requested engine cannot compute the problem. The message gives the reason.
    """
    if backend == "auto":
        engine, why = _choose(problem, need_lse)
    else:
        engine, why = backend, "requested by name"
        reason = why_not(problem, backend, need_lse=need_lse)
        if reason is not None:
            raise ValueError(f"backend={backend!r} cannot compute this: {reason}")
    # The order matters: comparing a symbolic size would fix it.
    if engine != "reference" and problem.query.shape[0] == 0:
        engine, why = "reference", "the batch is empty"
    # Positions with gaps may have one distance per pair.
    no_table = engine == "toeplitz" and problem.geometry.has_given_positions
    no_table = no_table and all(term.structure & (Structure.FACTORED | Structure.OF_KEYS) for term in problem.terms)
    places: tuple[list[int], ...] = [], [], [], []
    for index, term in enumerate(problem.terms):
        if Structure.STATIONARY in term.structure and engine != "lanes" and not no_table:
            places[0].append(index)
        elif Structure.OF_KEYS in term.structure:
            places[1].append(index)
        else:
            places[2 if Structure.FACTORED in term.structure else 3].append(index)
    unpruned = _why_unpruned(problem, engine, lanes=places[2], scaled=places[3])
    table, keys, lanes, scaled = map(tuple, places)
    return Plan(engine, why, table, keys, lanes, scaled, unpruned)


def why_not(problem: Problem, backend: Backend, *, need_lse: bool) -> str | None:
    """Return why an engine cannot compute a problem; None if it can."""
    if backend in ("reference", "blockwise"):
        return None
    if torch.compiler.is_exporting() and backend != "lanes":
        return (
            "an exported program may contain only PyTorch's own operators, and this backend needs others; leave "
            "backend out, or use 'reference'"
        )
    if backend == "triton":
        reason, device = why_not_triton(problem), problem.query.device
        return fault(device, *Variant.of(problem)) if reason is None and device.type in CHECKED else reason
    if needs_autograd(problem):
        return "it does not support relative, dropout_p or a gradient of attn_mask; use backend='auto'"
    if backend == "lanes":
        reason = _why_not_lanes(problem, need_lse)
        return reason if reason is None else f"{reason}; use backend='toeplitz'"
    return _why_not_toeplitz(problem) if backend == "toeplitz" else _why_not_flex(problem, need_lse)


def _why_unpruned(
    problem: Problem, engine: Backend, lanes: Sequence[int] = (), scaled: Sequence[int] = ()
) -> str | None:
    """Return why an engine prunes no key; None if it prunes. ``lanes`` and ``scaled`` are as in :class:`Plan`."""
    # Keys without weight are skipped only if reading values costs no waiting.
    exact = problem.tolerance == 0
    if exact and not can_be_read(problem.query):
        return "tolerance is 0"
    if engine not in PRUNING:
        return f"only {' and '.join(PRUNING)} prune"
    if scaled:
        return "there is no bound for a network of a scaled distance"
    return why_not_prune(problem.geometry, bounded=problem.key_bounds is not None and not lanes, exact=exact)


def needs_autograd(problem: Problem) -> bool:
    """Return whether only the dense formula computes the problem and all of its gradients."""
    mask = problem.geometry.attn_mask
    return problem.relative is not None or problem.dropout_p > 0 or (mask is not None and mask.requires_grad)


def _why_not_lanes(problem: Problem, need_lse: bool) -> str | None:
    if not all(Structure.FACTORED in term.structure for term in problem.terms):
        return "not all of the prior is factored"
    if need_lse or problem.key_bias is not None or not problem.geometry.is_plain:
        return (
            "it is one call of PyTorch's attention, without documents, padding, masks, positions, key_bias or "
            "log-sum-exp (return_lse, null_logit)"
        )
    return None


def _why_not_toeplitz(problem: Problem) -> str | None:
    scaled = _scaled(problem)
    return None if len(scaled) < 2 else f"it supports one network of a scaled distance, got {', '.join(scaled)}"


def _scaled(problem: Problem) -> list[str]:
    """Return the names of the terms of a scaled distance."""
    return [term.name for term in problem.terms if Structure.SCALED_DISTANCE in term.structure]


def _choose(problem: Problem, need_lse: bool) -> tuple[Backend, str]:
    if torch.compiler.is_exporting():
        return "reference", "an exported program runs without this package, and the dense formula needs only PyTorch"
    if needs_autograd(problem):
        return "blockwise", "only the dense formula supports relative, dropout_p and an attn_mask with a gradient"
    if problem.query.is_cuda and why_not(problem, "triton", need_lse=need_lse) is None:
        return "triton", "the fused kernels support the whole problem"
    reason = _why_not_lanes(problem, need_lse)
    if reason is not None:
        no_tiles = _why_not_toeplitz(problem)
        return ("toeplitz", reason) if no_tiles is None else ("blockwise", f"toeplitz cannot compute this: {no_tiles}")
    if not problem.terms:
        return "lanes", "without a prior that changes a logit, one call of PyTorch's attention is enough"
    if KEYS_PER_QUERY * problem.geometry.num_queries <= problem.geometry.num_keys:
        return "toeplitz", "with few queries, adding lanes to every key would be most of the work"
    if all(Structure.STATIONARY in term.structure for term in problem.terms):
        if problem.query.dtype in (torch.float16, torch.bfloat16):
            return "toeplitz", "lanes need float32, and a table allows products in half precision"
        if problem.tolerance > 0 and _why_unpruned(problem, "toeplitz") is None:
            return "toeplitz", "pruning has tighter bounds for a table than for lanes"
    return "lanes", "all of the prior is factored"


def _why_not_flex(problem: Problem, need_lse: bool) -> str | None:
    """Return why FlexAttention would fail, or compute something else; None if it would not."""
    query = problem.query
    if scaled := _scaled(problem):
        return f"it does not support the network of {scaled[0]}; use backend='toeplitz'"
    if query.dtype == torch.float64:
        return "it computes in float32, but query is float64; use backend='toeplitz'"
    if problem.key_bias is not None and problem.geometry.has_given_positions:
        return "it does not support key_bias with query_positions or key_positions; use backend='toeplitz'"
    if query.device.type != "cpu":
        return None
    tensors = {"query": query, "key": problem.key, "value": problem.value, "key_bias": problem.key_bias}
    tensors["logit_scale"] = problem.row_scale
    if problem.prior is not None:
        tensors |= {f"prior.{name}": parameter for name, parameter in problem.prior.named_parameters()}
    learned = [name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad]
    if torch.is_grad_enabled() and learned:
        return (
            f"on CPUs FlexAttention has no backward pass, but {', '.join(learned)} require gradients; use "
            "backend='toeplitz', or torch.no_grad()"
        )
    if need_lse:
        return "on CPUs FlexAttention does not return the log-sum-exp (return_lse, null_logit); use backend='toeplitz'"
    return None
