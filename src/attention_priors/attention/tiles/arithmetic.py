"""Arithmetic on the numbers of a tile."""

from __future__ import annotations

import torch
from torch import Tensor


def write_affine(entries: Tensor, row: Tensor | None, scale: Tensor | None, out: Tensor) -> Tensor:
    """Write ``entries · scale + row`` to ``out`` and return ``out``. Inputs broadcast; None skips an operation."""
    entries = entries.expand_as(out)
    if scale is not None:
        # With a number per query, ``addcmul`` takes three times as long as both operations.
        scaled = torch.mul(entries, scale, out=out)
        return scaled if row is None else scaled.add_(row)
    return out.copy_(entries) if row is None else torch.add(entries, row, out=out)


def diagonals(padded: Tensor) -> Tensor:
    """Return a view ``(..., n, n + e - 1)`` whose columns are diagonals: entries ``(i, j)`` of one ``i + j``.

    Args:
        padded: contiguous ``(..., n, n + e)``: ``n`` columns of zeros, then the entries ``(..., n, e)``.
    """
    rows, width = padded.shape[-2:]
    # With a row stride of `width - 1`, row i starts i places further to the left.
    strides = (*padded.stride()[:-2], width - 1, 1)
    return padded.as_strided((*padded.shape[:-1], width - 1), strides, padded.storage_offset() + rows)


def causal_diagonals(numbers: Tensor) -> Tensor:
    """Return a view ``(..., n, e - 1)`` of a tile that ends at the causal diagonal, without padding.

    Its columns are the diagonals ``i + j = 1`` to ``e - 1``. Entry ``(0, 0)`` is in none of them.

    Args:
        numbers: contiguous ``(..., n, e)``, 0 for all ``i + j >= e``, which are hidden.
    """
    # As in `diagonals`, a row starts further to the left. Here these places are zeros at the end of the row before.
    columns = numbers.shape[-1]
    strides = (*numbers.stride()[:-2], columns - 1, 1)
    return numbers.as_strided((*numbers.shape[:-1], columns - 1), strides, numbers.storage_offset() + 1)
