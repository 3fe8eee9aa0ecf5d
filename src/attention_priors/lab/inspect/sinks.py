"""Signal against sink: how much attention a sink keeps while the content grows (GOAT, Figure 2c)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_priors.attention import SSMax
from attention_priors.attention.attend import attend_with_weights
from attention_priors.attention.problem import Problem
from attention_priors.attention.reference import reference
from attention_priors.encodings import ShawVectors
from attention_priors.hf.observe import LayerAttention, observed_attention
from attention_priors.lab.inspect.logits import problem_logits
from attention_priors.lab.inspect.margins import content_range
from attention_priors.priors import Prior


class SinkMassRow(TypedDict):
    """One head with its content logits multiplied by one factor."""

    layer: int
    """How many others compute attention before it."""
    head: int
    factor: float
    signal: float
    """``ω``, the range of the content logits over the keys that a query sees, in nats; mean over queries. A logit scale
    is in them: ``ω`` of ``c · content``."""
    mass: float
    """Attention weight of the first token; mean over queries, but for the first one, which sees nothing else."""


def sink_mass(
    query: Tensor,
    key: Tensor,
    prior: Prior | None = None,
    *,
    factors: Sequence[float],
    sink: int = 0,
    logit_scale: SSMax | None = None,
    relative: ShawVectors | None = None,
) -> Tensor:
    """The attention weight of one key, while the content logits are multiplied by rising factors.

    ``p_i(sink; f) = softmax_j(c_i (f · <q_i, k_j> / sqrt(D) + K_ij))[sink]`` under the causal mask, with the logit
    scale ``c_i``, 1 without one. At ``f = 0`` it is the prior's own mass, whatever the content:
    ``exp(c_i K_i,sink) / Σ_{j ≤ i} exp(c_i K_ij)``, which without a logit scale is ``1 / (i + 1)`` for the uniform
    prior, ``e^b / (e^b + i)`` for a :class:`KeySink` that is a bump ``b``. With ``π`` that mass and ``ω_i`` the range
    of ``c_i <q_i, k_j> / sqrt(D)`` over the visible keys, ``π exp(-f ω_i) ≤ p_i ≤ π exp(f ω_i)``.

    Source: GOAT, Theorem 5.1 (equation 25) and Figure 2c. The paper does not say how its signal was varied; here the
    content of given queries and keys is.

    Args:
        query: ``(B, H, L, D)``, with whatever encoding turns queries.
        key: ``(B, Hkv, L, D)``, likewise.
        prior: the log-prior; None is the uniform one.
        factors: what content logits are multiplied by, 0 or more.
        sink: which key, from 0. Queries before it do not see it.
        logit_scale: SSMax; one that leaves the prior out multiplies the content alone.
        relative: Shaw's vectors.

    Returns:
        ``(len(factors), B, H, L)`` in the query's dtype. Memory while it runs: ``B · H · L²``.

    Raises:
        ValueError: there are no factors, one is negative or not finite, or ``sink`` is no key.
    """
    _check_factors(factors)
    if key.dim() != 4:
        raise ValueError(f"key must have shape (B, Hkv, L, D), got {tuple(key.shape)}")
    if not 0 <= sink < key.shape[2]:
        raise ValueError(f"sink must be a key from 0 to {key.shape[2] - 1}, got {sink}")
    # Values play no part in weights.
    options: dict[str, Any] = {"logit_scale": logit_scale, "relative": relative}
    return torch.stack(
        [attend_with_weights(factor * query, key, key, prior, **options)[1][..., sink] for factor in factors]
    )


@torch.no_grad()
def sink_mass_rows(model: PreTrainedModel, texts: Sequence[Tensor], *, factors: Sequence[float]) -> list[SinkMassRow]:
    """:func:`sink_mass` of the first token, for every head of a model.

    Queries and keys of each layer are those of an ordinary forward pass; the factor multiplies the content logits of
    that layer alone.

    Args:
        model: in evaluation mode; any that :func:`observed_attention` sees.
        texts: tokens of each text, ``(L,)``, at least 2.
        factors: as for :func:`sink_mass`.

    Raises:
        ValueError: there are no texts, one is too short, there are no factors, or one is impossible.
    """
    if not texts or min(map(len, texts)) < 2:
        raise ValueError(
            f"texts must hold texts of at least 2 tokens each, got lengths {[len(text) for text in texts]}"
        )
    _check_factors(factors)
    totals: dict[int, Any] = {}

    def see(layer: LayerAttention) -> None:
        problem = layer.problem
        mass = _masses(problem, factors, sink=0)
        sums = torch.cat([mass[:, 0], content_range(problem_logits(problem))], 0)[..., 1:].double().sum(-1).cpu()
        totals[layer.index] = totals.get(layer.index, 0.0) + sums

    for text in texts:
        # Each anew, for layers to be counted from 0: a hybrid computes attention in some of its layers alone.
        with observed_attention(model, see):
            model(input_ids=text[None].to(model.device), use_cache=False)
    queries = sum(len(text) - 1 for text in texts)
    means = torch.stack([*totals.values()]) / queries
    return [
        {
            "layer": layer,
            "head": head,
            "factor": float(factor),
            "signal": float(factor * means[layer, -1, head]),
            "mass": float(means[layer, place, head]),
        }
        for layer in range(len(totals))
        for head in range(means.shape[2])
        for place, factor in enumerate(factors)
    ]


def _masses(problem: Problem, factors: Sequence[float], sink: int) -> Tensor:
    return torch.stack([reference(replace(problem, query=factor * problem.query))[2][..., sink] for factor in factors])


def _check_factors(factors: Sequence[float]) -> None:
    if not len(factors):
        raise ValueError(f"factors must hold at least one number, got {factors!r}")
    for factor in factors:
        if not 0 <= factor < float("inf"):
            raise ValueError(f"factors must be finite and at least 0, got {factor}")
