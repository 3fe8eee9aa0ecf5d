"""A bidirectional transformer whose attention has a prior: layers for images and texts, and a masked language model.

RMSNorm before each part, SwiGLU, no biases. Importing this module registers the language model with ``AutoConfig``,
``AutoModel`` and ``AutoModelForMaskedLM``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from attention_priors.attention import SSMax, attend, logit_scale_from_config
from attention_priors.attention.attend import attend_with_weights
from attention_priors.encodings import AdditiveEncoding, Encoding, Rotary, encoding_from_config
from attention_priors.models.decoder import SwiGLU
from attention_priors.models.placement import beside
from attention_priors.models.pretrained import PriorPreTrainedModel
from attention_priors.priors import Prior, at_spacing, prior_from_config


class StackConfig(PreTrainedConfig):
    """What a stack of bidirectional layers is made of; descriptions as in :class:`PriorDecoderConfig`.

    Args:
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU layers.
        num_hidden_layers: number of layers.
        num_attention_heads: heads; they divide ``hidden_size``.
        rms_norm_eps: of the norms.
        initializer_range: standard deviation of the initial weights.
        attention_dropout: probability with which attention weights are dropped in training.
        drop_path: probability with which a layer of the last is left out for an example in training; it rises
            linearly from 0 at the first.
        prior: description of the log-prior, or None.
        share_prior: whether all layers share one prior.
        logit_scale: description of a logit scale, or None.
    """

    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    prior: dict[str, Any] | list[dict[str, Any]] | str | None = None
    share_prior: bool = False
    logit_scale: dict[str, Any] | str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}"
            )
        for name in ("attention_dropout", "drop_path"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value!r}")
        super().__post_init__(**kwargs)
        # Build all parts once, without memory, so that a mistake shows here and not after loading weights.
        with torch.device("meta"):
            prior = self.make_prior()
            self.make_logit_scale()
        if prior is not None:
            prior.check(causal=False)

    @property
    def head_dim(self) -> int:
        """Of queries, keys and values."""
        return self.hidden_size // self.num_attention_heads

    def make_prior(self) -> Prior | None:
        """The prior that is described."""
        return None if self.prior is None else prior_from_config(self.prior, self.num_attention_heads)

    def make_logit_scale(self) -> SSMax | None:
        """The logit scale that is described."""
        return logit_scale_from_config(self.logit_scale, self.num_attention_heads)


class EncoderAttention(nn.Module):
    """Projections around :func:`attend`, in both directions."""

    def __init__(self, config: StackConfig, rotary: Rotary | None) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.prior = None if config.share_prior else config.make_prior()
        self.logit_scale = config.make_logit_scale()
        self.encoding = rotary

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor | None,
        key_padding_mask: Tensor | None,
        shared_prior: Prior | None,
        output_attentions: bool,
        spacing: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``(B, L, hidden_size)`` to the same, and the weights ``(B, H, L, L)``, if they are asked for."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.encoding is not None:
            places = torch.arange(hidden.shape[1], device=hidden.device) if positions is None else positions
            query, key = (self.encoding(x, places.expand(len(hidden), -1)) for x in (query, key))
        prior = self.prior if shared_prior is None else shared_prior
        if spacing is not None:
            prior = at_spacing(prior, query.shape[1], *spacing)
        options: dict[str, Any] = {
            "causal": False,
            "logit_scale": self.logit_scale,
            "query_positions": positions,
            "key_positions": positions,
            "key_padding_mask": key_padding_mask,
            "dropout_p": self.dropout if self.training else 0.0,
        }
        weights = None
        with beside(hidden, prior):
            if output_attentions:
                out, weights = attend_with_weights(query, key, value, prior, **options)
            else:
                out = attend(query, key, value, prior, **options)
        return self.o_proj(out.transpose(1, 2).flatten(-2)), weights


class EncoderLayer(GradientCheckpointingLayer):
    """Attention and SwiGLU, each after a norm and added to the residual stream."""

    def __init__(self, config: StackConfig, drop_path: float, rotary: Rotary | None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = EncoderAttention(config, rotary)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.drop_path = drop_path

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        shared_prior: Prior | None = None,
        output_attentions: bool = False,
        spacing: tuple[float, float] | None = None,
    ) -> Tensor:
        """``(B, L, hidden_size)`` to the same."""
        attended, _ = self.self_attn(
            self.input_layernorm(hidden), positions, key_padding_mask, shared_prior, output_attentions, spacing
        )
        hidden = hidden + self._kept(attended)
        return hidden + self._kept(self.mlp(self.post_attention_layernorm(hidden)))

    def _kept(self, branch: Tensor) -> Tensor:
        """Stochastic depth (Huang et al. 2016): 0 for some examples, larger for the others."""
        if not self.training or self.drop_path == 0:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept.to(branch.dtype) / (1 - self.drop_path)


class EncoderStack(nn.Module):
    """All layers and the last norm.

    Args:
        config: sizes, prior and logit scale.
        rotary: makes a rotary encoding for each layer; None for none.
    """

    def __init__(self, config: StackConfig, rotary: Any = None) -> None:
        super().__init__()
        depth = config.num_hidden_layers
        self.layers = nn.ModuleList(
            EncoderLayer(config, config.drop_path * layer / max(1, depth - 1), None if rotary is None else rotary())
            for layer in range(depth)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.prior = config.make_prior() if config.share_prior else None

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor | None,
        key_padding_mask: Tensor | None,
        output_attentions: bool,
        spacing: tuple[float, float] | None = None,
    ) -> Tensor:
        """``(B, L, hidden_size)`` to the same.

        Args:
            hidden: of the tokens.
            positions: ``(L,)`` or ``(B, L)``, as :func:`attend` takes them; None where one follows the other.
            key_padding_mask: ``(B, L)``, True where a token is padding; or None.
            output_attentions: whether weights are wanted.
            spacing: of the rows and columns of a grid, in patches of training (:func:`at_spacing`); None on a line, and
                where it is as in training.
        """
        for layer in self.layers:
            hidden = layer(hidden, positions, key_padding_mask, self.prior, output_attentions, spacing)
        return self.norm(hidden)


class PriorEncoderConfig(StackConfig):
    """What a bidirectional language model is made of, beside what :class:`StackConfig` lists.

    Args:
        vocab_size: number of tokens.
        tie_word_embeddings: whether the output layer is the embedding's transpose.
        encoding: description of an encoding that is added or rotates, or None.
    """

    model_type = "prior_encoder"

    vocab_size: int = 32768
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    mask_token_id: int | None = None
    encoding: dict[str, Any] | str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        with torch.device("meta"):
            self.make_encoding()

    def make_encoding(self) -> Encoding | None:
        """The encoding that is described.

        Raises:
            ValueError: it is neither added nor rotates.
        """
        encoding = encoding_from_config(self.encoding, width=self.hidden_size, head_dim=self.head_dim)
        if encoding is not None and not isinstance(encoding, AdditiveEncoding | Rotary):
            raise ValueError(f"encoding must be one that is added or rotary in an encoder, got {self.encoding!r}")
        return encoding


class PriorEncoderPreTrainedModel(PriorPreTrainedModel):
    """What transformers needs to know about the encoder."""

    config: PriorEncoderConfig
    config_class = PriorEncoderConfig
    base_model_prefix = "model"
    _no_split_modules = ["EncoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["shared_prior"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": EncoderLayer, "attentions": EncoderAttention}  # noqa: RUF012


class PriorEncoderModel(PriorEncoderPreTrainedModel):
    """The encoder without its output layer."""

    def __init__(self, config: PriorEncoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        encoding = config.make_encoding()
        self.encoding = encoding if isinstance(encoding, AdditiveEncoding) else None
        self.stack = EncoderStack(config, config.make_encoding if isinstance(encoding, Rotary) else None)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Hidden states of all tokens.

        Args:
            input_ids: tokens, ``(B, L)``.
            attention_mask: ``(B, L)``, 1 where there is a token and 0 where there is padding.
            position_ids: ``(B, L)`` or ``(L,)``; by default tokens stand one after another.
            inputs_embeds: ``(B, L, hidden_size)``, instead of ``input_ids``.
            kwargs: ``output_attentions`` and ``output_hidden_states``.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both and not neither")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.encoding is not None:
            places = torch.arange(hidden.shape[1], device=hidden.device) if position_ids is None else position_ids
            hidden = hidden + self.encoding(places).to(hidden.dtype)
        padding = None if attention_mask is None else attention_mask == 0
        wants_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        return BaseModelOutput(last_hidden_state=self.stack(hidden, position_ids, padding, wants_weights))


class PriorEncoderForMaskedLM(PriorEncoderPreTrainedModel):
    """The encoder as a masked language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PriorEncoderConfig) -> None:
        super().__init__(config)
        self.model = PriorEncoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits of every token; arguments as in :meth:`PriorEncoderModel.forward`.

        Args:
            input_ids: and
            attention_mask: and
            position_ids: and
            inputs_embeds: as there.
            labels: ``(B, L)``: the tokens that were there, -100 where none is asked for; the loss is their mean.
            kwargs: as there.
        """
        found = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits = self.lm_head(found.last_hidden_state)
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=found.hidden_states, attentions=found.attentions)


AutoConfig.register(PriorEncoderConfig.model_type, PriorEncoderConfig)
AutoModel.register(PriorEncoderConfig, PriorEncoderModel)
AutoModelForMaskedLM.register(PriorEncoderConfig, PriorEncoderForMaskedLM)
