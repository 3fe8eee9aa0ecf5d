"""GOAT's spectral prior, of which Sandwich is a special case."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from attention_priors.checks import check_above, check_at_least, check_positive_integers
from attention_priors.priors.base import Init, Lanes, Prior, Structure, checked_init, started


class Spectral(Prior):
    """Trigonometric sum over the distance: ``K(i, j) = Σ_r α_r cos(ω_r d) + β_r sin(ω_r d)``.

    ``d = i - j`` in tokens, ``ω_r = (2π / shortest_period) · base^(-r / max(R-1, 1))`` in radians per token,
    ``r = 0..R-1``. ``α_r`` is the symmetric and ``β_r`` the antisymmetric weight, in nats and of any sign. Beyond the
    longest period, ``base · shortest_period`` tokens, the prior is not meaningful. The prior is both stationary and
    factored, with ``2R`` lanes.

    *Sandwich* is this prior with fixed, equal cosines: ``K = H / 8h · Σ_k cos(d · 10000^(-k/R))`` in head ``h`` of
    ``1..H``, with ``k = 1..R``. Its paper writes ``d̄`` for ``2R`` and uses ``R = 64``. In Python: ``Spectral(H, R,
    10000 ** (1 - 1 / R), 2 * pi * 10000 ** (1 / R), init="sandwich", learn=False)``.

    Source: GOAT, equations 12 to 18, Appendix B and Proposition F.5; Sandwich (Chi, Fan, Rudnicky and Ramadge 2023).

    Args:
        num_heads: number of heads, ``H``.
        num_frequencies: number of frequencies, ``R``. Each has two weights per head.
        base: ratio of the longest to the shortest period.
        shortest_period: shortest period in tokens, at least 2, because shorter periods alias to longer ones. The
            default is GOAT's, one radian per token. For data with a period, such as codons, choose
            a series that contains the period.
        init: ``uniform`` (zeros), ``recency`` (small α ~ N(0, 0.02²)), ``sandwich`` (α = H / 8h in head h of 1..H, β =
            0), or numbers, ``{"alpha": ..., "beta": ...}``. ``recency`` breaks the symmetry between heads; GOAT pairs
            it with ALiBi's slopes, here :class:`KeySink` or :class:`Laplace`. Numbers have shape ``(R,)`` for all heads
            or ``(H, R)``; missing parameters are 0.
        learn: which of ``alpha``, ``beta`` train.
    """

    name = "spectral"
    structure = Structure.STATIONARY | Structure.FACTORED
    learnable = ("alpha", "beta")
    inits = ("uniform", "recency", "sandwich")

    def __init__(
        self,
        num_heads: int,
        num_frequencies: int = 8,
        base: float = 10000.0,
        shortest_period: float = 2 * math.pi,
        init: Init = "uniform",
        learn: bool | str | Collection[str] = ("alpha", "beta"),
    ) -> None:
        super().__init__(num_heads)
        check_positive_integers(num_frequencies=num_frequencies)
        check_above(1, base=base)
        check_at_least(2, shortest_period=shortest_period)
        self.num_frequencies = num_frequencies
        self.base = float(base)
        self.shortest_period = float(shortest_period)
        shape = (num_heads, num_frequencies)
        self.init = checked_init(init, self.inits, alpha=shape, beta=shape)
        self.alpha = nn.Parameter(torch.empty(num_heads, num_frequencies))
        self.beta = nn.Parameter(torch.empty(num_heads, num_frequencies))
        self.reset_parameters()
        self._set_learned(learn, alpha="alpha", beta="beta")

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return GOAT's frequencies, and a series around a period of 3 tokens."""
        return cls(num_heads), cls(num_heads, 5, base=500.0, shortest_period=3.0, init="recency", learn="beta")

    def reset_parameters(self) -> None:
        """Reset the weights to ``init``."""
        with torch.no_grad():
            if not isinstance(self.init, str):
                for name in ("alpha", "beta"):
                    weights = getattr(self, name)
                    weights.copy_(started(self.init, name, tuple(weights.shape)))
                return
            self.beta.zero_()
            if self.init == "sandwich":
                heads = torch.arange(1, self.num_heads + 1, device="cpu")
                self.alpha.copy_((self.num_heads / (8 * heads)).unsqueeze(-1).expand_as(self.alpha))
            else:
                self.alpha.normal_(std=0.02) if self.init == "recency" else self.alpha.zero_()

    def _phases(self, positions: Tensor) -> Tensor:
        geometric = angular_frequencies(self.num_frequencies, self.base, positions.device)
        return 2 * math.pi / self.shortest_period * geometric * positions.double().unsqueeze(-1)

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``K`` at each distance, ``(H, *distance.shape)``."""
        phase = self._phases(distance)
        bias = phase.cos() @ self.alpha.double().T + phase.sin() @ self.beta.double().T
        return bias.movedim(-1, 0).to(dtype)

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """Return ``2R`` lanes: ``[α cos ωi + β sin ωi, α sin ωi - β cos ωi]`` against ``[cos ωj, sin ωj]``."""
        query_phase, key_phase = self._phases(query_positions).unsqueeze(-3), self._phases(key_positions)
        alpha, beta = self.alpha.double().unsqueeze(-2), self.beta.double().unsqueeze(-2)
        cos, sin = query_phase.cos(), query_phase.sin()
        query = torch.cat([alpha * cos + beta * sin, alpha * sin - beta * cos], dim=-1)
        key = torch.cat([key_phase.cos(), key_phase.sin()], dim=-1)
        return Lanes(query.to(dtype), key.to(dtype))


def angular_frequencies(count: int, base: float, device: torch.device) -> Tensor:
    """Return ``ω_r = base^(-r / max(R-1, 1))`` in radians per token, ``(R,)`` in float64."""
    exponents = torch.arange(count, dtype=torch.float64, device=device) / max(count - 1, 1)
    return torch.pow(torch.tensor(base, dtype=torch.float64, device=device), -exponents)
