"""Attention as a posterior: separate logits of content and position, their agreement, and their optimal transport form.

Sources: BAM, Theorem 1 and Appendices K and I; GOAT, sections 2 and 3 (entropic optimal transport).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import Unpack

from attention_priors.attention.problem import Options, Problem, make_problem
from attention_priors.attention.reference import dense_logits
from attention_priors.priors import Prior


@dataclass(frozen=True)
class AttentionLogits:
    """Attention logits ``z = f + g`` over queries and keys, in nats.

    Raises:
        ValueError: the shapes do not match.
    """

    content: Tensor
    """Content logits ``f = c <q_i, k_j> softmax_scale``, shape ``(..., Lq, Lk)``, finite."""
    position: Tensor
    """Position logits ``g = c K_ij`` up to a constant for each query, finite; expand to the shape of ``f``."""
    visible: Tensor
    """True where a query sees a key; expands to the shape of ``f``."""
    inverse_temperature: Tensor = field(default_factory=lambda: torch.ones(()))
    """Logit scale ``c`` as ``γ``, which expands to ``(..., Lq)``. ``f`` includes it, and so does ``g`` unless the logit
    scale leaves the prior out."""

    def __post_init__(self) -> None:
        shape = self.content.shape
        for name, wanted in (("position", shape), ("visible", shape), ("inverse_temperature", shape[:-1])):
            tensor = getattr(self, name)
            try:
                object.__setattr__(self, name, tensor.expand(wanted))
            except RuntimeError:
                of = "content" if wanted == shape else "content without its keys"
                raise ValueError(
                    f"{name} must expand to the shape of {of}, {tuple(wanted)}, got {tuple(tensor.shape)}"
                ) from None
        if self.visible.dtype != torch.bool:
            raise ValueError(f"visible must be boolean, got {self.visible.dtype}")

    @property
    def total(self) -> Tensor:
        """Logits ``z``, shape ``(..., Lq, Lk)``; ``-inf`` where hidden."""
        return (self.content + self.position).masked_fill(~self.visible, -torch.inf)


def attention_logits(
    query: Tensor, key: Tensor, prior: Prior | None = None, **options: Unpack[Options]
) -> AttentionLogits:
    """Return the logits that :func:`attention_priors.attend` passes to the softmax. Memory: ``B · H · Lq · Lk``.

    Args:
        query: ``(B, H, Lq, D)``. Encodings of queries, such as rotary, are already applied.
        key: ``(B, Hkv, Lk, D)``. Encoded like the queries.
        prior: log-prior over positions. Uniform if None.
        options: options of :func:`attention_priors.attend`. A float mask and a key bias count as position, Shaw's
            vectors as content. Dropout, tolerance and a null logit change nothing.

    Returns:
        Logits in float32, or float64 for float64 queries.

    Raises:
        ValueError: see :func:`attention_priors.attend`.
    """
    return problem_logits(make_problem(query, key, key, prior, **options))


def problem_logits(problem: Problem) -> AttentionLogits:
    """Return the logits ``(B, H, Lq, Lk)`` of an attention problem, such as :attr:`LayerAttention.problem`."""
    content, position, _, hidden = dense_logits(problem)
    position = content.new_zeros(()) if position is None else position
    visible = torch.ones((), dtype=torch.bool, device=content.device) if hidden is None else ~hidden
    scale = content.new_ones(()) if problem.row_scale is None else problem.row_scale
    return AttentionLogits(content, position, visible, scale)


@dataclass(frozen=True)
class Decomposition:
    """Posterior of each query over its visible keys, with its content and position parts; differentiable.

    ``f`` are the content logits and ``g`` the position logits. Then ``p_content = softmax f``,
    ``p_position = softmax g`` and ``posterior = softmax(f + g) = p_content · p_position / Z``. Divergences are in nats;
    shares are from 0 to 1. A query that sees no key has zeros everywhere.
    """

    content: Tensor
    """Weights without the prior, ``p_content``, shape ``(..., Lq, Lk)``."""
    position: Tensor
    """Weights without the content, ``p_position``, shape ``(..., Lq, Lk)``; ``π`` in GOAT."""
    posterior: Tensor
    """Attention weights ``p``, shape ``(..., Lq, Lk)``."""
    log_overlap: Tensor
    """Log of the overlap ``Z = Σ_j p_content p_position = Z_joint / (Z_content Z_position)``, shape ``(..., Lq)``.

    BAM prints the second form upside down. ``Z`` is 1 only if both marginals are the same point mass. ``Z`` is ``1/n``
    if one marginal is uniform over ``n`` keys.
    """
    agreement: Tensor
    """``ln(n Z)``, shape ``(..., Lq)``: 0 if content or prior is uniform, positive if both favour the same keys."""
    divergence_from_position: Tensor
    """``KL(p ‖ p_position)``, shape ``(..., Lq)``: the contribution of the content."""
    divergence_from_content: Tensor
    """``KL(p ‖ p_content)``, shape ``(..., Lq)``: the contribution of the prior."""

    @property
    def overlap(self) -> Tensor:
        """Overlap ``Z`` of content and prior, shape ``(..., Lq)``."""
        return self.log_overlap.exp() * (self.posterior.sum(-1) > 0)

    @property
    def interaction_free_energy(self) -> Tensor:
        """Interaction free energy ``-ln Z = Σ_j p ln(p / (p_content p_position))``, shape ``(..., Lq)``.

        This is not a mutual information: for a uniform prior, which carries no information, it is ``ln n``.
        """
        return -self.log_overlap

    @property
    def position_share(self) -> Tensor:
        """Share of the prior in the posterior, shape ``(..., Lq)``, from 0 to 1.

        ``KL(p ‖ p_content) / (KL(p ‖ p_content) + KL(p ‖ p_position))``: 0 if content alone decides, 1 if the prior
        alone does, 1/2 if both marginals equal the posterior.
        """
        both = self.divergence_from_content + self.divergence_from_position
        nothing = both <= 0
        return torch.where(nothing, 0.5, self.divergence_from_content / both.masked_fill(nothing, 1.0))


def decompose(logits: AttentionLogits) -> Decomposition:
    """Decompose attention into the contributions of content and position.

    Source: BAM, Theorem 1. The definitions of its Appendix I (arXiv) are used in the form that makes them consistent.

    Args:
        logits: content and position logits.
    """
    visible = logits.visible
    blind = ~visible.any(-1, keepdim=True)
    # A query without visible keys is computed over all keys and zeroed afterwards, so that no nan enters a gradient.
    hidden = ~visible & ~blind
    dtype = logits.content.dtype
    # In float64: for small logits, float32 cannot resolve the differences between the three distributions.
    f, g = logits.content.double(), logits.position.double()
    log_content, log_position, log_posterior = (
        x.masked_fill(hidden, -torch.inf).log_softmax(-1) for x in (f, g, f + g)
    )
    content, position, posterior = (x.exp().masked_fill(blind, 0.0) for x in (log_content, log_position, log_posterior))
    # A difference of three log-sum-exps would lose precision: each may be as large as the log-prior.
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
    """Return ``KL(p ‖ q)`` in float64, shape ``(...)``, with ``x = ln p - ln q``, or 0 where both are 0.

    Since ``p`` and ``q`` each sum to 1, the divergence is the sum of ``p x + q - p = p (x + e^-x - 1)``. No term is
    negative, so a small divergence is not lost to cancellation.
    """
    few = x.clamp(-1e-2, 1e-2)  # a larger x may overflow in the series, even in the gradient of the unused branch
    series = few.square() * (1 / 2 - few * (1 / 6 - few * (1 / 24 - few * (1 / 120 - few / 720))))
    return torch.where(x.abs() < 1e-2, p * series, p * x + (q - p)).sum(-1)


def decompose_attention(
    query: Tensor, key: Tensor, prior: Prior | None = None, **options: Unpack[Options]
) -> Decomposition:
    """Decompose the attention that :func:`attention_priors.attend` computes, as :func:`decompose` does.

    Args:
        query: ``(B, H, Lq, D)``.
        key: ``(B, Hkv, Lk, D)``.
        prior: log-prior over positions; None for the uniform prior.
        options: options of :func:`attention_logits`.
    """
    return decompose(attention_logits(query, key, prior, **options))


def transport_objective(plan: Tensor, score: Tensor, log_prior: Tensor, temperature: float = 1.0) -> Tensor:
    """Return ``-<p, s> + τ KL(p ‖ π)`` for each query, in nats, ``(...)``.

    Source: GOAT, Definition 2.1 with the prior of Proposition 3.1. GOAT's scores are unscaled there and scaled in
    equation 11; this function takes the scores as they are.

    Args:
        plan: Distributions ``p`` over the last dimension, ``(..., Lk)``. Must be 0 wherever the prior is 0.
        score: ``s``, ``(..., Lk)``, finite.
        log_prior: ``K``, in nats, ``(..., Lk)``, normalised or not; ``-inf`` where a key is hidden. A query without
            visible keys has no plan and returns nan.
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
    # Without this mask, a plan of zeros would cost nothing.
    return (plan * (temperature * excess - score)).sum(-1).masked_fill(blind, torch.nan)


def transport_plan(score: Tensor, log_prior: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the unique minimiser of :func:`transport_objective`: ``softmax(s / τ + ln π)``, ``(..., Lk)``.

    Source: GOAT, Propositions 2.2 (uniform prior) and 3.1.

    Args:
        score: see :func:`transport_objective`.
        log_prior: see :func:`transport_objective`.
        temperature: see :func:`transport_objective`.
    """
    _check_temperature(temperature)
    return (score / temperature + log_prior).softmax(-1)


def transport_minimum(score: Tensor, log_prior: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the minimum of :func:`transport_objective`, ``-τ ln Σ_j π_j e^(s_j / τ)``, in nats, ``(...)``.

    Any other plan ``p`` exceeds the minimum by exactly ``τ KL(p ‖ p*)``.

    Args:
        score: see :func:`transport_objective`.
        log_prior: see :func:`transport_objective`.
        temperature: see :func:`transport_objective`.
    """
    _check_temperature(temperature)
    return -temperature * ((score / temperature + log_prior).logsumexp(-1) - log_prior.logsumexp(-1))


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a positive finite number, got {temperature!r}")
