"""BLOOM and MPT with :class:`Laplace` instead of their own ALiBi.

A module's class is replaced in place: the module stays the same object, with its weights, names, hooks and device.
Replacement classes have the names of the classes they replace, because models are saved by class name. Models with
custom slopes are saved under other names.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from attention_priors.checks import check_above, check_positive_integers
from attention_priors.models.masks import Keys, KeysMask, keys_of_call
from attention_priors.models.pretrained import attend_over
from attention_priors.priors import Laplace, Prior


def mpt_slopes(num_heads: int, alibi_bias_max: float = 8.0) -> list[float]:
    """Return MPT's slopes, in nats per token.

    ``2^(-alibi_bias_max (h + 1) / P)``, with ``P`` the smallest power of two that is at least ``H``. If ``H < P``,
    every other slope comes first, from the second on, then the others, cut to ``H`` slopes.

    Source: MosaicML's llm-foundry, ``gen_slopes``.

    Args:
        num_heads: number of heads, ``H``.
        alibi_bias_max: negative log2 of the smallest slope, ``2^-alibi_bias_max``.
    """
    check_positive_integers(num_heads=num_heads)
    check_above(0, alibi_bias_max=alibi_bias_max)
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-alibi_bias_max * (head + 1) / power) for head in range(power)]
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


class _Model:
    """Mixin that passes a :class:`KeysMask` to the layers instead of a dense mask."""

    def forward(
        self: Any,
        input_ids: Any = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run transformers' forward with the keys of the call. Attention weights are not available."""
        if output_attentions if output_attentions is not None else self.config.output_attentions:
            raise ValueError(
                f"output_attentions=True is not supported: {type(self).__name__} with priors computes no attention "
                "weights; call restore_attention(model) first"
            )
        if (input_ids is None) != (inputs_embeds is None):
            batch, length, *_ = (tokens := inputs_embeds if input_ids is None else input_ids).shape
            mask = None if attention_mask is None else attention_mask.to(tokens.device)
            if mask is not None and mask.dim() == 4:
                mask = self._visible(mask)
            keys = keys_of_call(batch, length, tokens.device, attention_mask=mask, cache=cache)
            attention_mask = KeysMask.of(self._with_positions(keys), {"batch_size": batch}, is_dense=False)
        return super().forward(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids, cache, attention_mask, inputs_embeds, use_cache, output_attentions, *args, **kwargs
        )

    def _with_positions(self, keys: Keys) -> Keys:
        """Return the keys with the positions that the model counts; by default slots."""
        return keys

    def build_alibi_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """Return None: the prior replaces the bias."""
        return None

    build_mpt_alibi_tensor = build_alibi_tensor


class BloomModel(_Model, modeling_bloom.BloomModel):
    """BLOOM's stack of layers. ``attention_mask`` must be 2-D."""

    def _visible(self, mask: Tensor) -> Tensor:
        raise ValueError(f"attention_mask must have shape (batch, length), got {tuple(mask.shape)}")

    def _with_positions(self, keys: Keys) -> Keys:
        """Count positions among non-padding tokens, as BLOOM does, unless slots give equal differences."""
        if keys.padding is None:
            return keys
        positions = (~keys.padding).cumsum(-1) - 1
        differ = ~keys.padding & (positions != keys.positions_of_keys)
        if not torch.compiler.is_compiling() and not bool(differ.any()):
            return keys
        return dataclasses.replace(keys, query_positions=keys.of_queries(positions), key_positions=positions)


class MptModel(_Model, modeling_mpt.MptModel):
    """MPT's stack of layers."""

    def _visible(self, mask: Tensor) -> Tensor:
        return mask == 0  # transformers hides every key whose mask is not 0


def prior_for(module: nn.Module, device: torch.device) -> Prior:
    """Return an attention layer's prior on ``device``: a prior outside the state dict does not follow the model."""
    prior = module.prior
    assert isinstance(prior, Prior)
    if "prior" in vars(module) and next(prior.parameters()).device != device:
        prior = module.__dict__["prior"] = copy.deepcopy(prior).to(device)
    return prior


def _attend(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, cache: Cache | None, **options: Any
) -> Tensor:
    """Update the cache with new keys and values, and compute attention of the new tokens."""
    if cache is not None:
        key, value = cache.update(key, value, layer.layer_idx)
    out, _ = attend_over(query, key, value, prior_for(layer, query.device), mask._keys, False, **options)
    return out.flatten(-2)


class BloomAttention(modeling_bloom.BloomAttention):
    """BLOOM's attention layer, computed by ``attend()`` with :class:`Laplace`."""

    prior: Laplace

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Any,
        attention_mask: Any,
        layer_past: Cache | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Compute attention. ``attention_mask`` comes from :class:`BloomModel`; in an export, it is a plain tensor."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        dropout = self.attention_dropout.p if self.training else 0.0
        out = _attend(self, query, key, value, attention_mask, layer_past, dropout_p=dropout)
        # With pretraining_tp and slow_but_exact, transformers sums this product in slices, which changes rounding only.
        out = self.dense(out.to(hidden_states.dtype))
        return modeling_bloom.dropout_add(out, residual, self.hidden_dropout, self.training), None


