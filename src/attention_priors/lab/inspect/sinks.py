"""Attention sinks: their mass as the content grows, their margin over other keys, and the resulting bounds.

Source: GOAT, Figure 2c and section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_priors.attention import SSMax
from attention_priors.attention.attend import attend_with_weights
from attention_priors.attention.problem import Problem
from attention_priors.attention.reference import reference
from attention_priors.encodings import ShawVectors
from attention_priors.hf.observe import LayerAttention, observed_attention
from attention_priors.lab.inspect.posterior import AttentionLogits, problem_logits
from attention_priors.priors import Prior


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
    """Return the attention weight of one key while the content logits are multiplied by growing factors.

    ``p_i(sink; f) = softmax_j(c_i (f · <q_i, k_j> / sqrt(D) + K_ij))[sink]`` under the causal mask, with logit scale
    ``c_i`` (1 without one). At ``f = 0`` the weight is the prior's own mass, for any content:
    ``exp(c_i K_i,sink) / Σ_{j ≤ i} exp(c_i K_ij)``. Without a logit scale, this mass is ``1 / (i + 1)`` for the uniform
    prior and ``e^b / (e^b + i)`` for a :class:`KeySink` with bump ``b``. Let ``π`` be this mass and ``ω_i`` the range
    of ``c_i <q_i, k_j> / sqrt(D)`` over the visible keys. Then ``π exp(-f ω_i) ≤ p_i ≤ π exp(f ω_i)``.

    Source: GOAT, Theorem 5.1 (equation 25) and Figure 2c. The paper does not say how it varied its signal. This
    function multiplies the content of given queries and keys.

    Args:
        query: ``(B, H, L, D)``. Encodings of queries, such as rotary, are already applied.
        key: ``(B, Hkv, L, D)``. Encoded like the queries.
        prior: log-prior; None for the uniform prior.
        factors: multipliers of the content logits, 0 or more.
        sink: index of the sink's key. Earlier queries do not see the sink.
        logit_scale: SSMax; if it leaves the prior out, it multiplies the content alone.
        relative: Shaw's vectors.

    Returns:
        Weights ``(len(factors), B, H, L)`` in the query's dtype. Peak memory: ``B · H · L²``.

    Raises:
        ValueError: ``factors`` is empty, a factor is negative or not finite, or ``sink`` is out of range.
    """
    _check_factors(factors)
    if key.dim() != 4:
        raise ValueError(f"key must have shape (B, Hkv, L, D), got {tuple(key.shape)}")
    if not 0 <= sink < key.shape[2]:
        raise ValueError(f"sink must be a key from 0 to {key.shape[2] - 1}, got {sink}")
    # The weights do not depend on the values, so the keys stand in for them.
    options: dict[str, Any] = {"logit_scale": logit_scale, "relative": relative}
    return torch.stack(
        [attend_with_weights(factor * query, key, key, prior, **options)[1][..., sink] for factor in factors]
    )


@torch.no_grad()
def sink_mass_rows(
    model: PreTrainedModel, texts: Sequence[Tensor], *, factors: Sequence[float]
) -> list[dict[str, Any]]:
    """Return :func:`sink_mass` of the first token for every head of a model.

    Queries and keys come from an ordinary forward pass. The factor multiplies the content logits of one layer at a
    time.

    Args:
        model: model in evaluation mode that :func:`observed_attention` supports.
        texts: token ids of each text, ``(L,)``, at least 2.
        factors: see :func:`sink_mass`.

    Raises:
        ValueError: ``texts`` or ``factors`` is empty, a text is too short, or a factor is negative or not finite.
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
        # Observe each text anew, so that layers count from 0: only some layers of a hybrid compute attention.
        with observed_attention(model, see):
            model(input_ids=text[None].to(model.device), use_cache=False)
    queries = sum(len(text) - 1 for text in texts)
    means = torch.stack([*totals.values()]) / queries
    return [
        {"layer": layer, "head": head, "factor": factor, "signal": factor * own[-1], "mass": own[place]}
        for layer, of_layer in enumerate(means.transpose(1, 2).tolist())
        for head, own in enumerate(of_layer)
        for place, factor in enumerate(map(float, factors))
    ]


def _masses(problem: Problem, factors: Sequence[float], sink: int) -> Tensor:
    return torch.stack([reference(replace(problem, query=factor * problem.query))[2][..., sink] for factor in factors])


def _check_factors(factors: Sequence[float]) -> None:
    if not len(factors):
        raise ValueError(f"factors must hold at least one number, got {factors!r}")
    for factor in factors:
        if not 0 <= factor < float("inf"):
            raise ValueError(f"factors must be finite and at least 0, got {factor}")


@dataclass(frozen=True)
class Margin:
    """Margin by which one key leads all others for each query, in nats, ``(..., Lq)``.

    ``inf`` where the query sees no other key, ``-inf`` where the query does not see this key.
    """

    total: Tensor
    """``m_i(j*) = min_{k ≠ j*} (z_ij* - z_ik)``: positive where ``j*`` is the sink (GOAT, Definition 5.2)."""
    content: Tensor
    """Content part of the margin, ``f_ij* - f_ik`` with ``k`` the runner-up; nan without a runner-up."""
    position: Tensor
    """Prior part of the margin, ``g_ij* - g_ik`` (GOAT, equation 27); nan without a runner-up."""
    position_alone: Tensor
    """``δ = min_{k ≠ j*} (g_ij* - g_ik)``: margin of the prior without any content (GOAT, Theorem 5.4)."""


