"""Which dtype is computed in, and parameters that stay in float32 when the model around them is cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def compute_dtype_of(query: Tensor) -> torch.dtype:
    """The dtype of biases, logits and log-sum-exps: float64 for float64 queries, else float32."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


class KeepsFloat32(nn.Module):
    """A module whose parameters follow ``.to(device)`` and stay in float32.

    ``.to(dtype)``, ``.half()``, ``.double()`` and ``load_state_dict(assign=True)`` do not change their dtype: at a
    position of 100 000, bfloat16 cannot tell neighbours apart.
    """

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
