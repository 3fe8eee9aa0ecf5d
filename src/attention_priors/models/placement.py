"""Parameters that are elsewhere: accelerate has spread a model over devices, or put parts of it away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


def beside(tensor: Tensor, *used: nn.Module | None) -> ExitStack:
    """Have the parameters of modules on a tensor's device for a while.

    accelerate sees to it itself for what is called. The parameters of a prior are read without a call of ``forward``,
    and layers on several devices may share one. Gradients find their way back to the parameters.
    """
    stack = ExitStack()
    for root in used:
        for module in () if root is None else root.modules():
            if any(p is not None and p.device != tensor.device for p in module._parameters.values()):
                stack.enter_context(_on_device(module, tensor.device))
    return stack


@contextmanager
def _on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    if hasattr(module, "_hf_hook"):
        from accelerate.utils import align_module_device, has_offloaded_params

        if has_offloaded_params(module):
            with align_module_device(module, device):
                yield
            return
    # As torch.func.functional_call does it: the parameters themselves stay what they are, and their optimiser's.
    own = dict(module._parameters)
    try:
        for name, parameter in own.items():
            if parameter is not None:
                module._parameters[name] = parameter.to(device)  # pyright: ignore[reportArgumentType]
        yield
    finally:
        module._parameters.update(own)