def sink_margin(logits: AttentionLogits, key: int) -> Margin:
    """Return the margin of a key, split into the contributions of content and prior.

    Args:
        logits: content and position logits.
        key: index ``j*`` of the key.

    Raises:
        ValueError: ``key`` is out of range.
    """
    _check_key(logits.content.shape[-1], key)
    others = logits.visible.clone()
    others[..., key] = False
    total = logits.content + logits.position
    rest = total.masked_fill(~others, -torch.inf)
    runner_up = rest.argmax(-1, keepdim=True)
    alone = logits.visible[..., key] & ~others.any(-1)

    def lead(values: Tensor) -> Tensor:
        return values[..., key] - values.gather(-1, runner_up).squeeze(-1)

    def settled(margin: Tensor) -> Tensor:
        return margin.masked_fill(alone, torch.inf).masked_fill(~logits.visible[..., key], -torch.inf)

    undefined = ~others.any(-1) | ~logits.visible[..., key]
    nearest = logits.position.masked_fill(~others, -torch.inf).amax(-1)
    return Margin(
        total=settled(lead(total)),
        content=lead(logits.content).masked_fill(undefined, torch.nan),
        position=lead(logits.position).masked_fill(undefined, torch.nan),
        position_alone=settled(logits.position[..., key] - nearest.masked_fill(undefined, 0.0)),
    )


def content_range(logits: AttentionLogits) -> Tensor:
    """Return ``ω_i``, the range of each query's visible content logits, in nats, ``(..., Lq)``.

    A query that sees no key has range 0.
    """
    blind = ~logits.visible.any(-1)
    highest = logits.content.masked_fill(~logits.visible, -torch.inf).amax(-1).masked_fill(blind, 0.0)
    lowest = logits.content.masked_fill(~logits.visible, torch.inf).amin(-1).masked_fill(blind, 0.0)
    return highest - lowest


def collapse_bounds(logits: AttentionLogits) -> tuple[Tensor, Tensor]:
    """Return the bounds ``π e^-ω`` and ``π e^ω`` of every attention weight, ``(..., Lq, Lk)`` each.

    The weaker the content, the closer the posterior is to the prior. The upper bound may exceed 1.

    Source: GOAT, Theorem 5.1 (equation 25).

    Args:
        logits: content and position logits.
    """
    blind = ~logits.visible.any(-1, keepdim=True)
    log_prior = logits.position.masked_fill(~logits.visible & ~blind, -torch.inf).log_softmax(-1)
    spread = content_range(logits).unsqueeze(-1)
    # Exponentiate the sum: 0 times an overflowing exponential would be nan. Clamp the upper bound just below the
    # largest number, as an infinite bound has no gradient. The logarithm of the largest number itself may be rounded
    # up, and its exponential would then be infinite.
    largest = torch.tensor(torch.finfo(log_prior.dtype).max, dtype=log_prior.dtype).log()
    largest = float(largest.nextafter(torch.zeros_like(largest)))
    low, high = (
        (log_prior + sign * spread).clamp(max=largest).exp().masked_fill(~logits.visible, 0.0) for sign in (-1, 1)
    )
    return low, high


def context_sensitivity(weights: Tensor, key: int) -> Tensor:
    """Return ``Ψ = 1 - p_ij*``, the weight of all keys but the sink, ``(..., Lq)``.

    Noise of size ``ε`` in the values of the other keys moves the output by at most ``ε Ψ``.

    Source: GOAT, Definition 5.3 (equations 28 and 29).

    Args:
        weights: ``(..., Lq, Lk)``, such as :attr:`Decomposition.posterior`.
        key: index ``j*`` of the sink.

    Raises:
        ValueError: ``key`` is out of range.
    """
    _check_key(weights.shape[-1], key)
    others = weights.clone()
    others[..., key] = 0
    return others.sum(-1)  # 1 - p would lose all digits where p is near 1


def sensitivity_bound(margin: Tensor, num_keys: Tensor | int) -> Tensor:
    """Return the bound ``Ψ ≤ (n - 1) / (e^m + n - 1)``, attained where all other keys trail by exactly ``m``.

    GOAT's Theorem 5.4 uses the prior's margin alone, for vanishing content. For content of range ``ω`` the bound holds
    with the total margin, or with the prior's margin less ``ω``. With the prior's margin alone the bound is violated.
    For a fixed margin the bound tends to 1 as ``n`` grows; to keep it constant, the margin must grow like ``ln n``.

    Source: GOAT, Theorem 5.4 (equation 31) and Appendix D.2.

    Args:
        margin: ``m``, in nats: :attr:`Margin.total`, or ``position_alone - content_range``.
        num_keys: ``n``, the number of keys that the query sees, including the sink.
    """
    others = torch.as_tensor(num_keys, dtype=margin.dtype, device=margin.device) - 1
    # 1 / (1 + e^m / (n - 1)), computed without overflow.
    return torch.where(others > 0, torch.sigmoid(others.clamp(min=1).log() - margin), 0.0)


def _check_key(number: int, key: int) -> None:
    if not 0 <= key < number:
        raise ValueError(f"key must be from 0 to {number - 1}, got {key}")
