"""Attention as entropic optimal transport: which trade it is the best of (GOAT, sections 2 and 3)."""

from __future__ import annotations

import torch
from torch import Tensor


def transport_objective(plan: Tensor, score: Tensor, log_prior: Tensor, temperature: float = 1.0) -> Tensor:
    """``-<p, s> + τ KL(p ‖ π)`` for each query, in nats, ``(...)``.

    Source: GOAT, Definition 2.1 with the prior of Proposition 3.1. Its scores are unscaled there and scaled in equation
    11; here they are whatever is given.

    Args:
        plan: ``p``, distributions over the last dimension, ``(..., Lk)``; 0 wherever the prior is.
        score: ``s``, ``(..., Lk)``, finite.
        log_prior: ``K``, in nats, ``(..., Lk)``, normalised or not; ``-inf`` where a key is hidden. A query that sees
            none has no plan, and gets nan, whatever is given as one.
        temperature: ``τ``, positive.

    Raises:
        ValueError: the temperature is not positive.
    """
    _check_temperature(temperature)
    blind = torch.isneginf(log_prior).all(-1)
    used = plan > 0
    log_plan = plan.masked_fill(~used, 1.0).log()
    # A plan that uses a hidden key costs infinitely much.
    log_prior = log_prior.log_softmax(-1)
    excess = torch.where(used, log_plan - log_prior, 0.0)
    # A plan of zeros would else cost nothing.
    return (plan * (temperature * excess - score)).sum(-1).masked_fill(blind, torch.nan)


def transport_plan(score: Tensor, log_prior: Tensor, temperature: float = 1.0) -> Tensor:
    """The only minimum of :func:`transport_objective`: ``softmax(s / τ + ln π)``, ``(..., Lk)``.

    Source: GOAT, Propositions 2.2 (uniform prior) and 3.1.

    Args:
        score: and
        log_prior: and
        temperature: as for :func:`transport_objective`.
    """
    _check_temperature(temperature)
    return (score / temperature + log_prior).softmax(-1)


def transport_minimum(score: Tensor, log_prior: Tensor, temperature: float = 1.0) -> Tensor:
    """What the objective comes to at its minimum: ``-τ ln Σ_j π_j e^(s_j / τ)``, in nats, ``(...)``.

    Any other plan exceeds it by ``τ KL(p ‖ p*)``, exactly.

    Args:
        score: and
        log_prior: and
        temperature: as for :func:`transport_objective`.
    """
    _check_temperature(temperature)
    return -temperature * ((score / temperature + log_prior).logsumexp(-1) - log_prior.logsumexp(-1))


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a positive finite number, got {temperature!r}")
