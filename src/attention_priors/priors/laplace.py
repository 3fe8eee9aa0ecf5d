"""The Laplace prior (ALiBi), and ALiBi's slopes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.checks import check_positive_integers
from attention_priors.priors.base import LOG_PRIOR_FLOOR, Prior, Structure, per_head


class Laplace(Prior):
    """Linear penalty on distance: ``K(i, j) = -m_h · |i - j|``, slope ``m_h > 0`` in nats per token.

    With ALiBi's fixed slopes, this prior is ALiBi. Under a causal mask the prior is factored: ``-m (i - j)`` and ``m ·
    j`` differ by a constant per query (GOAT, Proposition F.6).

    Source: ALiBi (Press, Smith and Lewis 2022); BAM, Lemma 2.

    Args:
        num_heads: number of heads, ``H``.
        slopes: slopes ``m_h``, ``H`` positive numbers; None for ALiBi's slopes.
        learn: whether the slopes train (as logarithms, so that they stay positive).
    """

    name = "laplace"
    structure = Structure.STATIONARY
    learnable = ("slope",)

    def __init__(
        self,
        num_heads: int,
        slopes: Sequence[float] | None = None,
        learn: bool | str | Collection[str] = False,
    ) -> None:
        super().__init__(num_heads)
        if slopes is not None:
            slopes = _numbers("slopes", slopes)
            if len(slopes) != num_heads:
                raise ValueError(f"slopes must hold num_heads={num_heads} numbers, got {len(slopes)}")
            if not all(math.isfinite(slope) and slope > 0 for slope in slopes):
                raise ValueError(f"slopes must be positive and finite, got {list(slopes)}")
        self.slopes = slopes
        self.log_slope = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()
        self._set_learned(learn, slope="log_slope")

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return ALiBi, and a prior with trained slopes of several magnitudes."""
        return cls(num_heads), cls(num_heads, slopes=torch.logspace(0.3, -3, num_heads).tolist(), learn=True)

    @classmethod
    def from_mean_distance(
        cls, mean: float | Sequence[float], length: int, *, learn: bool | str | Collection[str] = False
    ) -> Laplace:
        """Return the maximum-entropy recency prior with a given mean distance.

        Among all distributions over the distances ``0..L-1`` with a given mean, the exponential one has maximum
        entropy: ``q(d) ∝ exp(-λ d)``. The rate ``λ`` solves ``mean = 1/(e^λ - 1) - L/(e^(λL) - 1)``. The right side
        falls strictly with ``λ``.

        Source: GOAT, Theorem 3 (Appendix F.3).

        Args:
            mean: mean distance in tokens, one number per head, or one number for a single head.
            length: number of distances, ``L``, at least 2.
            learn: as in the constructor.

        Raises:
            ValueError: a mean is not in ``(0, (L - 1) / 2)``. Larger means need ``λ <= 0``, which prefers far keys.
        """
        means = _numbers("mean", mean if isinstance(mean, Sequence) else [mean])
        if not means:
            raise ValueError("mean must hold at least one number, got none")
        slopes = [_max_entropy_rate(value, length) for value in means]
        return cls(len(slopes), slopes=slopes, learn=learn)

    @property
    def slope(self) -> Tensor:
        """Slope ``m``, ``(H,)``, in nats per token."""
        return self.log_slope.exp()

    def reset_parameters(self) -> None:
        """Reset the slopes to ``slopes``, or to ALiBi's."""
        slopes = (
            alibi_slopes(self.num_heads)
            if self.slopes is None
            else torch.tensor(self.slopes, dtype=torch.float64, device="cpu")
        )
        with torch.no_grad():
            self.log_slope.copy_(slopes.log())

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``-m |d|``, ``(H, *distance.shape)``."""
        # In the log domain neither the product nor its gradient can overflow; log 0 = -inf makes d = 0 exact.
        exponent = per_head(self.log_slope.double(), distance) + distance.abs().double().log()
        return (-exponent.clamp(max=math.log(-LOG_PRIOR_FLOOR)).exp()).to(dtype)


def _numbers(name: str, given: Any) -> tuple[float, ...]:
    """Return the numbers of a list, an array or a tensor. Strings raise an error, although ``list("12")`` works."""
    # Elements may be strings too: YAML reads 1e-3 as a string.
    words = str | bytes | bool | Mapping
    try:
        values: list[Any] = list(given)
        numbers = None if any(isinstance(each, words) for each in (given, *values)) else tuple(map(float, values))
    except (TypeError, ValueError, RuntimeError):
        numbers = None
    if numbers is None:
        raise ValueError(f"{name} must be numbers such as [0.5, 0.25], got {given!r}")
    return numbers


def _max_entropy_rate(mean: float, length: int) -> float:
    if not isinstance(length, int) or length < 2:
        raise ValueError(f"length must be an integer of at least 2, got {length!r}")
    middle = (length - 1) / 2
    if not 0 < mean < middle:
        raise ValueError(
            f"mean={mean!r} must be between 0 and (length - 1) / 2 = {middle}, exclusive: a larger mean does not "
            "prefer near keys and is not a recency prior"
        )

    def mean_at(rate: float) -> float:
        # Both terms have a pole at 0, and the poles cancel. expm1 keeps the difference precise enough to bisect.
        # Very small rates use the series around the middle: mean(λ) ≈ (L-1)/2 - λ (L² - 1)/12.
        if rate * length < 1e-4:
            return middle - rate * (length**2 - 1) / 12
        # expm1 overflows beyond 700, where the quotient is 0.
        head = 1 / math.expm1(rate) if rate < 700 else 0.0
        return head - (length / math.expm1(rate * length) if rate * length < 700 else 0.0)

    low, high = 0.0, 1.0
    while mean_at(high) > mean:
        high *= 2
    for _ in range(200):
        centre = (low + high) / 2
        if mean_at(centre) > mean:
            low = centre
        else:
            high = centre
    return (low + high) / 2


def alibi_slopes(num_heads: int) -> Tensor:
    """Return ALiBi's slope per head, ``(H,)`` in float64 on the CPU, in nats per token.

    For ``H`` a power of two, ``m_h = 2^(-8 (h + 1) / H)``. Otherwise let ``P`` be the largest power of two below ``H``:
    the slopes of ``P`` heads come first. Every other slope of ``2P`` heads follows, until there are ``H`` slopes.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (ICLR 2022), section 3 and its published code.
    """
    check_positive_integers(num_heads=num_heads)
    power = 2 ** math.floor(math.log2(num_heads))

    def geometric(count: int) -> Tensor:
        exponents = torch.arange(1, count + 1, dtype=torch.float64, device="cpu") / count
        return torch.pow(2.0, -8.0 * exponents)

    return torch.cat([geometric(power), geometric(2 * power)[::2][: num_heads - power]])
