"""T5's relative position buckets."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from attention_priors.checks import check_booleans
from attention_priors.priors.base import Init, Prior, Structure, checked_init, started
from attention_priors.priors.generalized_gaussian import TABLE_INITS, initial_log_prior


class RelativeBuckets(Prior):
    """Learned scalar per bucket of distance: ``K(i, j) = b_h[bucket(i - j)]``, in nats.

    Buckets are exact for small distances, then spaced logarithmically up to ``max_distance``; all larger distances
    share the last bucket. One-directional (causal) buckets: ``N/2`` are exact, and all keys after the query share
    bucket 0. Bidirectional buckets: each direction has half of the buckets.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning" (JMLR 2020), section 2.1 and the published code,
    whose float32 logarithm decides the boundaries.

    Args:
        num_heads: number of heads, ``H``.
        num_buckets: number of buckets ``N``, of all directions together. Each has one scalar per head.
        max_distance: distance in tokens from which the last bucket begins, at the latest.
        bidirectional: whether keys after the query have buckets of their own. Use True without a causal mask.
        init: ``uniform`` (zeros), ``normal`` (N(0, 1/512), T5-small's start, whose width is 512), ``neighbours``,
            ``previous``, or numbers, ``{"bias": ...}``. Numbers have shape ``(num_buckets,)`` for all heads, or
            ``(H, num_buckets)``. ``neighbours`` and ``previous`` give each bucket the log-prior of the Generalized
            Gaussian with this start, at the bucket's smallest distance and at least -16.
        learn: whether the scalars train.
    """

    name = "relative_buckets"
    structure = Structure.STATIONARY
    learnable = ("bias",)
    inits = ("uniform", "normal", *TABLE_INITS)

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        init: Init = "uniform",
        learn: bool | str | Collection[str] = True,
    ) -> None:
        super().__init__(num_heads)
        check_booleans(bidirectional=bidirectional)
        least = 4 if bidirectional else 2
        if not isinstance(num_buckets, int) or num_buckets < least or (bidirectional and num_buckets % 2):
            kind = f"an even integer of at least {least}" if bidirectional else f"an integer of at least {least}"
            raise ValueError(f"num_buckets must be {kind}, got {num_buckets!r}")
        exact = num_buckets // (4 if bidirectional else 2)
        if not isinstance(max_distance, int) or max_distance <= exact:
            raise ValueError(
                f"max_distance must be an integer above {exact}, the number of exact buckets, got {max_distance!r}"
            )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.init = checked_init(init, self.inits, bias=(num_heads, num_buckets))
        self.bias = nn.Parameter(torch.empty(num_heads, num_buckets))
        self.reset_parameters()
        self._set_learned(learn, bias="bias")

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return T5's one-directional buckets, and a few bidirectional ones."""
        return cls(num_heads), cls(num_heads, 12, max_distance=40, bidirectional=True, init="normal", learn=False)

    def reset_parameters(self) -> None:
        """Reset the scalars to ``init``."""
        with torch.no_grad():
            if not isinstance(self.init, str):
                self.bias.copy_(started(self.init, "bias", tuple(self.bias.shape)))
            elif self.init in TABLE_INITS:
                # From far to near, so that the smallest distance of each bucket is written last.
                apart = torch.arange(self.max_distance, -self.max_distance - 1, -1, device="cpu")
                apart = apart[apart.abs().argsort(descending=True)]
                log_priors = initial_log_prior(self.init, self.num_heads, apart).T
                for bucket, log_prior in zip(self.bucket(apart), log_priors, strict=True):
                    self.bias[:, bucket] = log_prior
            else:
                self.bias.normal_(std=512**-0.5) if self.init == "normal" else self.bias.zero_()

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance ``d = i - j``, an integer in ``0..num_buckets - 1``."""
        buckets = self.num_buckets
        first = torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            first = torch.where(distance < 0, buckets, first)
            magnitude = distance.abs()
        else:
            magnitude = distance.clamp(min=0)
        exact = buckets // 2
        # T5 computes this logarithm in float32; float64 could move a distance on a boundary to another bucket.
        ratio = torch.log(magnitude.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        spaced = (exact + (ratio * (buckets - exact)).to(distance.dtype)).clamp(max=buckets - 1)
        return first + torch.where(magnitude < exact, magnitude, spaced)

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``K`` at each distance, ``(H, *distance.shape)``."""
        # Cast before indexing: the scalars' gradients are sums over many distances, computed in this dtype.
        return self.bias.to(dtype)[:, self.bucket(distance)]
