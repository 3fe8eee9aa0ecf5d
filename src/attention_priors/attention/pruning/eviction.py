"""Cached keys that no future query can need."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import block_length
from attention_priors.attention.logit_scale import SSMax
from attention_priors.attention.problem import check_softmax_scale
from attention_priors.attention.pruning.bounds import BLOCK, Balls, block_sizes
from attention_priors.attention.pruning.certificate import LOWEST_MEAN, products_of_ends, select
from attention_priors.attention.pruning.sliding import sliding_maximum, sliding_minimum
from attention_priors.precision import log_sum_exp
from attention_priors.priors import Prior, Structure

STEPS = 4096
"""Largest number of ranges into which future positions are divided."""
NUMBERS = 2**21
"""Numbers per working buffer."""


@torch.no_grad()
def unneeded_keys(
    key: Tensor,
    prior: Prior,
    *,
    tolerance: float,
    query_norm: float | Tensor,
    final_length: int,
    logit_scale: SSMax | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Return the cached keys that no future query needs, up to ``tolerance`` of the query's weight.

    Let ``q`` be a query at a position ``p`` with ``L ≤ p < final_length``, and ``m`` any centre. By Cauchy-Schwarz,
    content scores lie within ``±s ‖q‖ ‖k_j − m‖`` of the constant ``s <q, m>``, which does not change the softmax. The
    cached keys thus bound the weight of all keys from below, for any future keys. The weight of each block of cached
    keys is bounded from above. The result is the largest set of blocks whose bounds add up to at most ``tolerance``
    for every such query.

    Args:
        key: Cached keys, shape ``(B, Hkv, L, D)``. Their positions are ``0`` to ``L - 1``.
        prior: Stationary prior.
        tolerance: Share of its weight that a query may lose, in (0, 1).
        query_norm: Largest norm ``‖q‖`` of future queries. Pass a number or a tensor ``(H,)``.
        final_length: Largest length that the sequence may reach, in tokens.
        logit_scale: Logit scale, as in :func:`attend`.
        softmax_scale: Scale of the content, as in :func:`attend`.

    Returns:
        Boolean ``(B, H, L)``; True marks a key that this query head does not need. All keys of a block of 256 have
        equal values. Evict a cached key once all heads that share it agree. With a ``logit_scale``, then pass
        ``visible_keys=p + 1`` to :func:`attend`, which otherwise counts only the remaining keys.

    Raises:
        ValueError: If an argument is invalid; the message names the argument and the reason.
    """
    heads = prior.num_heads
    if key.dim() != 4 or not key.is_floating_point() or key.shape[1] < 1 or heads % key.shape[1]:
        raise ValueError(
            f"key must be floating point (B, Hkv, L, D) with Hkv a divisor of {heads}, got "
            f"{key.dtype} {tuple(key.shape)}"
        )
    if not (isinstance(tolerance, int | float) and 0 < tolerance < 1):
        raise ValueError(f"tolerance must be in (0, 1), got {tolerance!r}")
    length = key.shape[2]
    if not (isinstance(final_length, int) and final_length > length):
        raise ValueError(f"final_length must be an integer above the {length} cached keys, got {final_length!r}")
    if any(Structure.STATIONARY not in term.structure for term in prior.terms()):
        raise ValueError(f"prior must be stationary, got {prior!r}")
    if logit_scale is not None and logit_scale.num_heads != heads:
        raise ValueError(f"logit_scale has num_heads={logit_scale.num_heads}, but prior has {heads}")
    norms = torch.as_tensor(query_norm, dtype=torch.float64, device=key.device)
    if norms.shape not in ((), (heads,)) or not bool((norms >= 0).all() & norms.isfinite().all()):
        raise ValueError(
            f"query_norm must be a finite number of at least 0, or one per head ({heads},), got {query_norm!r}"
        )
    scale = key.shape[-1] ** -0.5 if softmax_scale is None else check_softmax_scale(softmax_scale)

    future = _Future(prior, length, final_length, key.device)
    scores = _Scores.around(key.detach(), norms.expand(heads) * scale)
    worst = torch.full((len(key), heads, scores.upper.shape[-1]), -math.inf, dtype=torch.float64, device=key.device)
    step = block_length(worst.numel() + len(key) * heads * scores.near.shape[-1], NUMBERS)
    for first in future.first_positions.split(step):
        content, on_prior = future.scales(logit_scale, first)
        lower = future.total(scores, content, on_prior, first)
        largest = content * scores.upper.unsqueeze(2) + future.highest(on_prior, first) + scores.log_sizes
        # Hidden keys have no weight, even where the difference of two infinities is NaN.
        shares = (largest - lower.unsqueeze(-1)).masked_fill(torch.isneginf(largest), -math.inf)
        worst = torch.maximum(worst, shares.amax(2))
    kept, _ = select(worst, tolerance)
    return ~kept.repeat_interleave(BLOCK, dim=-1)[..., :length]


