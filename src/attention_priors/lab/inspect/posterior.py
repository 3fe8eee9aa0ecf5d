"""Attention as a posterior: logits with content and position apart, how far the two agree, which trade it is.

Sources: BAM, Theorem 1 and Appendices K and I; GOAT, sections 2 and 3 (entropic optimal transport).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_priors.attention import SSMax
from attention_priors.attention.problem import Problem, make_problem
from attention_priors.attention.reference import dense_logits
from attention_priors.encodings import ShawVectors
from attention_priors.priors import Prior


@dataclass(frozen=True)
class AttentionLogits:
    """``z = f + g`` over queries and keys, in nats.

    Raises:
        ValueError: the shapes do not fit each other.
    """

    content: Tensor
    """``f``, ``(..., Lq, Lk)``, finite: ``c <q_i, k_j> softmax_scale``."""
    position: Tensor
    """``g``, which expands to the shape of ``f``, finite: ``c K_ij``, up to a constant for each query."""
    visible: Tensor
    """True where a query sees a key, which expands to the shape of ``f``."""
    inverse_temperature: Tensor = field(default_factory=lambda: torch.ones(()))
    """``γ``, which expands to ``(..., Lq)``: the logit scale ``c`` that is in ``f``, and in ``g`` unless it leaves the
    prior out."""

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
        """``z``, ``(..., Lq, Lk)``; ``-inf`` where hidden."""
        return (self.content + self.position).masked_fill(~self.visible, -torch.inf)


def attention_logits(
    query: Tensor,
    key: Tensor,
    prior: Prior | None = None,
    *,
    causal: bool = True,
    logit_scale: SSMax | None = None,
    softmax_scale: float | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    relative: ShawVectors | None = None,
) -> AttentionLogits:
    """The logits that :func:`attention_priors.attend` takes the softmax of. Memory: ``B · H · Lq · Lk``.

    Args:
        query: ``(B, H, Lq, D)``, with whatever encoding turns queries.
        key: ``(B, Hkv, Lk, D)``, likewise.
        prior: a log-prior over positions, or None for the uniform one.
        causal: and
        logit_scale: and
        softmax_scale: and
        query_positions: and
        key_positions: and
        document_ids: and
        key_padding_mask: and
        attn_mask: and
        relative: as for :func:`attention_priors.attend`. A float ``attn_mask`` counts as position, and Shaw's
            vectors, which meet the query, as content.

    Returns:
        In float32, or float64 for float64 queries.

    Raises:
        ValueError: as :func:`attention_priors.attend`.
    """
    problem = make_problem(
        query,
        key,
        key,
        prior,
        causal=causal,
        logit_scale=logit_scale,
        softmax_scale=softmax_scale,
        query_positions=query_positions,
        key_positions=key_positions,
        document_ids=document_ids,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        relative=relative,
        dropout_p=0.0,
    )
    return problem_logits(problem)


def problem_logits(problem: Problem) -> AttentionLogits:
    """The logits of a problem that :func:`attend` was asked, ``(B, H, Lq, Lk)``."""
    content, position, _, hidden = dense_logits(problem)
    position = content.new_zeros(()) if position is None else position
    visible = torch.ones((), dtype=torch.bool, device=content.device) if hidden is None else ~hidden
    scale = content.new_ones(()) if problem.row_scale is None else problem.row_scale
    return AttentionLogits(content, position, visible, scale)


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
