"""A Llama-style decoder language model whose attention has a prior.

RMSNorm before each part, SwiGLU, no biases, grouped-query attention; position comes from a prior, an
encoding, both or neither. A transformers ``PreTrainedModel``: ``generate``, ``save_pretrained`` and
``from_pretrained`` (safetensors), ``Trainer``. Importing this module registers it with ``AutoConfig``,
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
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple
from transformers.utils.logging import get_logger
from transformers.utils.output_capturing import capture_outputs

from attention_priors.attention import ForgetGate, NullKey, ShardedSequence, attend, attend_across
from attention_priors.attention.attend import attend_with_weights
from attention_priors.attention.forget_gate import key_bias_from_config, last_of_documents
from attention_priors.attention.null_key import null_key_from_config
from attention_priors.checks import check_positive_integers, check_share
from attention_priors.encodings import AdditiveEncoding, Encoding, Rotary, ShawVectors, encoding_from_config
from attention_priors.models.layer_kinds import check_layer_kinds, kind_of_layer
from attention_priors.models.masks import Keys, keys_of_call
from attention_priors.models.pretrained import PriorConfig, PriorPreTrainedModel, beside, embedded, refuse_unknown
from attention_priors.priors import Prior
from attention_priors.priors.base import check_over_line

logger = get_logger(__name__)

LAYER_PARTS = ("prior", "encoding", "logit_scale", "null_logit", "key_bias")
"""Parts that may differ between layers: names of config fields, and of the modules that attention layers build from
them."""


class PriorDecoderConfig(PriorConfig):
    """Configuration of a decoder.

    ``prior``, ``encoding``, ``logit_scale``, ``null_logit`` and ``key_bias`` are plain descriptions, as their
    ``to_config()`` gives them (``num_heads``, ``head_dim`` and ``width`` need not be stated): for instance
    ``prior={"name": "generalized_gaussian", "init": "uniform"}``, ``encoding="rotary"``,
    ``logit_scale={"name": "ssmax", "init": 1.0}``. A list of priors is their sum.

    Layers may differ. ``layer_pattern`` names the kind of each layer and repeats; ``layer_kinds`` describes each kind:
    ``layer_pattern=["local", "local", "local", "global"]``,
    ``layer_kinds={"local": {"encoding": "rotary", "prior": {"name": "window", "size": 512}}, "global": {}}``. A kind
    inherits the parts that it does not describe from the config.

    Args:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU layers.
        num_hidden_layers: number of layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; ``num_attention_heads`` by default.
        head_dim: ``hidden_size / num_attention_heads`` by default.
        rms_norm_eps: of the norms.
        initializer_range: standard deviation of the initial weights.
        tie_word_embeddings: whether the output layer is the embedding's transpose.
        prior: description of the log-prior, or None.
        share_prior: whether all layers share one prior (T5); otherwise each layer has its own (BAM).
        encoding: description of an encoding, or None.
        logit_scale: description of a logit scale, or None. It is learned per layer.
        null_logit: description of a :class:`NullKey`, or None. It is learned per layer.
        key_bias: description of a :class:`ForgetGate` or :class:`Cable`, or None. It is learned per layer.
        layer_pattern: names of kinds, repeated over the layers; None if all layers are alike.
        layer_kinds: description of each kind, by name.
        tolerance: as for :func:`attend`: which share of its weight a query may lose, so that keys which provably weigh
            less need not be read. 0, the default, is exact. Where there is one query, in generation, all keys are read:
            to find out which are needed would take longer.
    """

    model_type = "prior_decoder"
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "PriorDecoderConfig",
        "AutoModel": "PriorDecoderModel",
        "AutoModelForCausalLM": "PriorDecoderForCausalLM",
    }
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 32768
    hidden_size: int = 768
    intermediate_size: int = 1536
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
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
                    f"num_attention_heads={self.num_attention_heads}, unless head_dim is given"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        check_positive_integers(head_dim=self.head_dim)
        check_share(tolerance=self.tolerance)
        check_layer_kinds(self.layer_pattern, self.layer_kinds, LAYER_PARTS)
        if self.share_prior and any("prior" in kind for kind in (self.layer_kinds or {}).values()):
            raise ValueError("share_prior: all layers share one prior, and layer_kinds describes another one")
        super().__post_init__(**kwargs)
        # Build all parts once, without memory, so that a mistake shows here and not after loading weights.
        for kind in [self, *(self._with(kind) for kind in (self.layer_kinds or {}).values())]:
            with torch.device("meta"):
                check_over_line(kind.make_prior())
                encoding = kind.make_encoding()
                kind.make_logit_scale()
                kind.make_null_logit()
                kind.make_key_bias()
            if isinstance(encoding, AdditiveEncoding) and kind.encoding is not self.encoding:
                raise ValueError(
                    f"layer_kinds: the encoding {encoding.name!r} is added to embeddings, which all layers share; "
                    "describe it as the config's encoding"
                )

    def _with(self, parts: Mapping[str, Any]) -> PriorDecoderConfig:
        layer = copy.copy(self)
        for name, description in {"layer_pattern": None, "layer_kinds": None, **parts}.items():
            setattr(layer, name, description)
        return layer

    def of_layer(self, index: int) -> PriorDecoderConfig:
        """Return the config of a decoder all of whose layers are of this layer's kind."""
        return self._with(kind_of_layer(self.layer_pattern, self.layer_kinds, index))

    @property
    def layer_types(self) -> list[str]:
        """Cache types of transformers. Layers with a gate also cache its running sum."""
        gated = [self.of_layer(index).key_bias is not None for index in range(self.num_hidden_layers)]
        return ["indexed_attention" if gate else "full_attention" for gate in gated]

    def make_encoding(self) -> Encoding | None:
        """The encoding that is described."""
        assert self.head_dim is not None
        return encoding_from_config(self.encoding, width=self.hidden_size, head_dim=self.head_dim)

    def make_null_logit(self) -> NullKey | None:
        """Build the null key."""
        return null_key_from_config(self.null_logit, self.num_attention_heads)

    def make_key_bias(self) -> ForgetGate | None:
        """Build the gate."""
        return key_bias_from_config(self.key_bias, self.num_attention_heads, self.hidden_size)


