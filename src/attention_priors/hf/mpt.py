"""MPT's attention, with ALiBi as a prior. Classes are named as those they stand for: models are saved by them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.mpt import modeling_mpt

from attention_priors.checks import check_above, check_positive_integers
from attention_priors.hf.replacing import attend_with_cache, prior_for, refuse_attention_weights
from attention_priors.models.masks import Keys, layer_mask, past_tokens, sees_the_future
from attention_priors.priors import Laplace


def mpt_slopes(num_heads: int, alibi_bias_max: float = 8.0) -> list[float]:
    """MPT's slopes, in nats per token: ``2^(-alibi_bias_max (h + 1) / P)`` with ``P`` the power of two from ``H`` on.

    If ``H`` is not that power: every other of these, from the second on, then the others, until there are ``H``.

    Source: MosaicML's llm-foundry, ``gen_slopes``.

    Args:
        num_heads: ``H``.
        alibi_bias_max: the least slope is ``2^-alibi_bias_max``.
    """
    check_positive_integers(num_heads=num_heads)
    check_above(0, alibi_bias_max=alibi_bias_max)
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-alibi_bias_max * (head + 1) / power) for head in range(power)]
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


class MptModel(modeling_mpt.MptModel):
    """Hands the padding mask down instead of a dense one."""

    def forward(
        self,
        input_ids: Any = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As transformers', but there are no attention weights to output."""
        refuse_attention_weights(self, output_attentions)
        if (input_ids is None) != (inputs_embeds is None):
            if attention_mask is not None and attention_mask.dim() == 4:
                attention_mask = _causal_mask(attention_mask, past_key_values)
            attention_mask = layer_mask(attention_mask, inputs_embeds if input_ids is None else input_ids)
        return super().forward(
            input_ids, past_key_values, attention_mask, inputs_embeds, use_cache, output_attentions, *args, **kwargs
        )

    def build_mpt_alibi_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing: the prior takes its place."""
        return None


def _causal_mask(mask: Tensor, cache: Cache | None) -> Tensor:
    """What is visible by a mask of queries and keys, which transformers takes to hide whatever is not 0."""
    visible = mask == 0
    if sees_the_future(~visible, Keys(mask.device, past_tokens(cache), mask.shape[-2], mask.shape[-1])):
        raise ValueError(
            "attention_mask lets queries see later keys, where ALiBi as transformers computes it favours the last key "
            "of the sequence and not the nearest; give a causal mask, or one of shape (batch, length)"
        )
    return visible


class MptAttention(modeling_mpt.MptAttention):
    """``attend()`` with :class:`Laplace` between MPT's own projections."""

    prior: Laplace

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Any,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As transformers', but ``attention_mask`` is what :class:`MptModel` makes of it."""
        assert attention_mask is not None
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            part.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for part in mixed.chunk(3, dim=2)
        )
        out = attend_with_cache(
            query,
            key,
            value,
            prior_for(self, query.device),
            attention_mask,
            past_key_values,
            self.layer_idx,
            softmax_scale=self.softmax_scale,
            dropout_p=self.attn_dropout_p if self.training else 0.0,
        )
        return self.out_proj(out.to(hidden_states.dtype)), None
