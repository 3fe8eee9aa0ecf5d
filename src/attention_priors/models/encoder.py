"""Bidirectional transformer whose attention has a prior: layers for images and texts, and a masked language model.

The architecture has RMSNorm before each part, SwiGLU and no biases. Importing this module registers the language model
with ``AutoConfig``, ``AutoModel`` and ``AutoModelForMaskedLM``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from attention_priors.checks import check_positive_integers, check_share
from attention_priors.encodings import AdditiveEncoding, Encoding, Rotary, encoding_from_config
from attention_priors.models.decoder import SwiGLU
from attention_priors.models.masks import Keys, keys_of_call
from attention_priors.models.pretrained import PriorConfig, PriorPreTrainedModel, attend_over, embedded, refuse_unknown
from attention_priors.priors import Prior, at_spacing
from attention_priors.priors.base import check_over_line, check_positions


class StackConfig(PriorConfig):
    """Configuration of a stack of bidirectional layers. Descriptions are those of :class:`PriorDecoderConfig`.

    Args:
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU layers.
        num_hidden_layers: number of layers.
        num_attention_heads: number of heads. It must divide ``hidden_size``.
        rms_norm_eps: epsilon of the norms.
        initializer_range: standard deviation of the initial weights.
        attention_dropout: dropout probability of attention weights.
        drop_path: probability of skipping the last layer for an example in training. Probabilities rise linearly from 0
            at the first layer.
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

    def __post_init__(self, **kwargs: Any) -> None:
        check_positive_integers(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
        )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}"
            )
        check_share(attention_dropout=self.attention_dropout, drop_path=self.drop_path)
        super().__post_init__(**kwargs)
        # Build all parts once on the meta device, so that a mistake raises here and not after loading weights.
        with torch.device("meta"):
            prior = self.make_prior()
            self.make_logit_scale()
        if prior is not None:
            prior.check(causal=False)

    @property
    def head_dim(self) -> int:
        """Width of queries, keys and values."""
        return self.hidden_size // self.num_attention_heads


class EncoderAttention(nn.Module):
    """Bidirectional attention layer: projections around :func:`attend`."""

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
        keys: Keys,
        shared_prior: Prior | None,
        spacing: tuple[float, float] | None,
        output_attentions: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output ``(B, L, hidden_size)``, and the weights ``(B, H, L, L)`` or None.

        ``spacing`` holds the distances between adjacent rows and columns of a grid, in training patches (see
        :func:`at_spacing`); None on a line, and for the spacing of training.
        """
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.encoding is not None:
            query, key = (self.encoding(x, keys.positions) for x in (query, key))
        prior = self.prior if shared_prior is None else shared_prior
        if spacing is not None:
            prior = at_spacing(prior, query.shape[1], *spacing)
        dropout = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"logit_scale": self.logit_scale, "dropout_p": dropout}
        out, weights = attend_over(query, key, value, prior, keys, output_attentions, **options)
        return self.o_proj(out.flatten(-2)), weights


class EncoderLayer(GradientCheckpointingLayer):
    """Attention and SwiGLU, each after a norm and added to the residual stream."""

    def __init__(self, config: StackConfig, drop_path: float, rotary: Rotary | None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = EncoderAttention(config, rotary)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.drop_path = drop_path

    def forward(self, hidden: Tensor, keys: Keys, **options: Any) -> Tensor:
        """Map ``(B, L, hidden_size)`` to ``(B, L, hidden_size)``; ``options`` are those of the attention layer."""
        attended, _ = self.self_attn(self.input_layernorm(hidden), keys, **options)
        hidden = hidden + self._kept(attended)
        return hidden + self._kept(self.mlp(self.post_attention_layernorm(hidden)))

    def _kept(self, branch: Tensor) -> Tensor:
        """Apply stochastic depth (Huang et al.

        2016): zero the branch for random examples and rescale it for the others.
        """
        if not self.training or self.drop_path == 0:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept.to(branch.dtype) / (1 - self.drop_path)


class EncoderStack(nn.Module):
    """All layers and the last norm.

    Args:
        config: sizes, prior and logit scale.
        rotary: function that returns a rotary encoding for a layer, or None.
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

    def forward(self, hidden: Tensor, keys: Keys, **options: Any) -> Tensor:
        """Map ``(B, L, hidden_size)`` to ``(B, L, hidden_size)``; ``output_attentions`` also computes the weights."""
        for layer in self.layers:
            hidden = layer(hidden, keys, shared_prior=self.prior, **options)
        return self.norm(hidden)


class StackPreTrainedModel(PriorPreTrainedModel):
    """Base class of models with an :class:`EncoderStack`."""

    _no_split_modules = ["EncoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["shared_prior"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": EncoderLayer, "attentions": EncoderAttention}  # noqa: RUF012


