"""What the heads of a layer do with a text: how far content and prior explain where they look."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from attention_priors.attention.geometry import block_length
from attention_priors.attention.problem import Problem
from attention_priors.lab.inspect.curves import finite
from attention_priors.lab.inspect.posterior import AttentionLogits, decompose, problem_logits
from attention_priors.lab.inspect.sinks import content_range, sink_margin


class HeadAccount(TypedDict):
    """One head on one text: means over the queries that see two keys at least."""

    head: int
    position_share: float
    """How much of the way from content to prior the attention goes, 0 to 1 (:class:`Decomposition`)."""
    agreement: float
    """``ln(n Z)``, in nats."""
    divergence_from_position: float
    """``KL(p ‖ p_position)``, in nats: what the content adds."""
    divergence_from_content: float
    """``KL(p ‖ p_content)``, in nats: what the prior adds."""
    content_range: float
    """``ω``, in nats."""
    inverse_temperature: float
    """``γ``, the logit scale that multiplies content and, unless it leaves it out, the prior; 1 without one."""
    entropy: float
    """Of the weights, in nats."""
    distance: float
    """Mean distance that is looked at, in tokens, whichever way."""
    first: float
    """Weight of the first key: the one at index 0, though it be padding or of another document."""
    sink: float
    """Share of the queries for which that key leads all others, 0 to 1; those that do not see it count as led by
    others."""
    sink_content: float | None
    """Content's part of that lead, in nats, median over those queries; None if there are none."""
    sink_position: float | None
    """The prior's part of it, likewise. A median: what a prior gives a query's own key may be far below all others."""


@torch.no_grad()
def head_accounts(problem: Problem) -> list[HeadAccount]:
    """Account for the attention of every head, over all queries of the first text of a batch.

    The first key is the one at index 0 of the row of keys. Where that is padding, or where a row holds several
    documents, queries that do not see it give it no weight and lower its shares: text that is to be accounted for by
    its own first key must stand in a row of its own, from the start.

    Memory: a block of queries at a time.

    Raises:
        ValueError: no query sees two keys.
    """
    geometry = problem.geometry
    key_positions = geometry.key_positions[:1].double()
    found: dict[str, list[Tensor]] = {}
    step = block_length(problem.query.shape[0] * problem.query.shape[1] * problem.key.shape[2])
    for start in range(0, geometry.num_queries, step):
        part = problem.rows(slice(start, start + step))
        logits = _first_text(part)
        parts = decompose(logits)
        margin = sink_margin(logits, 0)
        several = logits.visible.sum(-1) >= 2
        away = (part.geometry.query_positions[:1].double().unsqueeze(-1) - key_positions.unsqueeze(-2)).abs()
        of_queries = {
            "position_share": parts.position_share,
            "agreement": parts.agreement,
            "divergence_from_position": parts.divergence_from_position,
            "divergence_from_content": parts.divergence_from_content,
            "content_range": content_range(logits),
            "inverse_temperature": logits.inverse_temperature.double(),
            "entropy": -torch.special.xlogy(parts.posterior, parts.posterior).sum(-1),
            "distance": (parts.posterior * away).sum(-1),
            "first": parts.posterior[..., 0],
            "sink": (margin.total > 0).double(),
        }
        of_sink = {"sink_content": margin.content, "sink_position": margin.position}
        for name, values in of_queries.items():
            found.setdefault(name, []).append(values.masked_fill(~several, torch.nan).cpu())
        for name, values in of_sink.items():
            found.setdefault(name, []).append(values.masked_fill(~(several & (margin.total > 0)), torch.nan).cpu())
    whole = {name: torch.cat(values, -1) for name, values in found.items()}
    if bool(whole["entropy"].isnan().all(-1).any()):
        raise ValueError("no query of the text sees two keys: there is nothing to account for")
    numbers = {
        name: values.nanmedian(-1).values if name.startswith("sink_") else values.nanmean(-1)
        for name, values in whole.items()
    }
    rows: list[Any] = [
        {"head": head, **{name: finite(values[head]) for name, values in numbers.items()}}
        for head in range(problem.query.shape[1])
    ]
    return rows


def _first_text(problem: Problem) -> AttentionLogits:
    """In float64, ``(H, Lq, Lk)``."""
    logits = problem_logits(problem)
    content, position = logits.content[0].double(), logits.position[0].double()
    return AttentionLogits(content, position, logits.visible[0], logits.inverse_temperature[0])
