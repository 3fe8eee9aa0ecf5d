"""BLOOM and MPT with :class:`Laplace` in place of their ALiBi, and how they are saved when its slopes are their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt

from attention_priors.hf import bloom, mpt
from attention_priors.hf.replacing import replace, restore
from attention_priors.priors import Laplace

STACKS: dict[type[nn.Module], type[nn.Module]] = {
    modeling_bloom.BloomModel: bloom.BloomModel,
    modeling_mpt.MptModel: mpt.MptModel,
}
"""Modules that hold the layers, and what takes their place."""
ATTENTION: dict[type[nn.Module], type[nn.Module]] = {
    modeling_bloom.BloomAttention: bloom.BloomAttention,
    modeling_mpt.MptAttention: mpt.MptAttention,
}


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
        if type(module) in STACKS:
            replace(module, STACKS[type(module)])
        elif type(module) in ATTENTION:
            replace(module, ATTENTION[type(module)])
            assert isinstance(module, bloom.BloomAttention | mpt.MptAttention)
            of_mpt = isinstance(module, mpt.MptAttention)
            heads = module.n_heads if of_mpt else module.num_heads
            slopes = prior.get("slopes") or (mpt.mpt_slopes(heads) if of_mpt else None)
            if prior.get("learn"):
                weight = module.out_proj.weight if of_mpt else module.dense.weight
                module.prior = Laplace(heads, slopes=slopes, learn=prior["learn"]).to(weight.device)
                continue
            if (of_mpt, heads) not in shared:
                # On the CPU also while weights have no memory yet: loading does not bring what is no state.
                with torch.device("cpu"):
                    shared[of_mpt, heads] = Laplace(heads, slopes=slopes)
            module.__dict__["prior"] = shared[of_mpt, heads]


def take_laplace(model: nn.Module) -> None:
    """Undo :func:`put_laplace`: what slopes have learned is gone."""
    for module in replaced(model):
        if type(module) in ATTENTION.values():
            del module.prior
        restore(module)


def replaced(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that :func:`put_laplace` has replaced."""
    for module in [*model.modules()]:
        if type(module) in STACKS.values() or type(module) in ATTENTION.values():
            yield module


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
    BloomForCausalLM: BloomWithPriorsForCausalLM,
    MptForCausalLM: MptWithPriorsForCausalLM,
}
"""Models, and the classes they have while their slopes are their own."""

for _model in WITH_PRIORS.values():
    AutoConfig.register(_model.config_class.model_type, _model.config_class)
    AutoModelForCausalLM.register(_model.config_class, _model)
