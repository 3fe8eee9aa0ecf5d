"""Parameters that stay in float32 when the model around them is cast."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class KeepsFloat32(nn.Module):
    """A module whose parameters follow ``.to(device)`` but not ``.to(dtype)``, ``.half()`` or ``.double()``.

    What depends on position needs it: at a position of 100 000 bfloat16 can no longer tell neighbours apart.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)