class MptAttention(modeling_mpt.MptAttention):
    """MPT's attention layer, computed by ``attend()`` with :class:`Laplace`."""

    prior: Laplace

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Any,
        cache: Cache | None = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Compute attention. ``attention_mask`` comes from :class:`MptModel`; in an export, it is a plain tensor."""
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            part.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for part in mixed.chunk(3, dim=2)
        )
        options = {"softmax_scale": self.softmax_scale, "dropout_p": self.attn_dropout_p if self.training else 0.0}
        out = _attend(self, query, key, value, attention_mask, cache, **options)
        return self.out_proj(out.to(hidden_states.dtype)), None


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    ours.__bases__[-1]: ours for ours in (BloomModel, BloomAttention, MptModel, MptAttention)
}
"""Replacement of each class of transformers."""


def check_replaceable(modules: Iterable[nn.Module]) -> None:
    """Raise a ValueError unless all modules that would be replaced run transformers' own code.

    Raises:
        ValueError: a module is of a derived class, or has a wrapped ``forward``.
    """
    known = [module for module in modules if isinstance(module, tuple(REPLACEMENTS))]
    for module in known:
        if type(module) not in REPLACEMENTS:
            raise ValueError(
                f"this model has a module of class {type(module).__module__}.{type(module).__qualname__}, which does "
                "not run transformers' own code"
            )
    check_not_wrapped(known)


def check_not_wrapped(modules: Iterable[nn.Module]) -> None:
    """Raise a ValueError if a module's ``forward`` is wrapped: the wrapper would bypass a replaced class."""
    for module in modules:
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of a {type(module).__name__} of this model is wrapped (by accelerate, for a device_map "
                "or offloading, or by another package); call use_priors() and restore_attention() before wrapping"
            )


def replace_class(module: nn.Module, replacement: type[nn.Module]) -> None:
    """Replace the class of ``module`` by ``replacement``, whose last base is the module's class."""
    assert replacement.__bases__[-1] is type(module)
    module.__class__ = replacement
    if isinstance(module, PreTrainedModel):
        # transformers registers the outputs that a model can record (output_hidden_states) when it is built.
        _CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def restore_class(module: Any) -> None:
    """Undo :func:`replace_class`."""
    module.__class__ = type(module).__bases__[-1]


def put_laplace(model: nn.Module, prior: dict[str, Any]) -> None:
    """Replace the stacks and attention layers of a model.

    Trained slopes are a parameter of each layer, and part of the state dict. Fixed slopes are not: the state dict keeps
    its keys, and all layers share one prior, which a layer on another device copies.

    Args:
        model: model with BLOOM or MPT layers.
        prior: ``slopes`` and ``learn`` of :class:`Laplace`. Without ``slopes``, those of transformers.
    """
    shared: dict[tuple[bool, int], Laplace] = {}
    for module in [*model.modules()]:
        if type(module) in REPLACEMENTS:
            replace_class(module, REPLACEMENTS[type(module)])
        if isinstance(module, BloomAttention | MptAttention):
            of_mpt = isinstance(module, MptAttention)
            heads = module.n_heads if of_mpt else module.num_heads
            slopes = prior.get("slopes") or (mpt_slopes(heads) if of_mpt else None)
            if prior.get("learn"):
                weight = module.out_proj.weight if of_mpt else module.dense.weight
                module.prior = Laplace(heads, slopes=slopes, learn=prior["learn"]).to(weight.device)
                continue
            if (of_mpt, heads) not in shared:
                # Always on the CPU, not on the meta device: loading would not fill a prior outside the state dict.
                with torch.device("cpu"):
                    shared[of_mpt, heads] = Laplace(heads, slopes=slopes)
            module.__dict__["prior"] = shared[of_mpt, heads]


# ---- models with custom slopes, which are saved under other names


class BloomWithPriorsConfig(BloomConfig):
    """BLOOM's config, and ``prior``: the description of each layer's :class:`Laplace`."""

    model_type = "bloom_with_priors"
    prior: dict[str, Any] | None = None


class MptWithPriorsConfig(MptConfig):
    """MPT's config, and ``prior``: the description of each layer's :class:`Laplace`."""

    model_type = "mpt_with_priors"
    prior: dict[str, Any] | None = None


class _WithPriors:
    # Half precision cannot represent positions beyond a few hundred exactly.
    _keep_in_fp32_modules_strict = ["prior"]  # noqa: RUF012

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        assert isinstance(self, nn.Module)
        put_laplace(self, config.prior or {})


class BloomWithPriorsForCausalLM(_WithPriors, BloomForCausalLM):
    """BLOOM with custom slopes. :func:`use_priors` creates it, and ``from_pretrained`` loads it."""

    config_class = BloomWithPriorsConfig


class MptWithPriorsForCausalLM(_WithPriors, MptForCausalLM):
    """MPT with custom slopes. :func:`use_priors` creates it, and ``from_pretrained`` loads it."""

    config_class = MptWithPriorsConfig


WITH_PRIORS: dict[type[nn.Module], type[Any]] = {
    ours.__bases__[-1]: ours for ours in (BloomWithPriorsForCausalLM, MptWithPriorsForCausalLM)
}
"""Classes of models with custom slopes, by the class of transformers."""

for _model in WITH_PRIORS.values():
    AutoConfig.register(_model.config_class.model_type, _model.config_class)
    AutoModelForCausalLM.register(_model.config_class, _model)
