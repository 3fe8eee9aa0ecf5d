"""Whether the numbers in tensors can be read: not while a function is traced, compiled or transformed."""

from __future__ import annotations

import torch
from torch import Tensor


def is_traced() -> bool:
    """Whether tensors may have no values: while compiling, and among FakeTensors."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def can_be_read(tensor: Tensor) -> bool:
    """Whether a check may read the tensor's numbers: no device is waited for, and nothing traces or transforms it."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )
