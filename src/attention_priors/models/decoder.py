"""Llama-style decoder language model whose attention has a prior.

The architecture has RMSNorm before each part, SwiGLU, no biases and grouped-query attention. Positions enter by a
prior, an encoding, both or neither. The classes are transformers models: ``generate``, ``save_pretrained`` and
``from_pretrained`` (safetensors), and ``Trainer`` work. Importing this module registers the model with ``AutoConfig``,
``AutoModel`` and ``AutoModelForCausalLM``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
)
from transformers.cache_utils import Cache
from transformers.initialization import copy_
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple
from transformers.utils.logging import get_logger
from transformers.utils.output_capturing import capture_outputs

from attention_priors.attention import ForgetGate, NullKey, ShardedSequence, attend_across
from attention_priors.attention.forget_gate import KEY_BIASES, last_of_documents
from attention_priors.checks import check_booleans, check_positive_integers, check_share
from attention_priors.config import build
from attention_priors.encodings import AdditiveEncoding, Encoding, Rotary, ShawVectors, encoding_from_config
from attention_priors.models.layer_kinds import check_layer_kinds, kind_of_layer
from attention_priors.models.masks import Keys, keys_of_call, keys_of_layer
from attention_priors.models.pretrained import PriorConfig, PriorPreTrainedModel, attend_over, embedded, refuse_unknown
from attention_priors.priors import Prior, Sum, Window
from attention_priors.priors.base import check_over_line

logger = get_logger(__name__)

LAYER_PARTS = ("prior", "encoding", "logit_scale", "null_logit", "key_bias")
"""Parts that may differ between layers: names of config fields, and of the attention modules built from them."""


class PriorDecoderConfig(PriorConfig):
    """Configuration of a decoder.

    ``prior``, ``encoding``, ``logit_scale``, ``null_logit`` and ``key_bias`` are plain descriptions, as ``to_config()``
    returns them. ``num_heads``, ``head_dim`` and ``width`` may be omitted. Examples are
    ``prior={"name": "generalized_gaussian", "init": "uniform"}``, ``encoding="rotary"`` and
    ``logit_scale={"name": "ssmax", "init": 1.0}``. A list of priors is their sum.

    Layers may differ. ``layer_pattern`` names the kind of each layer and repeats; ``layer_kinds`` describes each kind:
    ``layer_pattern=["local", "local", "local", "global"]``, ``layer_kinds={"local": {"encoding": "rotary", "prior":
    {"name": "window", "size": 512}}, "global": {}}``. A kind inherits the parts that it does not describe from the
    config.

    Args:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU layers.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads. ``num_attention_heads`` by default.
        head_dim: width of a head. ``hidden_size / num_attention_heads`` by default.
        rms_norm_eps: epsilon of the norms.
        initializer_range: standard deviation of the initial weights.
        equal_projections: whether each head's key projection starts equal to its query projection. Query heads that
            share a key head start with different ones; the key head equals the first. A token's content logit is then
            highest for tokens like itself.
        tie_word_embeddings: whether the output layer is the transpose of the embedding.
        prior: description of the log-prior. None for no prior.
        share_prior: whether all layers share one prior (T5). Otherwise each layer has its own (BAM).
        encoding: description of an encoding, or None.
        logit_scale: description of a logit scale, or None. Each layer learns its own.
        null_logit: description of a :class:`NullKey`, or None. Each layer learns its own.
        key_bias: description of a :class:`ForgetGate` or :class:`Cable`, or None. Each layer learns its own.
        layer_pattern: kind names, repeated over the layers. None if all layers are alike.
        layer_kinds: description of each kind by name.
        tolerance: share of its attention weight that a query may lose, as for :func:`attend`. Keys that provably weigh
            less are not read. The default, 0, is exact. In generation, all keys are read.
    """

    model_type = "prior_decoder"
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "PriorDecoderConfig",
        "AutoModel": "PriorDecoderModel",
        "AutoModelForCausalLM": "PriorDecoderForCausalLM",
    }
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012

    vocab_size: int = 32768
    hidden_size: int = 768
    intermediate_size: int = 1536
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    equal_projections: bool = False
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    encoding: dict[str, Any] | str | None = None
    null_logit: dict[str, Any] | str | None = None
    key_bias: dict[str, Any] | str | None = None
    layer_pattern: list[str] | None = None
    layer_kinds: dict[str, dict[str, Any]] | None = None
    tolerance: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        check_positive_integers(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} must be a multiple of "
                    f"num_attention_heads={self.num_attention_heads}, or head_dim must be set"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        check_positive_integers(head_dim=self.head_dim)
        check_share(tolerance=self.tolerance)
        check_booleans(equal_projections=self.equal_projections)
        check_layer_kinds(self.layer_pattern, self.layer_kinds, LAYER_PARTS, self.share_prior)
        super().__post_init__(**kwargs)
        # Build all parts once on the meta device, so that a mistake raises here and not after loading weights.
        for kind in [self, *(self._with(kind) for kind in (self.layer_kinds or {}).values())]:
            with torch.device("meta"):
                check_over_line(kind.make_prior())
                encoding = kind.make_encoding()
                kind.make_logit_scale()
                kind.make_null_logit()
                kind.make_key_bias()
            if isinstance(encoding, AdditiveEncoding) and kind.encoding is not self.encoding:
                raise ValueError(
                    f"layer_kinds: the encoding {encoding.name!r} is added to the embeddings, which all layers share; "
                    "set encoding on the config instead"
                )

    def _with(self, parts: Mapping[str, Any]) -> PriorDecoderConfig:
        layer = copy.copy(self)
        for name, description in {"layer_pattern": None, "layer_kinds": None, **parts}.items():
            setattr(layer, name, description)
        return layer

    def of_layer(self, index: int) -> PriorDecoderConfig:
        """Return the config of a decoder whose layers are all of this layer's kind."""
        return self._with(kind_of_layer(self.layer_pattern, self.layer_kinds, index))

    def parts_of_layers(self) -> dict[int, dict[str, Any]]:
        """Return the description of each layer's parts, by the index of the layer and the name of the part."""
        layers = {index: self.of_layer(index) for index in range(self.num_hidden_layers)}
        return {
            index: {name.replace("_", " "): getattr(layer, name) for name in LAYER_PARTS}
            for index, layer in layers.items()
        }

    @property
    def layer_types(self) -> list[str]:
        """Cache type of each layer, as named by transformers.

        Layers with a gate also cache the gate's running sum. Layers with a :class:`Window` cache no keys outside it,
        unless they have a gate, which sums over all keys, or a logit scale, which counts them.
        """
        types: list[str] = []
        for index in range(self.num_hidden_layers):
            kind = kind_of_layer(self.layer_pattern, self.layer_kinds, index)
            if kind.get("key_bias", self.key_bias) is not None:
                types.append("indexed_attention")
            else:
                types.append("full_attention" if self.window_of_kind(kind) is None else "sliding_attention")
        return types

    @property
    def sliding_window(self) -> int | None:
        """Largest window, in tokens with the query's own, of the layers that cache no keys outside it; else None."""
        windows = map(self.window_of_kind, (self.layer_kinds or {"": {}}).values())
        # A cache of transformers with a window of 1 would hold all keys.
        return max((max(2, window) for window in windows if window is not None), default=None)

    @sliding_window.setter
    def sliding_window(self, size: Any) -> None:
        raise ValueError(
            f"sliding_window={size!r} cannot be set, because it follows from the priors; describe a window as "
            'prior={"name": "window", "size": ...}'
        )

    def window_of_kind(self, kind: Mapping[str, Any]) -> int | None:
        """Return the window of a kind of layer that needs no keys outside it; None for other kinds."""
        prior, *others = (kind.get(part, getattr(self, part)) for part in ("prior", "key_bias", "logit_scale"))
        return None if any(part is not None for part in others) else min(_window_sizes(prior), default=None)

    def make_encoding(self) -> Encoding | None:
        """Build the encoding from its description."""
        assert self.head_dim is not None
        return encoding_from_config(self.encoding, width=self.hidden_size, head_dim=self.head_dim)

    def make_null_logit(self) -> NullKey | None:
        """Build the null key from its description."""
        given, known = self.null_logit, {NullKey.name: NullKey}
        return None if given is None else build("null logit", known, given, num_heads=self.num_attention_heads)

    def make_key_bias(self) -> ForgetGate | None:
        """Build the gate from its description."""
        sizes: dict[str, Any] = {"num_heads": self.num_attention_heads, "width": self.hidden_size}
        return None if self.key_bias is None else build("key bias", KEY_BIASES, self.key_bias, **sizes)


