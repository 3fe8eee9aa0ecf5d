"""A Llama-style decoder language model whose attention has a prior.

RMSNorm before each part, SwiGLU, no biases, grouped-query attention; position comes from a prior, an
encoding, both or neither. A transformers ``PreTrainedModel``: ``generate``, ``save_pretrained`` and
``from_pretrained`` (safetensors), ``Trainer``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from attention_priors.attention import ShardedSequence, SSMax, attend, attend_across, logit_scale_from_config
from attention_priors.attention.geometry import positions_in_documents
from attention_priors.encodings import AdditiveEncoding, Encoding, Rotary, ShawVectors, encoding_from_config
from attention_priors.priors import Prior, Structure, prior_from_config


class PriorDecoderConfig(PreTrainedConfig):
    """What a decoder is made of.

    ``prior``, ``encoding`` and ``logit_scale`` are plain descriptions, as their ``to_config()`` gives them
    (``num_heads``, ``head_dim`` and ``width`` need not be stated): for instance
    ``prior={"name": "generalized_gaussian", "init": "uniform"}``, ``encoding="rotary"``,
    ``logit_scale={"name": "ssmax", "init": 1.0}``. A list of priors is their sum.

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
    """

    model_type = "prior_decoder"
    keys_to_ignore_at_inference = ("past_key_values",)

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
    prior: dict[str, Any] | list[dict[str, Any]] | str | None = None
    share_prior: bool = False
    encoding: dict[str, Any] | str | None = None
    logit_scale: dict[str, Any] | str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a positive multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} must be a multiple of "
                    f"num_attention_heads={self.num_attention_heads}, unless head_dim is given"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        # Build all parts once, without memory, so that a mistake shows here and not after loading weights.
        with torch.device("meta"):
            for make in (self.make_prior, self.make_encoding, self.make_logit_scale):
                make()

    def make_prior(self) -> Prior | None:
        """The prior that is described."""
        return None if self.prior is None else prior_from_config(self.prior, self.num_attention_heads)

    def make_encoding(self) -> Encoding | None:
        """The encoding that is described."""
        assert self.head_dim is not None
        return encoding_from_config(self.encoding, width=self.hidden_size, head_dim=self.head_dim)

    def make_logit_scale(self) -> SSMax | None:
        """The logit scale that is described."""
        return logit_scale_from_config(self.logit_scale, self.num_attention_heads)


class DecoderAttention(nn.Module):
    """Projections around :func:`attend`."""

    def __init__(self, config: PriorDecoderConfig, layer_index: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        query_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.prior = None if config.share_prior else config.make_prior()
        self.logit_scale = config.make_logit_scale()
        encoding = config.make_encoding()
        self.encoding = encoding if isinstance(encoding, Rotary | ShawVectors) else None

    def forward(
        self, hidden: Tensor, places: Places, shared_prior: Prior | None, cache: Cache | None, last: slice
    ) -> Tensor:
        """``(B, L, hidden_size)`` to the same, for the tokens in ``last`` alone: the others are keys only."""
        query, key, value = (
            projection(tokens).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection, tokens in ((self.q_proj, hidden[:, last]), (self.k_proj, hidden), (self.v_proj, hidden))
        )
        if isinstance(self.encoding, Rotary):
            query = self.encoding(query, places.positions[:, last])
            key = self.encoding(key, places.positions)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_index)
            # A static cache has room after the last token.
            key, value = (x[:, :, : places.num_keys] for x in (key, value))
        prior = self.prior if shared_prior is None else shared_prior
        if places.sequence is not None:
            if isinstance(self.encoding, ShawVectors):
                raise ValueError("sequence: Shaw's vectors are not computed over tokens that are spread over processes")
            out = attend_across(query, key, value, prior, sequence=places.sequence, logit_scale=self.logit_scale)
            return self.o_proj(out.transpose(1, 2).flatten(-2))
        query_positions, key_positions = places.for_attention(prior)
        out = attend(
            query,
            key,
            value,
            prior,
            logit_scale=self.logit_scale,
            query_positions=None if query_positions is None else query_positions[:, last],
            key_positions=key_positions,
            document_ids=places.document_ids,
            key_padding_mask=places.key_padding_mask,
            relative=self.encoding if isinstance(self.encoding, ShawVectors) else None,
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """``W_down (silu(W_gate x) ⊙ W_up x)``."""

    def __init__(self, config: PriorDecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``(B, L, hidden_size)`` to the same."""
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(GradientCheckpointingLayer):
    """Attention and SwiGLU, each after a norm and added to the residual stream."""

    def __init__(self, config: PriorDecoderConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DecoderAttention(config, layer_index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self, hidden: Tensor, places: Places, shared_prior: Prior | None, cache: Cache | None, last: slice
    ) -> Tensor:
        """``(B, L, hidden_size)`` to the same, for the tokens in ``last`` alone."""
        attended = self.self_attn(self.input_layernorm(hidden), places, shared_prior, cache, last)
        hidden = hidden[:, last] + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Places:
    """Where queries and keys stand, and which keys are padding or belong to other documents.

    Keys are all tokens so far; queries are the new ones, the last of them. Positions count from the first token
    that is not padding, or from the start of each document.
    """

    num_keys: int
    """Keys in use. (A compiled model with a static cache cannot know: it sees all slots, and hides the empty ones.)"""
    positions: Tensor
    """Of the new tokens, ``(1 or B, L)``."""
    key_positions: Tensor | None = None
    """``(B, num_keys)``; None if they are what :func:`attend` takes them for."""
    key_padding_mask: Tensor | None = None

    def __init__(
        self,
        batch: int,
        length: int,
        device: torch.device,
        *,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        cache: Cache | None,
        sequence: ShardedSequence | None = None,
    ) -> None:
        self.sequence = sequence
        if sequence is not None:
            if attention_mask is not None or document_ids is not None or cache is not None:
                raise ValueError(
                    "sequence holds documents and padding itself, and has no cache: give it without attention_mask, "
                    "document_ids, past_key_values and use_cache"
                )
            self.num_keys, self.positions, self.document_ids = length, sequence.positions.to(device), None
            return
        past: Any = 0 if cache is None else cache.get_seq_length()
        compiling = torch.compiler.is_compiling()
        if isinstance(past, Tensor) and compiling and cache is not None:
            self.num_keys = cache.get_mask_sizes(length, 0)[0]
        else:
            past = int(past)
            self.num_keys = past + length
        slots = torch.arange(self.num_keys, device=device).unsqueeze(0)
        self.positions = torch.arange(length, device=device).unsqueeze(0) + past
        self._queries_are_last = not isinstance(past, Tensor)
        self.document_ids = document_ids
        if document_ids is not None:
            if tuple(document_ids.shape) != (batch, self.num_keys):
                raise ValueError(
                    f"document_ids must cover every key, shape ({batch}, {self.num_keys}), got "
                    f"{tuple(document_ids.shape)}"
                )
            self.positions = positions_in_documents(document_ids)[:, -length:]
        if attention_mask is None:
            return
        slots_there_are = self.num_keys if cache is None else max(self.num_keys, cache.get_mask_sizes(length, 0)[0])
        if attention_mask.dim() != 2 or len(attention_mask) != batch or attention_mask.shape[1] > slots_there_are:
            raise ValueError(
                f"attention_mask must have shape ({batch}, {self.num_keys}), 1 for tokens and 0 for padding, got "
                f"{tuple(attention_mask.shape)}"
            )
        padding = attention_mask[:, : self.num_keys] == 0
        # What is compiled does not look at values.
        if compiling or bool(padding.any()):
            padding = nn.functional.pad(padding, (0, self.num_keys - padding.shape[1]), value=True)
            self.key_padding_mask = padding
            if document_ids is None:
                first_token = (~padding).int().argmax(-1, keepdim=True)
                self.positions = self.positions - first_token
                self.key_positions = slots - first_token

    def for_attention(self, prior: Prior | None) -> tuple[Tensor | None, Tensor | None]:
        """The positions of queries and keys that :func:`attend` needs to be told; None for what it finds itself.

        Padding shifts all positions of a text alike, which a prior over distances does not see.
        """
        terms = () if prior is None else prior.terms()
        absolute = any(Structure.STATIONARY not in term.structure for term in terms)
        if self._queries_are_last and (self.key_positions is None or not absolute):
            return None, None
        return self.positions, self.key_positions


class PriorDecoderPreTrainedModel(PreTrainedModel):
    """What transformers needs to know about the decoder."""

    config: PriorDecoderConfig
    config_class = PriorDecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # Positions beyond a few hundred do not fit a half-precision parameter.
    _keep_in_fp32_modules_strict = ["prior", "logit_scale"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers', except that what a prior does not learn stays fixed: loading makes new parameters."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():
            if isinstance(module, Prior):
                module.freeze_what_is_fixed()
        return loaded

    @staticmethod
    def create_masks_for_generate(
        config: PriorDecoderConfig,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """``generate`` would make a dense mask for a static cache; the model wants the padding mask itself."""
        return attention_mask

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Prior | SSMax | Encoding):
            loaded = [p for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
            values = [p.clone() for p in loaded]
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
            for parameter, value in zip(loaded, values, strict=True):
                parameter.copy_(value)
        else:
            super()._init_weights(module)


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

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        states_to_keep: int = 0,
        sequence: ShardedSequence | None = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the new tokens; arguments as in :meth:`PriorDecoderForCausalLM.forward`.

        With ``states_to_keep``, only the last so many of them (0 = all): the last layer, which no other reads,
        then computes no more than those and what the cache keeps.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both and not neither")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and sequence is None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        batch, length = hidden.shape[:2]
        places = Places(
            batch,
            length,
            hidden.device,
            attention_mask=attention_mask,
            document_ids=document_ids,
            cache=past_key_values,
            sequence=sequence,
        )
        if self.encoding is not None:
            hidden = hidden + self.encoding(places.positions).to(hidden.dtype)
        for layer in self.layers:
            last = slice(-states_to_keep if layer is self.layers[-1] and states_to_keep else None, None)
            hidden = layer(hidden, places, self.prior, past_key_values, last)
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

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        sequence: ShardedSequence | None = None,
        **loss_kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next tokens.

        Args:
            input_ids: new tokens, ``(B, L)``.
            attention_mask: ``(B, past + L)``, 1 for tokens and 0 for padding.
            document_ids: ``(B, past + L)``: packed documents do not see each other.
            past_key_values: a cache of the tokens before.
            inputs_embeds: ``(B, L, hidden_size)`` in place of ``input_ids``.
            labels: ``(B, L)``, aligned with ``input_ids``, -100 = ignore; gives a mean loss in nats per token.
            use_cache: whether to return a cache; by default only outside of training.
            logits_to_keep: compute only the last so many logits (0 = all), or those at these indices.
            sequence: says that the tokens are this process's share of longer sequences, spread over a group of
                processes, all of which call at the same time. Documents and padding are the sequence's.
            loss_kwargs: for transformers' loss function: ``num_items_in_batch``, and ``shift_labels``, the next token
                of each one, in place of ``labels``. With a ``sequence`` both are needed: the token after a shard's last
                one is in another shard, and the loss is this process's part of the whole mean.
        """
        number = logits_to_keep if isinstance(logits_to_keep, int) else 0
        if sequence is not None and (labels is not None or number):
            name = "logits_to_keep" if labels is None else "labels"
            raise ValueError(
                f"{name} cannot be given with a sequence; give shift_labels and num_items_in_batch for a loss"
            )
        outputs = self.model(
            input_ids,
            attention_mask,
            document_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            states_to_keep=number,
            sequence=sequence,
        )
        hidden = outputs.last_hidden_state
        logits = self.lm_head(hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep])
        loss = None
        if labels is not None or "shift_labels" in loss_kwargs:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **loss_kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)
