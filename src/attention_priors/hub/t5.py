"""T5's attention, with its relative bias as a prior. Classes have the names of those they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.models.mt5 import modeling_mt5
from transformers.models.t5 import modeling_t5
from transformers.models.umt5 import modeling_umt5

from attention_priors.hub.key_masks import attend_with_cache, is_padding, key_mask, refuse_attention_weights
from attention_priors.priors import Prior, RelativeBuckets


class _Stack:
    """Hands the padding mask down instead of a dense one."""

    def forward(self, input_ids: Any = None, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers', but there are no attention weights to output."""
        refuse_attention_weights(self, kwargs.get("output_attentions"))
        inputs_embeds = kwargs.get("inputs_embeds", args[2] if len(args) > 2 else None)
        inputs = inputs_embeds if input_ids is None else input_ids
        if inputs is not None:
            attention_mask = key_mask(attention_mask, inputs)
        return super().forward(input_ids, attention_mask, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class T5Stack(_Stack, modeling_t5.T5Stack):
    """T5's encoder or decoder."""


class MT5Stack(_Stack, modeling_mt5.MT5Stack):
    """mT5's encoder or decoder."""


class UMT5Stack(_Stack, modeling_umt5.UMT5Stack):
    """umT5's encoder or decoder."""


def _attend(module: Any, hidden: Tensor, mask: Tensor, scalars: Tensor, cache: Cache | None) -> Tensor:
    """Self-attention; ``scalars`` are those of the buckets, ``(H, num_buckets)``."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    query, key, value = (
        projection(hidden).unflatten(-1, (module.n_heads, module.key_value_proj_dim)).transpose(1, 2)
        for projection in (module.q, module.k, module.v)
    )
    out = attend_with_cache(
        query,
        key,
        value,
        BorrowedBuckets(scalars, module.relative_attention_max_distance, bidirectional=not module.is_decoder),
        mask,
        cache,
        module.layer_idx,
        # A mask of queries and keys says itself what is causal.
        causal=module.is_decoder and is_padding(mask),
        softmax_scale=module.scaling,
        dropout_p=module.dropout if module.training else 0.0,
    )
    return module.o(out.to(hidden.dtype))


class BorrowedBuckets(RelativeBuckets):
    """:class:`RelativeBuckets` whose scalars come with a history, so that gradients reach what they are made of.

    Args:
        scalars: ``(H, num_buckets)``.
        max_distance: as in :class:`RelativeBuckets`.
        bidirectional: as in :class:`RelativeBuckets`.
    """

    def __init__(self, scalars: Tensor, max_distance: int, bidirectional: bool) -> None:
        Prior.__init__(self, scalars.shape[0])
        self.num_buckets = scalars.shape[1]
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        # As torch.func.functional_call does it: a tensor takes the place of a parameter.
        self._parameters["bias"] = scalars  # pyright: ignore[reportArgumentType]


def _own_scalars(module: Any) -> Tensor:
    # A copy: a sharded model takes its parameters back at the end of their block, and later blocks need these.
    weight = module.relative_attention_bias.weight
    return weight.to(torch.promote_types(weight.dtype, torch.float32)).T.clone()


class _T5Attention:
    """``attend()`` with :class:`RelativeBuckets` between T5's own projections.

    What the first block makes for the others is the scalars of the buckets, not the bias of queries and keys.
    """

    def forward(
        self: Any,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Any]:
        """As transformers'; ``position_bias`` holds the scalars of the buckets, ``(H, num_buckets)``."""
        assert mask is not None
        scalars = _own_scalars(self) if position_bias is None else position_bias
        return _attend(self, hidden_states, mask, scalars, past_key_values), scalars, None


class T5Attention(_T5Attention, modeling_t5.T5Attention):
    """T5's self-attention."""


class MT5Attention(_T5Attention, modeling_mt5.MT5Attention):
    """mT5's self-attention."""


class UMT5Attention(modeling_umt5.UMT5Attention):
    """umT5's self-attention: each block has scalars of its own."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As transformers'."""
        assert attention_mask is not None
        return _attend(self, hidden_states, attention_mask, _own_scalars(self), past_key_values), None
