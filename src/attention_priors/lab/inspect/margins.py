"""Sinks by margin: by how much a key leads, why, and what that guarantees (GOAT, section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_priors.lab.inspect.logits import AttentionLogits


@dataclass(frozen=True)
class Margin:
    """By how much one key leads for each query, in nats, ``(..., Lq)``.

    ``inf`` where the query sees no other key, ``-inf`` where it does not see this one.
    """

    total: Tensor
    """``m_i(j*) = min_{k ≠ j*} (z_ij* - z_ik)``: positive where ``j*`` is the sink (GOAT, Definition 5.2)."""
    content: Tensor
    """The part of it that comes from the content, ``f_ij* - f_ik`` with ``k`` the runner-up; nan without one."""
    position: Tensor
    """The part that comes from the prior, ``g_ij* - g_ik`` (GOAT, equation 27); nan without a runner-up."""
    position_alone: Tensor
    """``δ = min_{k ≠ j*} (g_ij* - g_ik)``: the margin that there is without any content (GOAT, Theorem 5.4)."""


def sink_margin(logits: AttentionLogits, key: int) -> Margin:
    """By how much a key leads, split into what content and prior contribute.

    Args:
        logits: of content and position.
        key: ``j*``, from 0.

    Raises:
        ValueError: there is no such key.
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
    """``ω_i``: the largest less the smallest content logit that each query sees, in nats, ``(..., Lq)``.

    0 for a query that sees no key.
    """
    blind = ~logits.visible.any(-1)
    highest = logits.content.masked_fill(~logits.visible, -torch.inf).amax(-1).masked_fill(blind, 0.0)
    lowest = logits.content.masked_fill(~logits.visible, torch.inf).amin(-1).masked_fill(blind, 0.0)
    return highest - lowest


def collapse_bounds(logits: AttentionLogits) -> tuple[Tensor, Tensor]:
    """What every weight lies between: ``π e^-ω`` and ``π e^ω``, ``(..., Lq, Lk)`` each.

    The weaker the content, the closer the posterior is to the prior, whatever was learned. The upper one may exceed 1.

    Source: GOAT, Theorem 5.1 (equation 25).

    Args:
        logits: of content and position.
    """
    blind = ~logits.visible.any(-1, keepdim=True)
    log_prior = logits.position.masked_fill(~logits.visible & ~blind, -torch.inf).log_softmax(-1)
    spread = content_range(logits).unsqueeze(-1)
    # Of the sum: 0 times an exponential that overflows would be nan.
    # An upper one beyond all numbers is nearly the largest of them: an infinite one would have no gradient. Nearly, as
    # the logarithm of the largest may be rounded up, and its exponential is then infinite.
    largest = torch.tensor(torch.finfo(log_prior.dtype).max, dtype=log_prior.dtype).log()
    largest = float(largest.nextafter(torch.zeros_like(largest)))
    low, high = (
        (log_prior + sign * spread).clamp(max=largest).exp().masked_fill(~logits.visible, 0.0) for sign in (-1, 1)
    )
    return low, high


def context_sensitivity(weights: Tensor, key: int) -> Tensor:
    """``Ψ = 1 - p_ij*``, the weight of all keys but the sink, ``(..., Lq)``.

    Noise of size ``ε`` in their values moves the output by at most ``ε Ψ``.

    Source: GOAT, Definition 5.3 (equations 28 and 29).

    Args:
        weights: ``(..., Lq, Lk)``, as of :attr:`Decomposition.posterior`.
        key: ``j*``, from 0.

    Raises:
        ValueError: there is no such key.
    """
    _check_key(weights.shape[-1], key)
    others = weights.clone()
    others[..., key] = 0
    return others.sum(-1)  # not 1 - p, which has no digits left where p is near 1


def sensitivity_bound(margin: Tensor, num_keys: Tensor | int) -> Tensor:
    """``Ψ ≤ (n - 1) / (e^m + n - 1)``, attained where all other keys trail by exactly ``m``.

    GOAT's Theorem 5.4 has the prior's margin alone, for content that vanishes. For content of range ``ω`` it holds with
    the total margin, or with the prior's less ``ω``; with the prior's alone it is violated. For a fixed margin it tends
    to 1 as ``n`` grows: to keep it, the margin must grow like ``ln n``.

    Source: GOAT, Theorem 5.4 (equation 31) and Appendix D.2.

    Args:
        margin: ``m``, in nats: :attr:`Margin.total`, or ``position_alone - content_range``.
        num_keys: ``n``, how many keys the query sees, the sink included.
    """
    others = torch.as_tensor(num_keys, dtype=margin.dtype, device=margin.device) - 1
    # 1 / (1 + e^m / (n - 1)), without an exponential that overflows.
    return torch.where(others > 0, torch.sigmoid(others.clamp(min=1).log() - margin), 0.0)


def _check_key(number: int, key: int) -> None:
    if not 0 <= key < number:
        raise ValueError(f"key must be from 0 to {number - 1}, got {key}")
