"""BLOOM's attention, with ALiBi as a prior. Classes are named as those they stand for: models are saved by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.bloom import modeling_bloom

from attention_priors.hf.replacing import attend_with_cache, prior_for, refuse_attention_weights
from attention_priors.models.masks import first_token, layer_mask
from attention_priors.priors import Laplace


class BloomModel(modeling_bloom.BloomModel):
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
        """As transformers'; ``attention_mask`` has two dimensions, and there are no attention weights to output."""
        refuse_attention_weights(self, output_attentions)
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask must have shape (batch, length), got {tuple(attention_mask.shape)}")
        if (input_ids is None) != (inputs_embeds is None):
            attention_mask = layer_mask(attention_mask, inputs_embeds if input_ids is None else input_ids)
        return super().forward(
            input_ids, past_key_values, attention_mask, inputs_embeds, use_cache, output_attentions, *args, **kwargs
        )

    def build_alibi_tensor(self, attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Any:
        """Each token's place among the tokens that are not padding, ``(B, L)``; None if slots are as far apart."""
        tokens = attention_mask[:, 0, 0]
        if tokens.shape[-1] == 0:
            return None
        positions = tokens.cumsum(-1) - 1
        if not torch.compiler.is_compiling():
            slots = torch.arange(tokens.shape[-1], device=tokens.device)
            if not bool((tokens & (positions != slots - first_token(tokens))).any()):
                return None
        return positions


class BloomAttention(modeling_bloom.BloomAttention):
    """``attend()`` with :class:`Laplace` between BLOOM's own projections."""

    prior: Laplace

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor,
        layer_past: Cache | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As transformers', but ``alibi`` and ``attention_mask`` are what :class:`BloomModel` makes of them."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        out = attend_with_cache(
            query,
            key,
            value,
            prior_for(self, query.device),
            attention_mask,
            layer_past,
            self.layer_idx,
            positions=alibi,
            dropout_p=self.attention_dropout.p if self.training else 0.0,
        )
        # With pretraining_tp and slow_but_exact transformers adds up this product in slices: the same but for rounding.
        out = self.dense(out.to(hidden_states.dtype))
        return modeling_bloom.dropout_add(out, residual, self.hidden_dropout, self.training), None
