"""Compute dtypes, modules whose parameters stay in float32, and checks for tracing, capture and autocast."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

NEAR = 400.0
"""Largest magnitude, in nats, at which float32 is exact to 1e-4. Log-prior, logit and their terms are each rounded."""


def compute_dtype_of(query: Tensor) -> torch.dtype:
    """Return the dtype of biases, logits and log-sum-exps: float64 for float64 queries, else float32."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


NEGLIGIBLE = 2.0**-64
"""Largest weight that :func:`drop_negligible` sets to 0. Other weights are not denormal, nor are their products with
gradients from 1e-18 on. (In training, gradients of 1e-6 are common.)"""


def drop_negligible(weights: Tensor) -> Tensor:
    """Set float32 weights up to :data:`NEGLIGIBLE` to 0, in place.

    Rounding hides them in a sum of weights, which is 1. But on some CPUs, products of denormal numbers (below 2^-126)
    take 200 times as long as others, and attention with a steep prior has many.
    """
    return torch.threshold_(weights, NEGLIGIBLE, 0.0) if weights.dtype == torch.float32 else weights


def flushes_denormals() -> bool:
    """Return whether this thread counts denormal numbers as 0, see :func:`torch.set_flush_denormal`."""
    return sys.float_info.min / 2 == 0.0


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return ``ln Σ e^x`` over the last dimension.

    On CPUs, :func:`torch.logsumexp` takes up to 100 times as long where its exponentials underflow. A softmax does not.
    """
    best = logits.amax(-1)
    # The largest weight is e^(best - lse). An infinite logit is the result.
    return torch.where(best.isinf(), best, best - logits.softmax(-1).amax(-1).log())


class KeepsFloat32(nn.Module):
    """Module whose parameters are created in float32 and stay in float32 on every device.

    ``.to(device)`` moves the parameters. ``.to(dtype)``, ``.half()``, ``.double()`` and
    ``load_state_dict(assign=True)`` do not change their dtype. At position 100,000, bfloat16 cannot tell neighbours
    apart.
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
        # Submodules, such as KeySink's mlp, load afterwards from the same state dict.
        for name, parameter in self.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            if name in state_dict and state_dict[name].dtype != parameter.dtype:
                state_dict[name] = state_dict[name].detach().to(parameter.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _in_float32(construct: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that it creates float32 parameters whatever the default dtype is."""

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
    """Return whether tensors may have no values: during compilation and with FakeTensors."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_captured() -> bool:
    """Return whether a CUDA graph is being captured, during which no value can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def can_be_read(tensor: Tensor) -> bool:
    """Return whether a check may read the tensor's values.

    Only plain CPU tensors can be read without waiting for a device, outside of compilation, dispatch modes and
    transforms.
    """
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def is_in_autocast(device: str) -> bool:
    """Return whether autocast is enabled for a device type."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context that disables autocast for a device type."""
    # Entering an autocast context takes a tenth of a decoding step, so enter it only if autocast is enabled.
    return torch.autocast(device, enabled=False) if is_in_autocast(device) else nullcontext()
