"""BLOOM and MPT, with :class:`Laplace` in place of their ALiBi.

Classes are named as those they stand for: models are saved by them. Models whose slopes are their own are saved under a
name of their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM
from transformers.cache_utils import Cache
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt

from attention_priors.checks import check_above, check_positive_integers
from attention_priors.hf.replacing import attend_with_cache, prior_for, refuse_attention_weights, replace
from attention_priors.models.masks import Keys, first_token, layer_mask, past_tokens, sees_the_future
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


class _Model:
    """Hands the padding mask down instead of a dense one."""

    def forward(
        self: Any,
        input_ids: Any = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run transformers' forward, which outputs no attention weights here."""
        refuse_attention_weights(self, output_attentions)
        if (input_ids is None) != (inputs_embeds is None):
            if attention_mask is not None and attention_mask.dim() != 2:
                attention_mask = self._dense_mask(attention_mask, past_key_values)
            attention_mask = layer_mask(attention_mask, inputs_embeds if input_ids is None else input_ids)
        theirs: Any = super()
        return theirs.forward(
            input_ids, past_key_values, attention_mask, inputs_embeds, use_cache, output_attentions, *args, **kwargs
        )


class BloomModel(_Model, modeling_bloom.BloomModel):
    """BLOOM's stack; ``attention_mask`` has two dimensions."""

    def _dense_mask(self, mask: Tensor, cache: Cache | None) -> Tensor:
        raise ValueError(f"attention_mask must have shape (batch, length), got {tuple(mask.shape)}")

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


class MptModel(_Model, modeling_mpt.MptModel):
    """MPT's stack."""

    def _dense_mask(self, mask: Tensor, cache: Cache | None) -> Tensor:
        if mask.dim() != 4:
            return mask
        visible = mask == 0  # transformers hides whatever is not 0
        if sees_the_future(~visible, Keys(mask.device, past_tokens(cache), mask.shape[-2], mask.shape[-1])):
            raise ValueError(
                "attention_mask lets queries see later keys, where ALiBi as transformers computes it favours the "
                "last key of the sequence and not the nearest; give a causal mask, or one of shape (batch, length)"
            )
        return visible

    def build_mpt_alibi_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing: the prior takes its place."""
        return None


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
        """Run the layer's attention; ``alibi`` and ``attention_mask`` come from :class:`BloomModel`."""
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
        """Run the layer's attention; ``attention_mask`` comes from :class:`MptModel`."""
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


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    ours.__bases__[-1]: ours for ours in (BloomModel, BloomAttention, MptModel, MptAttention)
}
"""Classes of transformers, and the ones that take their places."""


def put_laplace(model: nn.Module, prior: dict[str, Any]) -> None:
    """Replace the stacks and attention layers of a model.

    Slopes that train are a parameter of each layer, in its state dict. Others are no part of the model's state: it
    keeps the keys it had, and all layers share one prior until they find it on another device than theirs.

    Args:
        model: that has them.
        prior: ``slopes`` and ``learn`` of :class:`Laplace`. Without slopes they are those of transformers.
    """
    shared: dict[tuple[bool, int], Laplace] = {}
    for module in [*model.modules()]:
        if type(module) in REPLACEMENTS:
            replace(module, REPLACEMENTS[type(module)])
        if isinstance(module, BloomAttention | MptAttention):
            of_mpt = isinstance(module, MptAttention)
            heads = module.n_heads if of_mpt else module.num_heads
            slopes = prior.get("slopes") or (mpt_slopes(heads) if of_mpt else None)
            if prior.get("learn"):
                weight = module.out_proj.weight if of_mpt else module.dense.weight
                module.prior = Laplace(heads, slopes=slopes, learn=prior["learn"]).to(weight.device)
                continue
            if (of_mpt, heads) not in shared:
                # On the CPU also while weights have no memory yet: loading does not bring what is no state.
                with torch.device("cpu"):
                    shared[of_mpt, heads] = Laplace(heads, slopes=slopes)
            module.__dict__["prior"] = shared[of_mpt, heads]


# ---- models whose slopes are not those of transformers: saved under a name of their own


class BloomWithPriorsConfig(BloomConfig):
    """BLOOM's config, and ``prior``: the :class:`Laplace` of each layer, as its ``to_config()`` describes it."""

    model_type = "bloom_with_priors"
    prior: dict[str, Any] | None = None


class MptWithPriorsConfig(MptConfig):
    """MPT's config, and ``prior``: the :class:`Laplace` of each layer, as its ``to_config()`` describes it."""

    model_type = "mpt_with_priors"
    prior: dict[str, Any] | None = None


class _WithPriors:
    # Positions beyond a few hundred do not fit a half-precision parameter.
    _keep_in_fp32_modules_strict = ["prior"]  # noqa: RUF012

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        assert isinstance(self, nn.Module)
        put_laplace(self, config.prior or {})


class BloomWithPriorsForCausalLM(_WithPriors, BloomForCausalLM):
    """BLOOM with slopes of its own; :func:`use_priors` makes it, and ``from_pretrained`` loads it."""

    config_class = BloomWithPriorsConfig


class MptWithPriorsForCausalLM(_WithPriors, MptForCausalLM):
    """MPT with slopes of its own; :func:`use_priors` makes it, and ``from_pretrained`` loads it."""

    config_class = MptWithPriorsConfig


WITH_PRIORS: dict[type[nn.Module], type[Any]] = {
    ours.__bases__[-1]: ours for ours in (BloomWithPriorsForCausalLM, MptWithPriorsForCausalLM)
}
"""Models, and the classes they have while their slopes are their own."""

for _model in WITH_PRIORS.values():
    AutoConfig.register(_model.config_class.model_type, _model.config_class)
    AutoModelForCausalLM.register(_model.config_class, _model)
