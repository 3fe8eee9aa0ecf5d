"""Parameter groups and optimisers: no weight decay on priors, and a learning rate of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attention_priors.attention import SSMax
from attention_priors.lab.train.settings import OptimizationSettings
from attention_priors.priors import Prior


def parameter_groups(model: nn.Module, settings: OptimizationSettings) -> list[dict[str, Any]]:
    """The trainable parameters in four groups: matrices, vectors, priors, logit scales.

    Weight decay pulls matrices alone. Priors and logit scales have multiples of the learning rate;
    schedules that scale each group's own rate keep the ratios.

    Args:
        model: any, with priors anywhere in it.
        settings: :class:`TrainingSettings`; of it ``learning_rate``, ``weight_decay``,
            ``prior_learning_rate_multiplier`` and ``logit_scale_learning_rate_multiplier``.

    Returns:
        For any optimiser of PyTorch: ``params``, ``name``, ``lr`` and ``weight_decay`` of each group.
    """
    special: dict[nn.Parameter, str] = {}
    for module in model.modules():
        if isinstance(module, Prior | SSMax):
            special |= dict.fromkeys(module.parameters(), "prior" if isinstance(module, Prior) else "logit_scale")
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "prior": [], "logit_scale": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[special.get(parameter, "matrices" if parameter.dim() > 1 else "vectors")].append(parameter)
    rate = settings.learning_rate
    rates = {
        "prior": rate * settings.prior_learning_rate_multiplier,
        "logit_scale": rate * settings.logit_scale_learning_rate_multiplier,
    }
    return [
        {
            "params": parameters,
            "name": name,
            "lr": rates.get(name, rate),
            "weight_decay": settings.weight_decay if name == "matrices" else 0.0,
        }
        for name, parameters in groups.items()
        if parameters
    ]


def make_optimizer(model: nn.Module, settings: OptimizationSettings) -> torch.optim.Optimizer:
    """AdamW, or RAdam with decoupled weight decay, over :func:`parameter_groups`.

    Args:
        model: any, with priors anywhere in it.
        settings: :class:`TrainingSettings`; of it what :func:`parameter_groups` takes, ``optimizer``, ``betas`` and
            ``epsilon``.
    """
    groups = parameter_groups(model, settings)
    if settings.optimizer == "radam":
        return torch.optim.RAdam(groups, betas=settings.betas, eps=settings.epsilon, decoupled_weight_decay=True)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon)
