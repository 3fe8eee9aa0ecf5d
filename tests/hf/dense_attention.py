"""Expected results of attached models, by the dense formula and transformers' own mask matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from attention_priors.hf.interface import ATTRIBUTE, IMPLEMENTATION, register


def _mask(**arguments: Any) -> Tensor | None:
    whole: dict[str, Any] = arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**whole)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float = 1.0,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return positions of one text per row, without a cache: slots, except for left padding."""
    attached = getattr(module, ATTRIBUTE, None)
    group, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    visible = attention_mask.expand(len(query), 1, length, length)
    logits = (query @ key.mT).double() * scaling
    if attached is not None and attached.prior is not None:
        sees_itself = visible.diagonal(dim1=-2, dim2=-1)[:, 0]
        first = sees_itself.int().argmax(-1, keepdim=True)
        positions = torch.arange(length) - first
        log_prior = attached.prior.log_prior(positions, positions, torch.float64)
    else:
        log_prior = torch.zeros(())
    scale = torch.ones((), dtype=torch.float64)
    include = True
    if attached is not None and attached.logit_scale is not None:
        scale = attached.logit_scale(visible.sum(-1), torch.float64).unsqueeze(-1)
        include = attached.logit_scale.include_prior
    logits = (logits + log_prior) * scale if include else logits * scale + log_prior
    logits = logits.masked_fill(~visible, float("-inf"))
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], dim=-1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., :length]
    return (weights.to(value.dtype) @ value).transpose(1, 2), None


@torch.no_grad()
def dense_logits(model: Any, **inputs: Any) -> Tensor:
    """Compute the attached model's logits with attention by the dense formula."""
    # The name stays: an attached model refuses another attention implementation.
    AttentionInterface.register(IMPLEMENTATION, _forward)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    try:
        return model(**inputs, use_cache=False).logits
    finally:
        register()