class _Scores(NamedTuple):
    """Largest differences between content scores and the centre's score, in nats, without the logit scale."""

    upper: Tensor
    """Bound for any key of a block, ``(B, H, blocks)``."""
    lower: Tensor
    """Bound for the mean of a block, ``(B, H, blocks)``."""
    near: Tensor
    """Bound for each of the last keys, last key first, ``(B, H, n)``."""
    log_sizes: Tensor
    """Logarithm of the number of keys per block, ``(blocks,)``."""

    @classmethod
    def around(cls, key: Tensor, norms: Tensor) -> _Scores:
        """Return bounds around the mean key, for queries of scaled ``norms (H,)`` and ``key (B, Hkv, L, D)``."""
        group = len(norms) // key.shape[1]
        balls = Balls.around(key)
        centre = key.double().mean(2, keepdim=True)
        apart = torch.linalg.vector_norm(balls.means.double() - centre, dim=-1)
        last = key[:, :, -BLOCK:].flip(2).double()
        near = torch.linalg.vector_norm(last - centre, dim=-1)
        parts = (apart + balls.radii.double(), apart, near)
        upper, lower, near = (x.repeat_interleave(group, dim=1) * norms.view(1, -1, 1) for x in parts)
        return cls(upper, lower, near, block_sizes(key.shape[2], near).log())


class _Future:
    """Log-prior between cached keys and future queries, a few query positions at a time.

    A *step* is a run of ``span`` query positions. Methods take the first position of each step, ``(T,)``.
    """

    def __init__(self, prior: Prior, length: int, final_length: int, device: torch.device) -> None:
        self.length, self.final_length = length, final_length
        self.span = -(-(final_length - length) // STEPS)
        self.first_positions = torch.arange(length, final_length, self.span, device=device)
        distances = torch.arange(0, final_length + BLOCK + self.span, device=device)
        values, visible = prior.log_prior_at(distances, torch.float64), prior.visible_at(distances)
        hidden = torch.zeros_like(distances, dtype=torch.bool) if visible is None else ~visible
        seen = values.masked_fill(hidden, -math.inf)
        self._high = sliding_maximum(seen, self.span)
        self._low = sliding_minimum(seen, self.span)
        self._block_high = sliding_maximum(seen, BLOCK + self.span - 1)
        self._block_low = sliding_minimum(values.masked_fill(hidden, math.inf), BLOCK + self.span - 1)
        total = pad(values.clamp(min=LOWEST_MEAN).cumsum(-1), (1, 0))
        mean = (total[:, BLOCK:] - total[:, :-BLOCK]) / BLOCK
        lowest = sliding_minimum(seen, BLOCK)  # -inf if any distance is hidden
        self._mean_low = sliding_minimum(mean.masked_fill(lowest < LOWEST_MEAN, -math.inf), self.span)
        self._mean_high = sliding_maximum(mean, self.span)

    def scales(self, logit_scale: SSMax | None, first: Tensor) -> tuple[Tensor, list[Tensor] | None]:
        """Return the range of the logit scale in each step.

        Returns:
            Largest factor of content scores, ``(H or 1, T, 1)``, and both ends of the log-prior's factor, ``(H, T)``
            each, or None if the log-prior is not scaled.
        """
        if logit_scale is None:
            return torch.ones(1, len(first), 1, dtype=torch.float64, device=first.device), None
        last = (first + self.span - 1).clamp(max=self.final_length - 1)
        ends = [logit_scale(position + 1, torch.float64) for position in (first, last)]
        return torch.stack(ends).abs().amax(0).unsqueeze(-1), ends if logit_scale.include_prior else None

    def highest(self, on_prior: list[Tensor] | None, first: Tensor) -> Tensor:
        """Return the highest scaled log-prior of each step in each block, ``(H, T, blocks)``."""
        start = self._block_starts(first).clamp(min=1)
        high = self._block_high[:, start]
        if on_prior is None:
            return high
        products = products_of_ends(on_prior, self._block_low[:, start], high)
        return products.amax(0).masked_fill(torch.isneginf(high), -math.inf)

    def total(self, scores: _Scores, content: Tensor, on_prior: list[Tensor] | None, first: Tensor) -> Tensor:
        """Return a lower bound of the log-sum-exp over cached keys, minus the centre's score, ``(B, H, T)``."""
        near = torch.arange(scores.near.shape[-1], device=first.device)
        distance = (first - self.length + 1).unsqueeze(-1) + near
        last_keys = self._lowest(self._low, self._high, distance, on_prior) - content * scores.near.unsqueeze(2)
        before = (self.length - len(near)) // BLOCK
        mean = self._lowest(self._mean_low, self._mean_high, self._block_starts(first)[:, :before], on_prior)
        blocks = mean - content * scores.lower[:, :, None, :before] + math.log(BLOCK)
        return log_sum_exp(torch.cat([last_keys, blocks], dim=-1))

    def _block_starts(self, first: Tensor) -> Tensor:
        """Return the smallest distance between each step's first query and each block, ``(T, blocks)``."""
        blocks = torch.arange(-(-self.length // BLOCK), device=first.device)
        return first.unsqueeze(-1) - (blocks + 1) * BLOCK + 1

    @staticmethod
    def _lowest(low: Tensor, high: Tensor, at: Tensor, on_prior: list[Tensor] | None) -> Tensor:
        """Return the lowest scaled number between ``low`` and ``high`` at each distance; ``-inf`` stays."""
        low = low[:, at]
        if on_prior is None:
            return low
        return products_of_ends(on_prior, low, high[:, at]).amin(0).masked_fill(torch.isneginf(low), -math.inf)
