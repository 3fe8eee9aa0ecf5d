"""Attention as a posterior: content times position, and how far they agree (BAM, Theorem 1 and Appendix K / I)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_priors.lab.inspect.logits import AttentionLogits, attention_logits
from attention_priors.priors import Prior


@dataclass(frozen=True)
class Decomposition:
    """The posterior of each query over the keys that it sees, and what it is made of; all of it differentiable.

    With ``f`` the content logits and ``g`` those of the position, ``p_content = softmax f``, ``p_position = softmax g``
    and ``posterior = softmax(f + g) = p_content · p_position / Z``. All numbers are natural: nats, and shares from 0 to
    1. A query that sees no key has weights 0, and 0 in everything else.
    """

    content: Tensor
    """``p_content``, ``(..., Lq, Lk)``: where the query would look without a prior."""
    position: Tensor
    """``p_position``, ``(..., Lq, Lk)``: where it would look without content; ``π`` in GOAT."""
    posterior: Tensor
    """``p``, ``(..., Lq, Lk)``: where it looks."""
    log_overlap: Tensor
    """``ln Z``, ``(..., Lq)``, with the overlap ``Z = Σ_j p_content p_position = Z_joint / (Z_content Z_position)``.

    BAM prints the second form upside down. It is 1 only where both marginals are the same point mass, and ``1/n`` where
    one of them is uniform over ``n`` keys.
    """
    agreement: Tensor
    """``ln(n Z)``, ``(..., Lq)``: 0 where content or prior is uniform, positive where they favour the same keys."""
    divergence_from_position: Tensor
    """``KL(p ‖ p_position)``, ``(..., Lq)``: what the content adds to the prior."""
    divergence_from_content: Tensor
    """``KL(p ‖ p_content)``, ``(..., Lq)``: what the prior adds to the content."""

    @property
    def overlap(self) -> Tensor:
        """``Z``, ``(..., Lq)``."""
        return self.log_overlap.exp() * (self.posterior.sum(-1) > 0)

    @property
    def interaction_free_energy(self) -> Tensor:
        """``-ln Z``, ``(..., Lq)``: ``Σ_j p ln(p / (p_content p_position))``.

        It is no mutual information: for a uniform prior, which says nothing, it is ``ln n``.
        """
        return -self.log_overlap

    @property
    def position_share(self) -> Tensor:
        """``KL(p ‖ p_content) / (KL(p ‖ p_content) + KL(p ‖ p_position))``, ``(..., Lq)``, from 0 to 1.

        How much of the way from one marginal to the other the prior has pulled the posterior: 0 if content alone
        decides, 1 if the prior alone does. 1/2 where the two do not differ from the posterior at all.
        """
        both = self.divergence_from_content + self.divergence_from_position
        nothing = both <= 0
        return torch.where(nothing, 0.5, self.divergence_from_content / both.masked_fill(nothing, 1.0))


def decompose(logits: AttentionLogits) -> Decomposition:
    """Split the attention that logits give into what content and position contribute.

    Source: BAM, Theorem 1; the definitions of its Appendix I (arXiv) in the form in which they agree with each other.

    Args:
        logits: of content and position.
    """
    visible = logits.visible
    blind = ~visible.any(-1, keepdim=True)
    # A row without keys is computed over all of them, and then emptied: no nan enters a gradient.
    hidden = ~visible & ~blind
    dtype = logits.content.dtype
    # In float64: where all logits are small, float32 has no digits left of what three distributions differ by.
    f, g = logits.content.double(), logits.position.double()
    log_content, log_position, log_posterior = (
        x.masked_fill(hidden, -torch.inf).log_softmax(-1) for x in (f, g, f + g)
    )
    content, position, posterior = (x.exp().masked_fill(blind, 0.0) for x in (log_content, log_position, log_posterior))
    # Not as the difference of three log-sum-exps: those may be as large as the log-prior.
    log_overlap = (log_content + log_position).logsumexp(-1).masked_fill(blind.squeeze(-1), 0.0)
    number = visible.sum(-1).clamp(min=1).to(torch.float64)
    from_position, from_content = (
        _divergence(posterior, marginal, (log_posterior - log_marginal).masked_fill(hidden, 0.0))
        for marginal, log_marginal in ((position, log_position), (content, log_content))
    )
    return Decomposition(
        content=content.to(dtype),
        position=position.to(dtype),
        posterior=posterior.to(dtype),
        log_overlap=log_overlap.to(dtype),
        agreement=(log_overlap + number.log()).to(dtype),
        divergence_from_position=from_position.to(dtype),
        divergence_from_content=from_content.to(dtype),
    )


def _divergence(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """``KL(p ‖ q)`` in float64, ``(...)``, with ``x = ln p - ln q``, 0 where both are.

    As both sum to 1 it is the sum of ``p x + q - p = p (x + e^-x - 1)``, none of which is negative: nothing of a small
    divergence is lost between large numbers of both signs.
    """
    few = x.clamp(-1e-2, 1e-2)  # beyond, the series may overflow, and so would the gradient of what is not taken
    series = few.square() * (1 / 2 - few * (1 / 6 - few * (1 / 24 - few * (1 / 120 - few / 720))))
    return torch.where(x.abs() < 1e-2, p * series, p * x + (q - p)).sum(-1)


def decompose_attention(query: Tensor, key: Tensor, prior: Prior | None = None, **options: Any) -> Decomposition:
    """:func:`decompose` of what :func:`attention_priors.attend` would compute.

    Args:
        query: ``(B, H, Lq, D)``.
        key: ``(B, Hkv, Lk, D)``.
        prior: a log-prior over positions, or None for the uniform one.
        options: as for :func:`attention_logits`.
    """
    return decompose(attention_logits(query, key, prior, **options))
