"""Which dtype is computed in, and parameters that stay in float32 when the model around them is cast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def compute_dtype_of(query: Tensor) -> torch.dtype:
    """The dtype of biases, logits and log-sum-exps: float64 for float64 queries, else float32."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


class KeepsFloat32(nn.Module):
    """A module whose parameters follow ``.to(device)`` but not ``.to(dtype)``, ``.half()`` or ``.double()``.

    What depends on position needs it: at a position of 100 000 bfloat16 can no longer tell neighbours apart.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)