class PriorEncoderConfig(StackConfig):
    """Configuration of a bidirectional language model, in addition to :class:`StackConfig`.

    Args:
        vocab_size: number of tokens in the vocabulary.
        tie_word_embeddings: whether the output layer is the transpose of the embedding.
        encoding: description of an additive or rotary encoding, or None.
    """

    model_type = "prior_encoder"
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "PriorEncoderConfig",
        "AutoModel": "PriorEncoderModel",
        "AutoModelForMaskedLM": "PriorEncoderForMaskedLM",
    }

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
            check_over_line(self.make_prior())
            self.make_encoding()

    def make_encoding(self) -> Encoding | None:
        """Build the encoding from its description.

        Raises:
            ValueError: the encoding is neither additive nor rotary.
        """
        encoding = encoding_from_config(self.encoding, width=self.hidden_size, head_dim=self.head_dim)
        if encoding is not None and not isinstance(encoding, AdditiveEncoding | Rotary):
            raise ValueError(f"encoding must be additive or rotary in an encoder, got {self.encoding!r}")
        return encoding


class PriorEncoderPreTrainedModel(StackPreTrainedModel):
    """Base class of the encoder's models, with settings for transformers."""

    config: PriorEncoderConfig
    config_class = PriorEncoderConfig


class PriorEncoderModel(PriorEncoderPreTrainedModel):
    """Encoder without its output layer."""

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
        *,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the hidden states of all tokens.

        Args:
            input_ids: tokens, ``(B, L)``.
            attention_mask: ``(B, L)``, 1 for tokens and 0 for padding.
            position_ids: ``(B, L)`` or ``(L,)``. By default positions count from a row's first token that is not
                padding, or from 0 in each document. Unlike in a decoder, positions that start anew do not separate
                documents; use ``document_ids``.
            inputs_embeds: ``(B, L, hidden_size)``, instead of ``input_ids``.
            document_ids: integers ``(B, L)``. Packed documents do not see each other.
            kwargs: ``output_attentions`` and ``output_hidden_states``.

        Raises:
            ValueError: an argument is unknown or conflicts with another. The message says which and why.
        """
        refuse_unknown(kwargs, "the encoder")
        hidden = embedded(self.embed_tokens, input_ids, inputs_embeds)
        batch, length = fits = tuple(hidden.shape[:2])
        for name, given in (("attention_mask", attention_mask), ("document_ids", document_ids)):
            if given is not None and tuple(given.shape) != fits:
                raise ValueError(f"{name} must have the shape of the tokens, {fits}, got {tuple(given.shape)}")
        if position_ids is not None:
            check_positions("position_ids", position_ids)
            if tuple(position_ids.shape) not in (fits, fits[1:]):
                raise ValueError(
                    f"position_ids must have the shape of the tokens, {fits} or {fits[1:]}, got "
                    f"{tuple(position_ids.shape)}"
                )
            position_ids = position_ids.reshape(-1, length)
        keys = keys_of_call(batch, length, hidden.device, attention_mask=attention_mask, document_ids=document_ids)
        keys = replace(keys, causal=False, query_positions=position_ids, key_positions=position_ids)
        if self.encoding is not None:
            hidden = hidden + self.encoding(keys.positions).to(hidden.dtype)
        wants_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        hidden = self.stack(hidden, keys, spacing=None, output_attentions=wants_weights)
        return BaseModelOutput(last_hidden_state=hidden)


class PriorEncoderForMaskedLM(PriorEncoderPreTrainedModel):
    """Encoder with a masked language modelling head."""

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
        *,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Return the logits of every token. Arguments not listed here are those of :meth:`PriorEncoderModel.forward`.

        Args:
            input_ids: see :meth:`PriorEncoderModel.forward`.
            attention_mask: see :meth:`PriorEncoderModel.forward`.
            position_ids: see :meth:`PriorEncoderModel.forward`.
            inputs_embeds: see :meth:`PriorEncoderModel.forward`.
            labels: original tokens, ``(B, L)``, -100 where a token is not predicted. The loss is the mean over
                predicted tokens.
            document_ids: see :meth:`PriorEncoderModel.forward`.
            kwargs: options of :meth:`PriorEncoderModel.forward`. ``num_items_in_batch`` replaces the number of labels
                as the divisor of the loss.

        Raises:
            ValueError: as :meth:`PriorEncoderModel.forward`, or ``labels`` has a wrong shape.
        """
        items = kwargs.pop("num_items_in_batch", None)
        found = self.model(input_ids, attention_mask, position_ids, inputs_embeds, document_ids=document_ids, **kwargs)
        logits = self.lm_head(found.last_hidden_state)
        loss = None
        if labels is not None:
            if labels.shape != logits.shape[:2]:
                raise ValueError(f"labels must have shape {tuple(logits.shape[:2])}, got {tuple(labels.shape)}")
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=items)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=found.hidden_states, attentions=found.attentions)


AutoConfig.register(PriorEncoderConfig.model_type, PriorEncoderConfig)
AutoModel.register(PriorEncoderConfig, PriorEncoderModel)
AutoModelForMaskedLM.register(PriorEncoderConfig, PriorEncoderForMaskedLM)
