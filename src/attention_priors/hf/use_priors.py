"""BLOOM, MPT and T5 with this library's priors instead of their own biases, and with unchanged outputs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.models.mpt import modeling_mpt

from attention_priors.hf import alibi
from attention_priors.hf.alibi import check_not_wrapped, check_replaceable, replace_class, restore_class
from attention_priors.hf.attach import has_buckets
from attention_priors.hf.t5 import BEFORE, restore_bias, use_buckets
from attention_priors.priors import Laplace

Model = TypeVar("Model", bound=nn.Module)


def use_priors(model: Model, *, slopes: Sequence[float] | None = None, learn: bool = False) -> Model:
    """Compute a model's positional bias as a prior, by :func:`attend`. Weights and outputs do not change.

    - **BLOOM** and **MPT**: ALiBi through :class:`Laplace`. Attention modules get another class, because they do not
      use transformers' attention interface. MPT gets the slopes of transformers, which ignores
      ``attn_config.alibi_bias_max`` and ``attn_config.alibi``; a warning says so. Pass
      ``slopes=mpt_slopes(num_heads, alibi_bias_max)`` for the slopes of MosaicML's code.
    - **T5, mT5, umT5**, Switch Transformers, Pop2Piano, and the decoders of LongT5, Pix2Struct and UDOP. Their relative
      bias goes through :class:`RelativeBuckets` and transformers' attention interface. The scalars of the buckets
      remain the model's parameter: they train as before, and state dicts keep their keys. Cross-attention has no bias,
      and uses :func:`attend` without a prior. The model gets a copy of its config, which other models may share.

    No matrix of queries and keys is made. Padding, caches (also static ones), ``generate``, dropout and gradient
    checkpointing work as before. Attention weights (``output_attentions``) are computed densely for T5; for BLOOM and
    MPT they raise an error.

    The model saves and loads as before, unless ``slopes`` or ``learn`` change its slopes. With changed slopes, a
    ``BloomForCausalLM`` or ``MptForCausalLM`` becomes a ``BloomWithPriorsForCausalLM`` or
    ``MptWithPriorsForCausalLM``, with its own model type. transformers can load this type after
    ``attention_priors.hf`` has been imported. Otherwise loading fails, instead of loading plain BLOOM.

    Args:
        model: the model, or a module that contains it, changed in place. Call this function before accelerate
            dispatches a BLOOM or MPT to devices.
        slopes: for BLOOM and MPT, one positive slope per head, in nats per token, for all layers. None for the model's
            slopes.
        learn: for BLOOM and MPT, whether the slopes train, separately in each layer.

    Returns:
        ``model`` itself. :func:`restore_attention` undoes the change.

    Raises:
        ValueError: there is nothing to replace, the model already uses priors, or ``slopes`` and ``learn`` do not fit
            the model.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a transformers model, or a module that contains one, got {type(model).__name__}"
        )
    modules = [*model.modules()]
    if uses_priors(model):
        raise ValueError(f"{type(model).__name__} already uses priors; call restore_attention(model) first")
    has_alibi = any(isinstance(module, PreTrainedModel) and type(module) in alibi.REPLACEMENTS for module in modules)
    has_t5 = any(map(has_buckets, modules))
    if not has_alibi and not has_t5:
        raise ValueError(
            f"use_priors() does not support {type(model).__name__}: expected BLOOM, MPT, or a model with T5's relative "
            "bias that uses transformers' attention interface, such as T5, mT5 and umT5"
        )
    changed = learn or slopes is not None
    if changed and not has_alibi:
        raise ValueError(f"slopes and learn are for BLOOM and MPT; {type(model).__name__} learns its own bias")
    if changed and type(model) not in alibi.WITH_PRIORS:
        kinds = " or ".join(kind.__name__ for kind in alibi.WITH_PRIORS)
        raise ValueError(
            f"slopes and learn need a model that can be saved with them, {kinds}; got {type(model).__name__}"
        )
    if has_alibi:
        check_replaceable(modules)
        _use_laplace(model, slopes, learn)
    if has_t5:
        use_buckets(model)
    return model


def restore_attention(model: Model) -> Model:
    """Undo :func:`use_priors`: the model runs transformers' own code again, with the original slopes.

    Raises:
        ValueError: the model does not use priors, or its BLOOM or MPT was wrapped meanwhile.
    """
    if not uses_priors(model):
        raise ValueError(f"{type(model).__name__} does not use priors, so there is nothing to restore")
    modules: list[Any] = [module for module in model.modules() if type(module) in alibi.REPLACEMENTS.values()]
    check_not_wrapped(modules)
    restore_bias(model)
    for module in modules:
        if isinstance(module, alibi.BloomAttention | alibi.MptAttention):
            del module.prior
        restore_class(module)
    if type(model) in alibi.WITH_PRIORS.values():
        config: Any = model.config
        del config.prior
        vars(config).pop("model_type", None)  # set on loaded configs in addition to the class's
        restore_class(config)
        restore_class(model)
    return model


def _use_laplace(model: nn.Module, slopes: Sequence[float] | None, learn: bool) -> None:
    for module in model.modules():
        if isinstance(module, modeling_mpt.MptModel) and slopes is None:
            described: Any = module.config.attn_config
            if not described.alibi or described.alibi_bias_max != 8:
                warnings.warn(
                    f"the config has alibi={described.alibi}, alibi_bias_max={described.alibi_bias_max}, which "
                    "transformers ignores: it computes ALiBi with alibi_bias_max=8, and so does this model. For other "
                    "slopes, call use_priors(model, slopes=mpt_slopes(num_heads, alibi_bias_max))",
                    stacklevel=3,
                )
    if slopes is None and not learn:
        alibi.put_laplace(model, {})
        return
    config: Any = model.config
    heads = config.num_attention_heads
    if slopes is None and isinstance(model, modeling_mpt.MptForCausalLM):
        slopes = alibi.mpt_slopes(heads)
    # Raise for invalid slopes before the model is changed.
    prior = Laplace(heads, slopes=slopes, learn=learn).to_config()
    alibi.put_laplace(model, prior)
    replacement = alibi.WITH_PRIORS[type(model)]
    replace_class(model, replacement)
    own = copy.deepcopy(config)  # other models may share it
    own.__class__ = replacement.config_class
    own.prior = prior
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = own


def has_own_bias(model: nn.Module) -> bool:
    """Return whether a model computes a bias that :func:`use_priors` can compute as a prior."""
    return any(type(module) in alibi.REPLACEMENTS or has_buckets(module) for module in model.modules())


def uses_priors(model: nn.Module) -> bool:
    """Return whether :func:`use_priors` was called for a model."""
    replaced = alibi.REPLACEMENTS.values()
    return any(type(module) in replaced or BEFORE in vars(module) for module in model.modules())
