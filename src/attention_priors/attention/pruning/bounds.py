"""Balls around blocks of keys, which bound every content score of a block without reading its keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import block_length

BLOCK = 256
"""Keys, and queries, per block."""
ROUNDING = 2.0**-23
"""Largest relative error of a float32 operation."""


def product_error(width: int) -> float:
    """Return the largest error of a float32 dot product over ``width`` terms, relative to the product of the norms."""
    return (width + 8) * ROUNDING


def block_sizes(num_keys: int, like: Tensor) -> Tensor:
    """Return the number of keys in each block, ``(blocks,)``, with the dtype and device of ``like``."""
    starts = torch.arange(0, num_keys, BLOCK, dtype=like.dtype, device=like.device)
    return (num_keys - starts).clamp(max=BLOCK)


def in_blocks(numbers: Tensor, size: int, nothing: float) -> Tensor:
    """Split ``(..., L)`` into ``(..., ⌈L / size⌉, size)``; ``nothing`` fills the last block."""
    extra = -numbers.shape[-1] % size
    return (pad(numbers, (0, extra), value=nothing) if extra else numbers).unflatten(-1, (-1, size))


def products(query: Tensor, key: Tensor) -> Tensor:
    """Return the products of queries ``(b, h, n, D)`` and keys ``(b, hkv, e, D)``, ``(b, h, n, e)``."""
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    return (grouped @ key.mT).view(*query.shape[:-1], key.shape[2])


class Balls(NamedTuple):
    """Mean ``k̄`` and radius ``r`` of each block of keys: ``‖k_j − k̄‖ ≤ r`` for all keys of the block.

    The radius includes the rounding errors of content scores computed in float32.
    """

    keys: Tensor
    """Vectors ``[k̄, r, 1]``, ``(B, Hkv, blocks, D + 2)``. The product with ``[q, ‖q‖, x]`` is a bound plus ``x``."""
    reach: Tensor
    """Largest norm of the keys, ``(B, Hkv, blocks)``."""

    @property
    def means(self) -> Tensor:
        """Mean key of each block, ``(B, Hkv, blocks, D)``."""
        return self.keys[..., :-2]

    @property
    def radii(self) -> Tensor:
        """Radius of each block, ``(B, Hkv, blocks)``."""
        return self.keys[..., -2]

    @classmethod
    def around(cls, key: Tensor) -> Balls:
        """Return the balls around blocks of 256 keys of ``key (B, Hkv, L, D)``."""
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
            radii[:, :, start:stop] = torch.linalg.vector_norm(block - mean, dim=-1).amax(-1)
            means[:, :, start:stop] = mean.squeeze(-2)
        return cls.of(means, radii)

    @classmethod
    def of(cls, means: Tensor, radii: Tensor) -> Balls:
        """Return balls with these means and radii, which may be rounded."""
        error = product_error(means.shape[-1])
        reach = (torch.linalg.vector_norm(means, dim=-1) + radii) * (1 + error)
        radii = radii + error * reach
        return cls(torch.cat([means, radii.unsqueeze(-1), torch.ones_like(radii).unsqueeze(-1)], dim=-1), reach)

    def joined(self, factor: int, num_keys: int) -> Balls:
        """Return balls around groups of ``factor`` blocks of 256, over ``num_keys`` keys."""
        means, width = self.means, self.means.shape[-1]
        sizes = block_sizes(num_keys, means)
        extra = -len(sizes) % factor
        sizes = pad(sizes, (0, extra)).view(-1, factor, 1)
        parts = pad(means, (0, 0, 0, extra)).unflatten(2, (-1, factor))
        joint = (parts * sizes).sum(-2) / sizes.sum(-2)
        apart = torch.linalg.vector_norm(parts - joint.unsqueeze(-2), dim=-1) * (1 + width * ROUNDING)
        within = pad(self.radii, (0, extra)).unflatten(2, (-1, factor))
        return Balls.of(joint, (apart + within).masked_fill(sizes[..., 0] == 0, 0.0).amax(-1))


class KeyBounds:
    """Bounds of cached keys, for :func:`attend` with a ``tolerance``.

    Every query and every key of a block with mean ``k̄`` and radius ``r`` satisfy ``|<q, k_j> − <q, k̄>| ≤ ‖q‖ r``
    (Cauchy-Schwarz). Without bounds, :func:`attend` reads all keys to compute ``k̄`` and ``r``. In decoding, this is
    half of the work of attention without pruning. Keep the bounds beside the cache::

        bounds = KeyBounds(key)
        for ...:
            key = torch.cat([key, new_key], dim=2)
            bounds.update(key)
            out = attend(query, key, value, prior, tolerance=1e-6, key_bounds=bounds)

    Args:
        key: Cached keys, shape ``(B, Hkv, L, D)``.
    """

    def __init__(self, key: Tensor) -> None:
        if key.dim() != 4 or not key.is_floating_point():
            raise ValueError(f"key must be floating point (B, Hkv, L, D), got {key.dtype} {tuple(key.shape)}")
        self.length = key.shape[2]
        """Number of keys."""
        self.balls = Balls.around(key.detach())
        """Balls around blocks of 256 keys."""

    def update(self, key: Tensor) -> None:
        """Add appended keys to the bounds. Of the earlier keys, only the last block is read again.

        Args:
            key: All keys, earlier and appended, ``(B, Hkv, L, D)``.
        """
        known = self.balls
        batch, heads, _, width = known.means.shape
        if key.dim() != 4 or (len(key), key.shape[1], key.shape[3]) != (batch, heads, width):
            raise ValueError(f"key must have shape ({batch}, {heads}, L, {width}), got {tuple(key.shape)}")
        if key.shape[2] < self.length:
            raise ValueError(f"key must hold all {self.length} earlier keys and the new ones, got {key.shape[2]} keys")
        done = self.length // BLOCK
        new = Balls.around(key.detach()[:, :, done * BLOCK :])
        self.balls = Balls(*(torch.cat([old[:, :, :done], more], dim=2) for old, more in zip(known, new, strict=True)))
        self.length = key.shape[2]
