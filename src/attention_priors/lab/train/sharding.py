"""FSDP2 with priors that stay in float32."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from attention_priors.attention import SSMax
from attention_priors.priors import Prior


def shard_priors(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Shard all priors and logit scales of a model as one FSDP2 group of their own, in float32.

    Call it before ``fully_shard`` (or accelerate) shards the rest. ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``
    would otherwise cast their parameters together with the matrices around them, and where the model itself is in
    bfloat16, FSDP2 would refuse two dtypes in one group. Gradients are reduced in float32 too.

    They are a few numbers per head. So they are gathered once, when the forward pass of ``model`` begins, and kept
    until its backward pass ends: priors are asked for tables and lanes at any time, and FSDP2 would gather parameters
    only where a module is called.

    Args:
        model: the whole model, which is what is called; not itself sharded yet.
        mesh: as for ``fully_shard``; all processes by default.

    Raises:
        ValueError: if ``model``, or a prior, is sharded already.
    """
    parts: list[nn.Module] = [module for module in model.modules() if isinstance(module, Prior | SSMax)]
    inner = {id(child) for part in parts for child in part.modules() if child is not part}
    parts = [part for part in parts if id(part) not in inner]
    for name, module in (("model", model), *((type(part).__name__, part) for part in parts)):
        if isinstance(module, FSDPModule):
            raise ValueError(f"{name} is sharded already; call shard_priors() before fully_shard()")
    if not parts:
        return
    fully_shard(parts, mesh=mesh, reshard_after_forward=False)
    group: Any = parts[0]

    def gather(module: nn.Module, inputs: Any) -> None:
        # What a forward pass without a backward pass has left may be older than the last step of the optimiser.
        group.reshard()
        group.unshard()

    # fully_shard() puts its own hook of the root first, and that one must have run.
    model.register_forward_pre_hook(gather)
