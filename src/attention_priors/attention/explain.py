"""``explain()``: a description of how ``attend()`` computes a call, and why."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from attention_priors.attention.attend import as_autocast_has_it, solve
from attention_priors.attention.observe import noted
from attention_priors.attention.plan import Backend, make_plan, why_not
from attention_priors.attention.problem import Options, make_problem
from attention_priors.priors import Prior

CHOICES: tuple[Backend, ...] = ("triton", "lanes", "toeplitz")
"""Engines that ``auto`` chooses from, besides the dense formula."""


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None = None,
    *,
    return_lse: bool = False,
    backend: Backend = "auto",
    **options: Unpack[Options],
) -> str:
    """Describe which engine computes ``attend(query, key, value, prior, ...)``, how each term reaches it, and why.

    The call computes the attention once, to find out whether numbers are too large for float32. The arguments are those
    of :func:`attend`.

    Args:
        query: ``(B, H, Lq, D)``.
        key: ``(B, Hkv, Lk, D)``.
        value: ``(B, Hkv, Lk, Dv)``.
        prior: log-prior. None is the uniform prior.
        return_lse: whether to return the log-sum-exp.
        backend: engine, or ``auto``.
        options: all other arguments.

    Returns:
        Text with one fact per line.

    Raises:
        ValueError: as for :func:`attend`.
    """
    problem = make_problem(*as_autocast_has_it(query, key, value), prior, **options)
    need_lse = return_lse or problem.null_logit is not None
    plan = make_plan(problem, backend, need_lse=need_lse)
    lines = [f"{plan.engine}: {plan.why}"]
    if backend == "auto":
        passed = {name: why_not(problem, name, need_lse=need_lse) for name in CHOICES if name != plan.engine}
        lines += [f"not {name}: {reason}" for name, reason in passed.items() if reason is not None]
    kinds = (
        "one number per distance and head",
        "one number per key and head",
        "columns of queries and keys",
        "a ReLU network of one number per distance, scaled by each query",
    )
    lines += [f"{term.name}: {what}" for terms, what in zip(plan.parts(problem), kinds, strict=True) for term in terms]
    if problem.key_bias is not None:
        lines.append("key_bias: one number per key and head, less a constant for each block of queries")
    if problem.null_logit is not None:
        lines.append("null_logit: applied to the output at the end")
    if problem.tolerance > 0 and plan.unpruned is not None:
        lines.append(f"tolerance: no key is pruned, because {plan.unpruned}")
    elif problem.tolerance > 0:
        lines.append(f"tolerance: blocks of keys that together weigh less than {problem.tolerance:g} are pruned")
    with noted() as notes, torch.no_grad():
        solve(problem, backend, need_lse=need_lse)
    return "\n".join([*lines, *notes])
