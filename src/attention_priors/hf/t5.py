"""T5's attention, with its relative bias as a prior. Classes have the names of those they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.models.mt5 import modeling_mt5
from transformers.models.t5 import modeling_t5
from transformers.models.umt5 import modeling_umt5

from attention_priors.attention import attend
from attention_priors.hf.replacing import attend_with_cache, refuse_attention_weights
from attention_priors.models.masks import is_about_keys, keys_of_layer, layer_mask
from attention_priors.priors import Prior, RelativeBuckets


class _Stack:
    """Hands the padding mask down instead of a dense one."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the stack; attention weights cannot be output."""
        refuse_attention_weights(self, kwargs.get("output_attentions"))
        inputs = inputs_embeds if input_ids is None else input_ids
        if inputs is not None:
            attention_mask = layer_mask(attention_mask, inputs)
        if encoder_hidden_states is not None:
            encoder_attention_mask = layer_mask(encoder_attention_mask, encoder_hidden_states)
        theirs: Any = super()
        return theirs.forward(
            input_ids, attention_mask, encoder_hidden_states, encoder_attention_mask, inputs_embeds, *args, **kwargs
        )


class T5Stack(_Stack, modeling_t5.T5Stack):
    """T5's encoder or decoder."""


class MT5Stack(_Stack, modeling_mt5.MT5Stack):
    """mT5's encoder or decoder."""


class UMT5Stack(_Stack, modeling_umt5.UMT5Stack):
    """umT5's encoder or decoder."""


def _heads(module: Any, projection: Any, hidden: Tensor) -> Tensor:
    """``(B, L, width)`` to ``(B, H, L, D)``."""
    return projection(hidden).unflatten(-1, (module.n_heads, module.key_value_proj_dim)).transpose(1, 2)


def _dropout_p(module: Any) -> float:
    return module.dropout if module.training else 0.0


def _attend_to_self(module: Any, hidden: Tensor, mask: Tensor, scalars: Tensor, cache: Cache | None) -> Tensor:
    """Self-attention; ``scalars`` are those of the buckets, ``(H, num_buckets)``."""
    out = attend_with_cache(
        _heads(module, module.q, hidden),
        _heads(module, module.k, hidden),
        _heads(module, module.v, hidden),
        BorrowedBuckets(scalars, module.relative_attention_max_distance, bidirectional=not module.is_decoder),
        mask,
        cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache,
        module.layer_idx,
        # A mask of queries and keys says itself what is causal.
        causal=module.is_decoder and is_about_keys(mask),
        softmax_scale=module.scaling,
        dropout_p=_dropout_p(module),
    )
    return module.o(out.to(hidden.dtype))


def _attend_to_encoder(module: Any, hidden: Tensor, encoded: Tensor, mask: Tensor, cache: Cache | None) -> Tensor:
    """Cross-attention, which has no bias; its keys and values are computed once and kept."""
    both = cache if isinstance(cache, EncoderDecoderCache) else None
    own: Any = cache if both is None else both.cross_attention_cache
    index = module.layer_idx
    if both is not None and both.is_updated.get(index):
        key, value = own.layers[index].keys, own.layers[index].values
    else:
        key, value = _heads(module, module.k, encoded), _heads(module, module.v, encoded)
        if own is not None:
            key, value = own.update(key, value, index)
        if both is not None:
            both.is_updated[index] = True
    query = _heads(module, module.q, hidden)
    keys = keys_of_layer(mask, query, key, key.shape[2] - query.shape[2], causal=False)
    options = keys.options(None) | {"softmax_scale": module.scaling, "dropout_p": _dropout_p(module)}
    out = attend(query, key, value, **options)
    return module.o(out.transpose(1, 2).flatten(-2).to(hidden.dtype))


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
    """``attend()`` between T5's own projections: with :class:`RelativeBuckets`, and across without a prior.

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
    ) -> tuple[Tensor, Any, Any]:
        """Run the layer's attention; ``position_bias`` holds the scalars of the buckets, ``(H, num_buckets)``."""
        assert mask is not None
        if key_value_states is not None:
            return _attend_to_encoder(self, hidden_states, key_value_states, mask, past_key_values), None, None
        scalars = _own_scalars(self) if position_bias is None else position_bias
        return _attend_to_self(self, hidden_states, mask, scalars, past_key_values), scalars, None


class T5Attention(_T5Attention, modeling_t5.T5Attention):
    """T5's attention."""


class MT5Attention(_T5Attention, modeling_mt5.MT5Attention):
    """mT5's attention."""


class UMT5Attention(modeling_umt5.UMT5Attention):
    """umT5's attention: each block has scalars of its own."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Run the layer's attention."""
        assert attention_mask is not None
        if encoder_hidden_states is not None:
            out = _attend_to_encoder(self, hidden_states, encoder_hidden_states, attention_mask, past_key_values)
        else:
            out = _attend_to_self(self, hidden_states, attention_mask, _own_scalars(self), past_key_values)
        return out, None


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    ours.__bases__[-1]: ours for ours in (T5Stack, MT5Stack, UMT5Stack, T5Attention, MT5Attention, UMT5Attention)
}
"""Classes of transformers, and the ones that take their places."""
