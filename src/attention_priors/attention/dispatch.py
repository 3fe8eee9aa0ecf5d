"""When PyTorch's dispatcher may be left out, and how an operator is mapped over a dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def nobody_watches(like: Tensor) -> bool:
    """Whether an operator's body may as well be called: in decoding, to dispatch an operator is a tenth of the time."""
    return (
        not torch.is_grad_enabled()
        and type(like) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def one_by_one(operator: Any, info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> Any:
    """Run an operator for each entry of the mapped dimension."""
    results = [
        operator(
            *(
                x.select(dim, index) if isinstance(x, Tensor) and dim is not None else x
                for x, dim in zip(inputs, in_dims, strict=True)
            )
        )
        for index in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)
