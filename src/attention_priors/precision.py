"""Which dtype is computed in, parameters that stay in float32 in a model that is cast, and numbers that can be read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

NEAR = 400.0
"""Nats from 0 up to which float32 is exact to 1e-4: log-prior, logit and what they are made of are each rounded."""


def compute_dtype_of(query: Tensor) -> torch.dtype:
    """The dtype of biases, logits and log-sum-exps: float64 for float64 queries, else float32."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


class KeepsFloat32(nn.Module):
    """A module whose parameters follow ``.to(device)``, are made in float32 and stay in it.

    ``.to(dtype)``, ``.half()``, ``.double()`` and ``load_state_dict(assign=True)`` do not change their dtype: at a
    position of 100 000, bfloat16 cannot tell neighbours apart.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _in_float32(cls.__init__)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Modules inside this one (KeySink's mlp) load next, from the same state dict.
        for name, parameter in self.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            if name in state_dict and state_dict[name].dtype != parameter.dtype:
                state_dict[name] = state_dict[name].detach().to(parameter.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _in_float32(construct: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor make float32 also within a model that is made in another dtype."""

    @wraps(construct)
    def constructed(*args: Any, **kwargs: Any) -> None:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            construct(*args, **kwargs)
        finally:
            torch.set_default_dtype(usual)

    return constructed


def is_traced() -> bool:
    """Whether tensors may have no values: while compiling, and among FakeTensors."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: then no number can be looked at."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def can_be_read(tensor: Tensor) -> bool:
    """Whether a check may read the tensor's numbers: no device is waited for, and nothing traces or transforms it."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def is_in_autocast(device: str) -> bool:
    """Whether the caller is, for this type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context in which the precision of every step is what the code says."""
    # To enter one is a tenth of a decoding step, and most callers are in none.
    return torch.autocast(device, enabled=False) if is_in_autocast(device) else nullcontext()
