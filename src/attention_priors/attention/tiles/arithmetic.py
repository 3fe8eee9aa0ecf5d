"""What is done with the numbers of a tile in one pass."""

from __future__ import annotations

import torch
from torch import Tensor


def write_affine(entries: Tensor, row: Tensor | None, scale: Tensor | None, out: Tensor) -> Tensor:
    """Write ``entries · scale + row`` to ``out`` and return it; each broadcasts to it, and None changes nothing."""
    entries = entries.expand_as(out)
    if scale is not None:
        return torch.mul(entries, scale, out=out) if row is None else torch.addcmul(row, entries, scale, out=out)
    return out.copy_(entries) if row is None else torch.add(entries, row, out=out)


def diagonals(padded: Tensor) -> Tensor:
    """A view ``(..., n, n + e - 1)`` whose columns are diagonals: entries ``(i, j)`` of the same ``i + j``.

    Args:
        padded: ``(..., n, n + e)``, contiguous: the entries ``(..., n, e)``, after ``n`` columns of zeros.
    """
    rows, width = padded.shape[-2:]
    # Row i starts i places further to the left when rows are one number shorter than they are.
    strides = (*padded.stride()[:-2], width - 1, 1)
    return padded.as_strided((*padded.shape[:-1], width - 1), strides, padded.storage_offset() + rows)
