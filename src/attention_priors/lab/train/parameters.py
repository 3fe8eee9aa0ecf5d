"""Parameters of priors and logit scales: their groups in optimisers, and FSDP2 that keeps them in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from attention_priors.attention import SSMax
from attention_priors.lab.train.recipe import OptimizationSettings
from attention_priors.priors import Prior


def parameter_groups(model: nn.Module, settings: OptimizationSettings) -> list[dict[str, Any]]:
    """Return the trainable parameters in four groups: matrices, vectors, priors, logit scales.

    Weight decay pulls matrices alone. Priors and logit scales have multiples of the learning rate;
    schedules that scale each group's own rate keep the ratios.

    Args:
        model: any, with priors anywhere in it.
        settings: :class:`TrainingSettings`, of which ``learning_rate``, ``weight_decay`` and the multipliers of the
            learning rate are used.

    Returns:
        For any optimiser of PyTorch: ``params``, ``name``, ``lr`` and ``weight_decay`` of each group.
    """
    special: dict[nn.Parameter, str] = {}
    for module in model.modules():
        if isinstance(module, Prior | SSMax):
            special |= dict.fromkeys(module.parameters(), "prior" if isinstance(module, Prior) else "logit_scale")
    kinds = {  # multiplier of the learning rate, and weight decay
        "matrices": (1.0, settings.weight_decay),
        "vectors": (1.0, 0.0),
        "prior": (settings.prior_learning_rate_multiplier, 0.0),
        "logit_scale": (settings.logit_scale_learning_rate_multiplier, 0.0),
    }
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in kinds}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[special.get(parameter, "matrices" if parameter.dim() > 1 else "vectors")].append(parameter)
    return [
        {"params": groups[name], "name": name, "lr": settings.learning_rate * multiplier, "weight_decay": decay}
        for name, (multiplier, decay) in kinds.items()
        if groups[name]
    ]


def make_optimizer(model: nn.Module, settings: OptimizationSettings) -> torch.optim.Optimizer:
    """Return AdamW, or RAdam with decoupled weight decay, over :func:`parameter_groups`.

    Args:
        model: any, with priors anywhere in it.
        settings: as for :func:`parameter_groups`, with ``optimizer``, ``betas`` and ``epsilon``.
    """
    groups = parameter_groups(model, settings)
    if settings.optimizer == "radam":
        return torch.optim.RAdam(groups, betas=settings.betas, eps=settings.epsilon, decoupled_weight_decay=True)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon)


def shard_priors(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Shard all priors and logit scales of a model as one FSDP2 group of their own, in float32.

    Call it before ``fully_shard`` (or accelerate) shards the rest. ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``
    would otherwise cast their parameters together with the matrices around them, and where the model itself is in
    bfloat16, FSDP2 would refuse two dtypes in one group. Gradients are reduced in float32 too.

    The group is gathered once, when the forward pass of ``model`` begins, and kept until its backward pass ends. FSDP2
    would gather parameters only where a module is called, but priors make tables and lanes at any time. They are a few
    numbers per head.

    Args:
        model: the whole model, as it is called; not itself sharded yet.
        mesh: as for ``fully_shard``; all processes by default.

    Raises:
        ValueError: ``model``, or a prior, is sharded already.
    """
    parts: list[nn.Module] = [module for module in model.modules() if isinstance(module, Prior | SSMax)]
    inner = {child for part in parts for child in part.modules() if child is not part}
    parts = [part for part in parts if part not in inner]
    for name, module in (("model", model), *((type(part).__name__, part) for part in parts)):
        if isinstance(module, FSDPModule):
            raise ValueError(f"{name} is sharded already; call shard_priors() before fully_shard()")
    if not parts:
        return
    fully_shard(parts, mesh=mesh, reshard_after_forward=False)
    group: Any = parts[0]

    def gather(module: nn.Module, inputs: Any) -> None:
        # A forward pass without a backward pass may leave values from before the last step of the optimiser.
        group.reshard()
        group.unshard()

    # The hook of fully_shard() for the root comes first, and must have run.
    model.register_forward_pre_hook(gather)
