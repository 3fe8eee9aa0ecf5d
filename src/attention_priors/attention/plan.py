"""How a problem is computed, and why: the one place that chooses.

A plan is static: it follows from shapes, dtypes, devices, from what is given and what kinds of terms a prior has, and
holds no tensors. What an engine does about numbers that are too large for float32 depends on values, and is its own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from attention_priors.attention.problem import Problem
from attention_priors.attention.selftest import CHECKED, Variant, fault
from attention_priors.attention.triton.backend import why_not as why_not_triton
from attention_priors.priors import Prior, Structure

Backend = Literal["auto", "reference", "blockwise", "lanes", "toeplitz", "flex", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "blockwise", "lanes", "toeplitz", "flex", "triton")
FEW_QUERIES = 64
"""Keys per query from which on a table is faster than lanes."""


class Plan(NamedTuple):
    """Which engine computes a problem, and how the terms of its prior reach it, by their places in the sum."""

    engine: Backend
    why: str
    """Why this engine."""
    table: tuple[int, ...]
    """Stationary terms, which are numbers per distance and head."""
    keys: tuple[int, ...]
    """Terms that depend on the key alone: numbers per key and head."""
    lanes: tuple[int, ...]
    """Factored terms, which are columns of queries and keys."""
    scaled: tuple[int, ...] = ()
    """Terms of a scaled distance, which are a ReLU network."""

    def parts(self, problem: Problem) -> tuple[list[Prior], list[Prior], list[Prior], list[Prior]]:
        """Return the terms in the table, those of the key alone, those in lanes, and those of a scaled distance."""
        places = (self.table, self.keys, self.lanes, self.scaled)
        table, keys, lanes, scaled = ([problem.terms[place] for place in part] for part in places)
        return table, keys, lanes, scaled


def make_plan(problem: Problem, backend: Backend, *, need_lse: bool) -> Plan:
    """Choose the engine, and where each term of the prior goes.

    Args:
        problem: what is asked.
        backend: the engine's name, or ``auto``.
        need_lse: whether the log-sum-exp is wanted.

    Raises:
        ValueError: an engine that is asked for by name does not compute this; it says why.
    """
    if backend == "auto":
        engine, why = _choose(problem, need_lse)
    else:
        engine, why = backend, "it is asked for by name"
        reason = why_not(problem, backend, need_lse=need_lse)
        if reason is not None:
            raise ValueError(f"backend={backend!r} cannot compute this: {reason}")
    # Where sizes are symbols, to compare one is to fix it.
    if engine != "reference" and problem.query.shape[0] == 0:
        engine, why = "reference", "there are no texts"
    # Positions with gaps may have as many distances as there are pairs.
    no_table = engine == "toeplitz" and problem.geometry.has_given_positions
    no_table = no_table and all(term.structure & (Structure.FACTORED | Structure.OF_KEYS) for term in problem.terms)
    places: tuple[list[int], ...] = [], [], [], []
    for index, term in enumerate(problem.terms):
        in_table = Structure.STATIONARY in term.structure and engine != "lanes" and not no_table
        kinds = (in_table, Structure.OF_KEYS in term.structure, Structure.FACTORED in term.structure, True)
        places[kinds.index(True)].append(index)
    return Plan(engine, why, *map(tuple, places))


def why_not(problem: Problem, backend: Backend, *, need_lse: bool) -> str | None:
    """Why an engine cannot compute a problem; None if it can."""
    if backend in ("reference", "blockwise"):
        return None
    if torch.compiler.is_exporting() and backend != "lanes":
        return (
            "an exported program holds PyTorch's own operators alone, and this backend's is not among them; leave "
            "backend out, or use 'reference'"
        )
    if backend == "triton":
        reason, device = why_not_triton(problem), problem.query.device
        return fault(device, *Variant.of(problem)) if reason is None and device.type in CHECKED else reason
    if needs_autograd(problem):
        return "it does not compute relative, dropout_p or a gradient of attn_mask; use 'auto'"
    if backend == "lanes":
        reason = _why_not_lanes(problem, need_lse)
        return reason if reason is None else f"{reason}; use backend='toeplitz'"
    scaled = [term.name for term in problem.terms if Structure.SCALED_DISTANCE in term.structure]
    if backend == "toeplitz":
        return None if len(scaled) < 2 else f"it computes one network of a scaled distance, not {', '.join(scaled)}"
    if scaled:
        return f"it does not compute the network of {scaled[0]}; use backend='toeplitz'"
    return _why_not_flex(problem, need_lse)


def needs_autograd(problem: Problem) -> bool:
    """Whether only the dense formula has all of it, or its gradients."""
    mask = problem.geometry.attn_mask
    return problem.relative is not None or problem.dropout_p > 0 or (mask is not None and mask.requires_grad)


def _why_not_lanes(problem: Problem, need_lse: bool) -> str | None:
    if not all(Structure.FACTORED in term.structure for term in problem.terms):
        return "not all of the prior is factored"
    if need_lse or problem.key_bias is not None or not problem.geometry.is_plain:
        return (
            "it is one call of PyTorch's attention, which has no documents, padding, masks, positions, key_bias or "
            "log-sum-exp (return_lse, null_logit)"
        )
    return None


def _choose(problem: Problem, need_lse: bool) -> tuple[Backend, str]:
    if torch.compiler.is_exporting():
        return "reference", "an exported program is to run without this package: the dense formula needs PyTorch alone"
    if needs_autograd(problem):
        return "blockwise", "relative, dropout_p and an attn_mask with a gradient are computed by the dense formula"
    if problem.query.is_cuda and why_not(problem, "triton", need_lse=need_lse) is None:
        return "triton", "the kernels compute all of it"
    reason = _why_not_lanes(problem, need_lse)
    if reason is not None:
        no_tiles = why_not(problem, "toeplitz", need_lse=need_lse)
        return ("toeplitz", reason) if no_tiles is None else ("blockwise", f"in tiles, {no_tiles}")
    if not problem.terms:
        return "lanes", "without a prior it is one call of PyTorch's attention"
    if FEW_QUERIES * problem.geometry.num_queries <= problem.geometry.num_keys:
        return "toeplitz", "for few queries, to lengthen every key would be most of the work"
    if all(Structure.STATIONARY in term.structure for term in problem.terms):
        if problem.query.dtype in (torch.float16, torch.bfloat16):
            return "toeplitz", "lanes are computed in float32, a table's products in half precision"
        if problem.tolerance > 0:
            return "toeplitz", "pruning bounds a table better than lanes"
    return "lanes", "all of the prior is factored"


def _why_not_flex(problem: Problem, need_lse: bool) -> str | None:
    """What FlexAttention would refuse in the middle of it, or would do otherwise."""
    query = problem.query
    if query.dtype == torch.float64:
        return "it computes in float32, and query is float64; use backend='toeplitz'"
    if problem.key_bias is not None and problem.geometry.has_given_positions:
        return "it does not compute key_bias with query_positions or key_positions; use backend='toeplitz'"
    if query.device.type != "cpu":
        return None
    tensors = {"query": query, "key": problem.key, "value": problem.value, "key_bias": problem.key_bias}
    tensors["logit_scale"] = problem.row_scale
    if problem.prior is not None:
        tensors |= {f"prior.{name}": parameter for name, parameter in problem.prior.named_parameters()}
    learned = [name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad]
    if torch.is_grad_enabled() and learned:
        return (
            f"on CPUs FlexAttention has no backward pass, and {', '.join(learned)} require gradients; use "
            "backend='toeplitz', or torch.no_grad()"
        )
    if need_lse:
        return "on CPUs FlexAttention does not return the log-sum-exp (return_lse, null_logit); use backend='toeplitz'"
    return None
