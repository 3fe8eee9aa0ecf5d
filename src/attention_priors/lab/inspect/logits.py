"""The logits of an attention, content and position apart: what every account of it starts from."""

from __future__ import annotations

from dataclasses import dataclass, field

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