class DecoderAttention(nn.Module):
    """Projections around :func:`attend`."""

    def __init__(self, config: PriorDecoderConfig, layer_index: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.tolerance = config.tolerance
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
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """``(B, L, hidden_size)`` to the same, for the tokens in ``last`` alone: the others are keys only.

        And the weights ``(B, H, L, num_keys)``, if they are asked for.
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
                "sequence: gates sum over tokens, which are spread over processes; give attend_across a key_bias"
            )
        key_bias = None if isinstance(keys, ShardedSequence) else self._key_bias(hidden, keys, past_key_values)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_index)
        prior = self.prior if shared_prior is None else shared_prior
        relative = self.encoding if isinstance(self.encoding, ShawVectors) else None
        # An exported program leaves out nothing; to compare its number of queries would fix it.
        tolerance = 0.0 if torch.compiler.is_exporting() or query.shape[-2] == 1 else self.tolerance
        if isinstance(keys, ShardedSequence):
            if relative is not None:
                raise ValueError("sequence: Shaw's vectors are not computed over tokens that are spread over processes")
            out = attend_across(
                query,
                key,
                value,
                prior,
                sequence=keys,
                logit_scale=self.logit_scale,
                null_logit=self.null_logit,
                tolerance=tolerance,
            )
            return self.o_proj(out.transpose(1, 2).flatten(-2)), None
        keys = keys.last(query.shape[2])
        key, value = keys.trim(key, value)
        options = keys.options(prior) | {
            "logit_scale": self.logit_scale,
            "relative": relative,
            "null_logit": self.null_logit,
            "key_bias": None if key_bias is None else key_bias[..., : key.shape[2]],
        }
        weights = None
        with beside(hidden, prior, relative, self.null_logit):
            if output_attentions:
                out, weights = attend_with_weights(query, key, value, prior, **options)
            else:
                out = attend(query, key, value, prior, tolerance=tolerance, **options)
        return self.o_proj(out.transpose(1, 2).flatten(-2)), weights

    def _key_bias(self, hidden: Tensor, keys: Keys, cache: Cache | None) -> Tensor | None:
        """Return the gate's bias of every key, ``(B, H, num_keys)``; the cache holds the running sum."""
        if self.key_bias is None:
            return None
        layer: Any = None if cache is None or len(cache) <= self.layer_index else cache.layers[self.layer_index]
        if cache is not None and not hasattr(layer, "update_indexer"):
            raise ValueError(
                "past_key_values has no place for the gates' sums; pass one that was made with config=model.config"
            )
        if keys.forbidden is not None:
            raise ValueError(
                "attention_mask has 4 dimensions, and gates sum over all tokens, hidden or not; state padding by an "
                "attention_mask of 2 dimensions, and documents by document_ids"
            )
        documents, kept, before = keys.of_queries(keys.documents), getattr(layer, "indexer_keys", None), None
        if kept is not None:
            if getattr(cache, "offloading", False):
                # The layer may still be on its way from the host; Cache.update waits in the same way.
                stream: Any = getattr(cache, "prefetch_stream")  # noqa: B009
                torch.cuda.default_stream(hidden.device).wait_stream(stream)
            past = keys.query_offset
            if documents is None:
                # The sums before the first token are 0.
                sums = pad(kept, (0, 0, 1, 0))
                before = sums.index_select(1, past.view(1)) if isinstance(past, Tensor) else sums[:, past : past + 1]
                before = before.transpose(1, 2)
            else:
                assert keys.documents is not None
                # A static cache has empty slots at its end, and documents may cover them or not.
                slots = torch.arange(min(kept.shape[1], keys.documents.shape[1]), device=kept.device)
                so_far = keys.documents[:, : len(slots)].masked_fill(slots >= past, torch.iinfo(torch.int64).max)
                before = last_of_documents(kept[:, : len(slots)].transpose(1, 2), so_far, documents)
        new = self.key_bias(
            hidden, key_padding_mask=keys.of_queries(keys.padding), document_ids=documents, before=before
        )
        return new if cache is None else cache.update_indexer(new.transpose(1, 2), self.layer_index).transpose(1, 2)


class SwiGLU(nn.Module):
    """``W_down (silu(W_gate x) ⊙ W_up x)``."""

    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``(B, L, hidden_size)`` to the same."""
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
        *,
        shared_prior: Prior | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> Tensor:
        """``(B, L, hidden_size)`` to the same, for the tokens in ``last`` alone."""
        attended, _ = self.self_attn(
            self.input_layernorm(hidden),
            positions,
            keys,
            last,
            shared_prior=shared_prior,
            past_key_values=past_key_values,
            output_attentions=output_attentions,
        )
        hidden = hidden[:, last] + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class PriorDecoderPreTrainedModel(PriorPreTrainedModel):
    """Settings of transformers that all classes of the decoder share."""

    config: PriorDecoderConfig
    config_class = PriorDecoderConfig
    base_model_prefix = "model"
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "shared_prior"]  # noqa: RUF012
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": DecoderAttention}  # noqa: RUF012

    @staticmethod
    def create_masks_for_generate(
        config: PriorDecoderConfig,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """``generate`` would make a dense mask for a static cache; the model wants the padding mask itself."""
        return attention_mask


class PriorDecoderModel(PriorDecoderPreTrainedModel):
    """The decoder without its output layer."""

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
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        document_ids: Tensor | None = None,
        sequence: ShardedSequence | None = None,
        states_to_keep: int = 0,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the new tokens; arguments as in :meth:`PriorDecoderForCausalLM.forward`.

        With ``states_to_keep``, only the last so many of them (0 = all): the last layer, which no other reads,
        then computes no more than those and what the cache keeps.
        """
        if kwargs.get("is_causal") is False:
            raise ValueError("is_causal=False: the decoder is causal; PriorEncoderModel sees in both directions")
        advice = "packed documents are told by document_ids or position_ids"
        refuse_unknown(kwargs, "the decoder", "is_causal", "num_items_in_batch", advice=advice)
        hidden = embedded(self.embed_tokens, input_ids, inputs_embeds)
        if past_key_values is not None and not isinstance(past_key_values, Cache):
            raise ValueError(
                f"past_key_values must be a transformers Cache, as DynamicCache, got {type(past_key_values).__name__}"
            )
        output_attentions = bool(kwargs.get("output_attentions", self.config.output_attentions))
        if sequence is not None and (output_attentions or states_to_keep):
            name = "output_attentions" if output_attentions else "logits_to_keep"
            raise ValueError(f"{name} cannot be given with a sequence: each process has a share of its tokens")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and sequence is None
        if self.gradient_checkpointing and self.training and (use_cache or past_key_values is not None):
            if past_key_values is not None and past_key_values.get_seq_length():
                raise ValueError("past_key_values must be empty or None in training with gradient checkpointing")
            logger.warning_once(
                "gradient checkpointing recomputes layers, which would fill a cache twice: use_cache=False"
            )
            use_cache, past_key_values = False, None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        said = {"attention_mask": attention_mask, "position_ids": position_ids, "document_ids": document_ids}
        if sequence is None:
            batch, length, _ = hidden.shape
            keys = keys_of_call(batch, length, hidden.device, **said, cache=past_key_values)
        elif past_key_values is None and all(x is None for x in said.values()):
            keys = sequence
        else:
            raise ValueError(
                "sequence holds positions, documents and padding itself, and has no cache: give it without "
                "attention_mask, position_ids, document_ids, past_key_values and use_cache"
            )
        positions = keys.positions.to(hidden.device)
        if self.encoding is not None:
            hidden = hidden + self.encoding(positions).to(hidden.dtype)
        # generate's early exit makes a draft model of the first layers by lowering that number.
        layers = self.layers[: self.config.num_hidden_layers]
        for layer in layers:
            last = slice(-states_to_keep if layer is layers[-1] and states_to_keep else None, None)
            hidden = layer(
                hidden,
                positions,
                keys,
                last,
                shared_prior=self.prior,
                past_key_values=past_key_values,
                output_attentions=output_attentions,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden), past_key_values=past_key_values if use_cache else None
        )