def _window_sizes(prior: Any) -> list[int]:
    """Return the sizes of all windows in the description of a prior. Invalid descriptions are refused elsewhere."""
    if isinstance(prior, Mapping):
        name, size = prior.get("name"), prior.get("size")
        if name == Window.name and isinstance(size, int):
            return [size]
        prior = prior.get("priors") if name == Sum.name else None
    return [size for part in prior for size in _window_sizes(part)] if isinstance(prior, list | tuple) else []


class DecoderAttention(nn.Module):
    """Causal attention layer: projections around :func:`attend`."""

    def __init__(self, config: PriorDecoderConfig, layer_index: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.tolerance = config.tolerance
        self.window = config.window_of_kind({})
        query_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.prior = None if config.share_prior else config.make_prior()
        self.logit_scale = config.make_logit_scale()
        self.null_logit = config.make_null_logit()
        self.key_bias = config.make_key_bias()
        encoding = config.make_encoding()
        self.encoding = encoding if isinstance(encoding, Rotary | ShawVectors) else None

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        keys: Keys | ShardedSequence,
        last: slice,
        *,
        shared_prior: Prior | None = None,
        cache: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output ``(B, Lq, hidden_size)`` of the queries in ``last``; other tokens are keys only.

        The second result is the weights ``(B, H, Lq, num_keys)`` with ``output_attentions``, else None.
        """
        query, key, value = (
            projection(tokens).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection, tokens in ((self.q_proj, hidden[:, last]), (self.k_proj, hidden), (self.v_proj, hidden))
        )
        if isinstance(self.encoding, Rotary):
            query = self.encoding(query, positions[:, last])
            key = self.encoding(key, positions)
        if isinstance(keys, ShardedSequence) and self.key_bias is not None:
            raise ValueError(
                "a model with gates cannot take a sequence; compute key_bias over all processes and call attend_across"
            )
        key_bias = None if isinstance(keys, ShardedSequence) else self._key_bias(hidden, keys, cache)
        if cache is not None:
            if isinstance(keys, Keys):
                keys = keys_of_layer(keys, cache, self.layer_index, self.window)
            key, value = cache.update(key, value, self.layer_index)
        prior = self.prior if shared_prior is None else shared_prior
        relative = self.encoding if isinstance(self.encoding, ShawVectors) else None
        if isinstance(keys, ShardedSequence):
            if relative is not None:
                raise ValueError("a model with Shaw's vectors cannot take a sequence")
            out = attend_across(
                query,
                key,
                value,
                prior,
                sequence=keys,
                logit_scale=self.logit_scale,
                null_logit=self.null_logit,
                tolerance=self.tolerance,
            )
            return self.o_proj(out.transpose(1, 2).flatten(-2)), None
        keys = keys.last(query.shape[2])
        if key_bias is not None:
            key_bias = key_bias[..., : keys.in_use]
        parts = {"relative": relative, "null_logit": self.null_logit, "key_bias": key_bias}
        options: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
        if self.tolerance:
            options["tolerance"] = self.tolerance
        options["logit_scale"] = self.logit_scale
        used = relative, self.null_logit
        out, weights = attend_over(query, key, value, prior, keys, output_attentions, *used, **options)
        return self.o_proj(out.flatten(-2)), weights

    def _key_bias(self, hidden: Tensor, keys: Keys, cache: Cache | None) -> Tensor | None:
        """Return the gate's bias of every key, ``(B, H, num_keys)``. The cache holds the running sum."""
        if self.key_bias is None:
            return None
        layer: Any = None if cache is None or len(cache) <= self.layer_index else cache.layers[self.layer_index]
        if cache is not None and not hasattr(layer, "update_indexer"):
            raise ValueError("cache cannot hold the gates' sums; create the cache with config=model.config")
        if keys.forbidden is not None:
            raise ValueError(
                "a model with gates cannot take a 4-D attention_mask: gates sum over all tokens, hidden or not; use a "
                "2-D attention_mask for padding, and document_ids for documents"
            )
        documents, kept, before = keys.of_queries(keys.documents), getattr(layer, "indexer_keys", None), None
        if kept is not None:
            if getattr(cache, "offloading", False):
                # Prefetching of this layer from the host may be in progress; Cache.update waits in this way too.
                stream: Any = getattr(cache, "prefetch_stream")  # noqa: B009
                torch.cuda.default_stream(hidden.device).wait_stream(stream)
            past = keys.query_offset
            if documents is None:
                # The sum before the first token is 0.
                sums = pad(kept, (0, 0, 1, 0))
                before = sums.index_select(1, past.view(1)) if isinstance(past, Tensor) else sums[:, past : past + 1]
                before = before.transpose(1, 2)
            else:
                assert keys.documents is not None
                # A static cache ends in empty slots, which document_ids may or may not cover.
                slots = torch.arange(min(kept.shape[1], keys.documents.shape[1]), device=kept.device)
                so_far = keys.documents[:, : len(slots)].masked_fill(slots >= past, torch.iinfo(torch.int64).max)
                before = last_of_documents(kept[:, : len(slots)].transpose(1, 2), so_far, documents)
        new = self.key_bias(
            hidden, key_padding_mask=keys.of_queries(keys.padding), document_ids=documents, before=before
        )
        return new if cache is None else cache.update_indexer(new.transpose(1, 2), self.layer_index).transpose(1, 2)


class SwiGLU(nn.Module):
    """SwiGLU layer: ``W_down (silu(W_gate x) ⊙ W_up x)``."""

    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``(B, L, hidden_size)`` to ``(B, L, hidden_size)``."""
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(GradientCheckpointingLayer):
    """Attention and SwiGLU, each after a norm and added to the residual stream."""

    def __init__(self, config: PriorDecoderConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DecoderAttention(config.of_layer(layer_index), layer_index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        keys: Keys | ShardedSequence,
        last: slice,
        **options: Any,
    ) -> Tensor:
        """Return the hidden states ``(B, Lq, hidden_size)`` of the tokens in ``last``; options as for the attention."""
        attended, _ = self.self_attn(self.input_layernorm(hidden), positions, keys, last, **options)
        hidden = hidden[:, last] + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class PriorDecoderPreTrainedModel(PriorPreTrainedModel):
    """Base class of the decoder's models, with settings for transformers."""

    config: PriorDecoderConfig
    config_class = PriorDecoderConfig
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "shared_prior"]  # noqa: RUF012
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": DecoderAttention}  # noqa: RUF012

    def initialize_weights(self) -> None:
        """Initialize all weights that are not loaded, as transformers does, and equal projections."""
        super().initialize_weights()
        for module in self.modules() if self.config.equal_projections else ():
            if isinstance(module, DecoderAttention):
                heads = module.q_proj.weight.unflatten(0, (-1, module.head_dim))
                group = len(module.q_proj.weight) // len(module.k_proj.weight)
                copy_(module.k_proj.weight, heads[::group].flatten(0, 1))

    @staticmethod
    def create_masks_for_generate(config: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """Return the padding mask unchanged, where ``generate`` would build a dense mask for a static cache."""
        return attention_mask


class PriorDecoderModel(PriorDecoderPreTrainedModel):
    """Decoder without its output layer."""

    def __init__(self, config: PriorDecoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.prior = config.make_prior() if config.share_prior else None
        encoding = config.make_encoding()
        self.encoding = encoding if isinstance(encoding, AdditiveEncoding) else None
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        document_ids: Tensor | None = None,
        sequence: ShardedSequence | None = None,
        states_to_keep: int = 0,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states of the new tokens. Arguments are those of :meth:`PriorDecoderForCausalLM.forward`.

        ``states_to_keep`` limits the result to the last hidden states (0 = all). The last layer then computes these
        states and the cache only.
        """
        if kwargs.get("is_causal") is False:
            raise ValueError("is_causal must not be False: the decoder is causal; use PriorEncoderModel instead")
        advice = "pass a cache as cache, and mark packed documents by document_ids or position_ids"
        refuse_unknown(kwargs, "the decoder", "is_causal", "num_items_in_batch", advice=advice)
        hidden = embedded(self.embed_tokens, input_ids, inputs_embeds)
        if cache is not None and not isinstance(cache, Cache):
            raise ValueError(f"cache must be a transformers Cache such as DynamicCache, got {type(cache).__name__}")
        output_attentions = bool(kwargs.get("output_attentions", self.config.output_attentions))
        if sequence is not None and (output_attentions or states_to_keep):
            name = "output_attentions" if output_attentions else "logits_to_keep"
            raise ValueError(f"{name} is not supported with a sequence, whose tokens are spread over processes")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and sequence is None
        # Without gradients, no layer is recomputed: generate() keeps its cache in training.
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if recomputes and (use_cache or cache is not None):
            if cache is not None and cache.get_seq_length():
                raise ValueError("cache must be empty or None in training with gradient checkpointing")
            logger.warning_once(
                "use_cache=True does not work with gradient checkpointing, which recomputes layers: use_cache=False"
            )
            use_cache, cache = False, None
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        said = {"attention_mask": attention_mask, "position_ids": position_ids, "document_ids": document_ids}
        if sequence is None:
            batch, length, _ = hidden.shape
            keys = keys_of_call(batch, length, hidden.device, **said, cache=cache)
        elif cache is None and all(x is None for x in said.values()):
            keys = sequence
        else:
            raise ValueError(
                "sequence already holds positions, documents and padding, and has no cache; remove attention_mask, "
                "position_ids, document_ids, cache and use_cache"
            )
        positions = keys.positions.to(hidden.device)
        if self.encoding is not None:
            hidden = hidden + self.encoding(positions).to(hidden.dtype)
        # Early exit of generate() makes a draft model of the first layers by lowering num_hidden_layers.
        layers = self.layers[: self.config.num_hidden_layers]
        for layer in layers:
            last = slice(-states_to_keep if layer is layers[-1] and states_to_keep else None, None)
            hidden = layer(
                hidden,
                positions,
                keys,
                last,
                shared_prior=self.prior,
                cache=cache,
                output_attentions=output_attentions,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), cache=cache if use_cache else None)


class PriorDecoderForCausalLM(PriorDecoderPreTrainedModel, GenerationMixin):
    """Decoder with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PriorDecoderConfig) -> None:
        super().__init__(config)
        self.model = PriorDecoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        document_ids: Tensor | None = None,
        sequence: ShardedSequence | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the next tokens.

        Args:
            input_ids: new tokens, ``(B, L)``.
            attention_mask: ``(B, past + L)``, 1 for tokens and 0 for padding. Or a 4-D mask
                ``(B or 1, H or 1, L, past + L)`` in addition to the causal mask, boolean (True = may see) or added to
                the logits. A 4-D mask is dense.
            position_ids: positions of all tokens, ``(B, past + L)``, cached ones included, because a prior needs them.
                By default positions count from the first token that is not padding. Where positions do not rise, a new
                document begins, as in batches that transformers packs.
            cache: cache of the previous tokens.
            inputs_embeds: embeddings instead of ``input_ids``. ``(B, L, hidden_size)``.
            labels: ``(B, L)``, aligned with ``input_ids``, -100 = ignore. The loss is the mean in nats per token.
            use_cache: whether to return a cache. By default True in eval mode only.
            logits_to_keep: number of last logits to compute (0 = all), or indices of the logits to compute.
            document_ids: ``(B, past + L)``. Packed documents do not see each other. Compiled code with a static
                cache needs ids of its empty slots too.
            sequence: shards of longer sequences over a group of processes, which must all call at the same time.
                Documents and padding belong to the sequence. For a loss, pass ``shift_labels``, the next token of each
                token, and ``num_items_in_batch`` instead of ``labels``: the token after a shard's last token is in
                another shard. The loss is this process's part of the mean.
            kwargs: ``output_hidden_states``, ``output_attentions`` (dense: memory grows with ``L · (past + L)``),
                ``return_dict``, and ``num_items_in_batch`` and ``shift_labels`` for the loss.

        Raises:
            ValueError: an argument is invalid or conflicts with another. The message says which and why.
        """
        for_loss = {name: kwargs.pop(name) for name in ("num_items_in_batch", "shift_labels") if name in kwargs}
        if sequence is not None and labels is not None:
            raise ValueError("labels is not supported with a sequence; pass shift_labels and num_items_in_batch")
        recorded = any(
            kwargs.get(name, getattr(self.config, name)) for name in ("output_hidden_states", "output_attentions")
        )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            document_ids=document_ids,
            sequence=sequence,
            states_to_keep=logits_to_keep if isinstance(logits_to_keep, int) and not recorded else 0,
            return_dict=True,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None or for_loss.get("shift_labels") is not None:
            if labels is not None and labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels must have the shape of the tokens with logits, {tuple(logits.shape[:2])}, got "
                    f"{tuple(labels.shape)}"
                )
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **for_loss)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    # ---- generate

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
        """Do nothing: the model computes default positions, so that ``position_ids`` always come from the user."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare a generation step as transformers does, with positions and documents of all tokens so far."""
        whole = {name: kwargs.pop(name, None) for name in ("position_ids", "document_ids")}
        inputs = super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        documents = whole["document_ids"]
        if documents is not None:
            # Generated and drafted tokens belong to the last document. A prompt may come in chunks.
            new = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            length = new.shape[1] + (0 if cache is None else int(cache.get_seq_length()))
            more = documents[:, -1:].expand(-1, max(0, length - documents.shape[1]))
            whole["document_ids"] = torch.cat([documents, more], -1)[:, :length]
        return inputs | {name: value for name, value in whole.items() if value is not None}

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: continuous batching runs transformers' attention functions, without priors."""
        raise NotImplementedError("continuous batching is not supported for this model; use generate() with a batch")


AutoConfig.register(PriorDecoderConfig.model_type, PriorDecoderConfig)
AutoModel.register(PriorDecoderConfig, PriorDecoderModel)
AutoModelForCausalLM.register(PriorDecoderConfig, PriorDecoderForCausalLM)
