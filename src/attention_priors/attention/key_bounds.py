"""Balls around blocks of keys: what bounds every content score of a block without looking at its keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attention_priors.attention.geometry import block_length

BLOCK = 256
"""Keys, and queries, per block."""
ROUNDING = 2.0**-23
"""Relative error of a float32 operation, at most."""


class Balls(NamedTuple):
    """For each block of 256 keys its mean ``k̄`` and a radius ``r`` with ``‖k_j − k̄‖ ≤ r`` for all its keys."""

    means: Tensor
    """``(B, Hkv, ⌈L / 256⌉, D)``."""
    radii: Tensor
    """``(B, Hkv, ⌈L / 256⌉)``."""

    @classmethod
    def around(cls, key: Tensor) -> Balls:
        """Those of ``key (B, Hkv, L, D)``."""
        batch, heads, length, width = key.shape
        dtype = torch.float64 if key.dtype == torch.float64 else torch.float32
        means = torch.empty(batch, heads, -(-length // BLOCK), width, dtype=dtype, device=key.device)
        radii = torch.empty(means.shape[:-1], dtype=dtype, device=key.device)
        whole = length // BLOCK
        step = block_length(batch * heads * BLOCK * width)
        ranges = [(start, min(start + step, whole), BLOCK) for start in range(0, whole, step)]
        if length % BLOCK:
            ranges.append((whole, whole + 1, length % BLOCK))
        for start, stop, size in ranges:
            block = key[:, :, start * BLOCK : (stop - 1) * BLOCK + size].unflatten(2, (stop - start, size)).to(dtype)
            mean = block.mean(-2, keepdim=True)
            # Any centre will do, so the mean may be rounded; but rounding must not leave a key outside.
            radii[:, :, start:stop] = torch.linalg.vector_norm(block - mean, dim=-1).amax(-1) * (1 + width * ROUNDING)
            means[:, :, start:stop] = mean.squeeze(-2)
        return cls(means, radii)

    def beside(self, others: Balls) -> Balls:
        """Around vectors that are these keys and others side by side."""
        return Balls(torch.cat([self.means, others.means], dim=-1), torch.hypot(self.radii, others.radii))


class KeyBounds:
    """Bounds of cached keys, for :func:`attend` with a ``tolerance``.

    ``|<q, k_j> − <q, k̄>| ≤ ‖q‖ r`` for every query and every key of a block with mean ``k̄`` and radius ``r``
    (Cauchy-Schwarz). Without them :func:`attend` reads all keys to find ``k̄`` and ``r``, which in decoding is half of
    what attention without pruning does; so keep them beside the cache::

        bounds = KeyBounds(key)
        for ...:
            key = torch.cat([key, new_key], dim=2)
            bounds.update(key)
            out = attend(query, key, value, prior, tolerance=1e-6, key_bounds=bounds)

    Args:
        key: ``(B, Hkv, L, D)``, the keys so far.
    """

    def __init__(self, key: Tensor) -> None:
        if key.dim() != 4 or not key.is_floating_point():
            raise ValueError(f"key must be floating point (B, Hkv, L, D), got {key.dtype} {tuple(key.shape)}")
        self.length = key.shape[2]
        """How many keys there are."""
        with torch.no_grad():
            self.balls = Balls.around(key)

    def update(self, key: Tensor) -> None:
        """Take note of keys that were appended; those before are not looked at again, but for the last block.

        Args:
            key: ``(B, Hkv, L, D)``, all keys: those of before, and more.
        """
        means, radii = self.balls
        batch, heads, _, width = means.shape
        if key.dim() != 4 or (len(key), key.shape[1], key.shape[3]) != (batch, heads, width):
            raise ValueError(f"key must have shape ({batch}, {heads}, L, {width}), got {tuple(key.shape)}")
        if key.shape[2] < self.length:
            raise ValueError(f"key holds {key.shape[2]} keys, fewer than the {self.length} of before")
        done = self.length // BLOCK
        with torch.no_grad():
            new = Balls.around(key[:, :, done * BLOCK :])
            self.balls = Balls(
                torch.cat([means[:, :, :done], new.means], dim=2), torch.cat([radii[:, :, :done], new.radii], dim=2)
            )
        self.length = key.shape[2]
