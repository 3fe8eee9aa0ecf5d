"""Sliding maximum and minimum over neighbouring numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def sliding_maximum(numbers: Tensor, width: int) -> Tensor:
    """Return the maximum of each window of ``width`` numbers of ``(H, N)``, ``(H, N - width + 1)``.

    A window holds the end of one run of ``width`` numbers and the start of the next run (van Herk 1992).
    """
    length = numbers.shape[1]
    runs = pad(numbers, (0, -length % width), value=float("-inf")).unflatten(1, (-1, width))
    to_end = runs.flip(2).cummax(2).values.flip(2).flatten(1)[:, : length - width + 1]
    from_start = runs.cummax(2).values.flatten(1)[:, width - 1 : length]
    return torch.maximum(to_end, from_start)


def sliding_minimum(numbers: Tensor, width: int) -> Tensor:
    """Return the minimum of each window of ``width`` numbers of ``(H, N)``, ``(H, N - width + 1)``."""
    return -sliding_maximum(-numbers, width)