class PriorDecoderForCausalLM(PriorDecoderPreTrainedModel, GenerationMixin):
    """The decoder as a language model."""

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
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        document_ids: Tensor | None = None,
        sequence: ShardedSequence | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next tokens.

        Args:
            input_ids: new tokens, ``(B, L)``.
            attention_mask: ``(B, past + L)``, 1 for tokens and 0 for padding. Or a 4-D mask
                ``(B or 1, H or 1, L, past + L)``, boolean (True = may see) or added to the logits, that hides more than
                the causal mask does; it is dense.
            position_ids: ``(B, past + L)``: where tokens stand, if they do not follow each other; for tokens after a
                cache the positions of those before belong to it, since a prior needs them. Where positions do
                not rise, a new document begins, as in batches that transformers packs. By default tokens are counted
                from the first that is not padding.
            past_key_values: a cache of the tokens before.
            inputs_embeds: ``(B, L, hidden_size)`` in place of ``input_ids``.
            labels: ``(B, L)``, aligned with ``input_ids``, -100 = ignore; gives a mean loss in nats per token.
            use_cache: whether to return a cache; by default only outside of training.
            logits_to_keep: compute only the last so many logits (0 = all), or those at these indices.
            document_ids: ``(B, past + L)``: packed documents do not see each other.
            sequence: says that the tokens are this process's share of longer sequences, spread over a group of
                processes, all of which call at the same time. Documents and padding are the sequence's. For a loss
                give ``shift_labels``, the next token of each one, and ``num_items_in_batch`` in place of ``labels``:
                the token after a shard's last one is in another shard, and the loss is this process's part of the
                whole mean.
            kwargs: ``output_hidden_states``, ``output_attentions`` (by the dense formula: memory grows with
                ``L · (past + L)``), ``return_dict``, and ``num_items_in_batch`` and ``shift_labels`` for the loss.

        Raises:
            ValueError: if an argument is impossible or does not fit the others; it says which and why.
        """
        for_loss = {name: kwargs.pop(name) for name in ("num_items_in_batch", "shift_labels") if name in kwargs}
        if sequence is not None and labels is not None:
            raise ValueError("labels cannot be given with a sequence; give shift_labels and num_items_in_batch")
        recorded = any(
            kwargs.get(name, getattr(self.config, name)) for name in ("output_hidden_states", "output_attentions")
        )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
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
                    f"labels must fit the tokens with logits, {tuple(logits.shape[:2])}, got {tuple(labels.shape)}"
                )
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **for_loss)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    # ---- generate

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
        """None: the model finds positions itself, so that those it is given are always the user's."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare a step as transformers does, with positions and documents of all tokens so far."""
        whole = {name: kwargs.pop(name, None) for name in ("position_ids", "document_ids")}
        inputs = super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        documents = whole["document_ids"]
        if documents is not None:
            # What is generated or drafted goes on with the last document; a prompt may come in chunks.
            new = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            length = new.shape[1] + (0 if past_key_values is None else int(past_key_values.get_seq_length()))
            more = documents[:, -1:].expand(-1, max(0, length - documents.shape[1]))
            whole["document_ids"] = torch.cat([documents, more], -1)[:, :length]
        return inputs | {name: value for name, value in whole.items() if value is not None}

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Not available: it pages keys and values for attention functions of transformers' own, which know no prior.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("continuous batching is not available for this model; use generate() with a batch")


AutoConfig.register(PriorDecoderConfig.model_type, PriorDecoderConfig)
AutoModel.register(PriorDecoderConfig, PriorDecoderModel)
AutoModelForCausalLM.register(PriorDecoderConfig, PriorDecoderForCausalLM)
