"""FIRE: a learned function of the distance relative to the query's position."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from attention_priors.checks import check_positive_integers
from attention_priors.priors.base import Init, Prior, ScaledDistance, Structure, checked_init, started

STARTS = {"c": 0.1, "threshold": 512.0}
"""Initial ``c`` and ``L0`` in FIRE's paper."""
LARGEST_LOGARITHM = 100.0
"""Bound on the logarithm of a parameter; larger values would leave the range of float64."""


class Fire(Prior):
    """ReLU network of interpolated distance: ``K(i, j) = f_h(ψ(|i - j|) / ψ(max(L0, i)))``, ``ψ(x) = ln(1 + c x)``.

    ``f_h(x) = b_h + Σ_k a_hk max(0, w_k x + v_k)``, in nats. Heads share the hidden units, ``c > 0`` and the threshold
    ``L0 ≥ 1`` in tokens. For queries up to the threshold, ``K`` depends on the distance alone. For later queries, the
    network's input for past keys lies between 0 and 1 at any length of context.

    The query's position ``i`` counts from the start of the sequence, so use a causal mask. ``K`` treats keys after the
    query as keys at the same distance before it.

    Source: FIRE (Li et al., "Functional Interpolation for Relative Positions Improves Long Context Transformers", ICLR
    2024) and the code printed there.

    Args:
        num_heads: number of heads, ``H``.
        hidden_size: number of hidden units, ``W``.
        init: ``sampled`` (``c`` 0.1, ``L0`` 512, and PyTorch's initialisation of linear layers, as in the paper), or
            numbers, ``{"c": 0.1, "threshold": 512.0, "hidden": ..., "outer": ...}``. ``hidden`` holds ``w`` and ``v``,
            ``(2, W)``. ``outer`` holds ``a`` and, in its last column, ``b``, ``(H, W + 1)``. Missing parameters start
            as in ``sampled``.
        learn: which of ``hidden``, ``outer``, ``c``, ``threshold`` train, the last two as logarithms.
    """

    name = "fire"
    structure = Structure.SCALED_DISTANCE
    learnable = ("hidden", "outer", "c", "threshold")
    inits = ("sampled",)

    def __init__(
        self,
        num_heads: int,
        hidden_size: int = 32,
        init: Init = "sampled",
        learn: bool | str | Collection[str] = True,
    ) -> None:
        super().__init__(num_heads)
        check_positive_integers(hidden_size=hidden_size)
        self.hidden_size = hidden_size
        sizes = {"hidden": (2, hidden_size), "outer": (num_heads, hidden_size + 1)}
        self.init = checked_init(init, self.inits, c=(1,), threshold=(1,), **sizes)
        given = STARTS if isinstance(self.init, str) else STARTS | self.init
        for name, least in (("c", 0.0), ("threshold", 1.0)):
            value = float(started(given, name, (1,)))
            if value < least or value == 0:
                raise ValueError(f"init[{name!r}] must be {'above 0' if least == 0 else 'at least 1'}, got {value:g}")
        self.hidden = nn.Parameter(torch.empty(sizes["hidden"]))
        self.outer = nn.Parameter(torch.empty(sizes["outer"]))
        self.log_c = nn.Parameter(torch.empty(1))
        self.log_threshold = nn.Parameter(torch.empty(1))
        self.reset_parameters()
        self._set_learned(learn, hidden="hidden", outer="outer", c="log_c", threshold="log_threshold")

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return the paper's prior, and a small network with a short threshold."""
        start = {"c": 1.0, "threshold": 4.0}
        return cls(num_heads), cls(num_heads, hidden_size=5, init=start, learn=("hidden", "outer"))

    def reset_parameters(self) -> None:
        """Reset the parameters to ``init``."""
        given = STARTS if isinstance(self.init, str) else STARTS | self.init
        with torch.no_grad():
            for name, bound in (("hidden", 1.0), ("outer", self.hidden_size**-0.5)):
                weights, shape = getattr(self, name), tuple(getattr(self, name).shape)
                sampled = (2 * torch.rand(shape, device="cpu") - 1) * bound
                weights.copy_(started(given, name, shape) if name in given else sampled)
            self.log_c.copy_(started(given, "c", (1,)).double().log())
            self.log_threshold.copy_(started(given, "threshold", (1,)).double().log())

    @torch.no_grad()
    def natural_parameters(self) -> dict[str, Tensor]:
        """Return ``c`` (per token) and ``threshold`` (tokens), each expanded to ``(H,)``."""
        numbers = {"c": self.log_c, "threshold": self.log_threshold}
        return {name: logarithm.exp().expand(self.num_heads).clone() for name, logarithm in numbers.items()}

    def scaled_distance(self, query_positions: Tensor, distance: Tensor) -> ScaledDistance:
        """Return the network, with ``u(i) = 1 / ψ(max(L0, i))`` and ``ψ`` of each distance."""
        c = self.log_c.double().clamp(-LARGEST_LOGARITHM, LARGEST_LOGARITHM).exp()
        threshold = self.log_threshold.double().clamp(0.0, LARGEST_LOGARITHM).exp()
        length = torch.maximum(query_positions.double(), threshold)
        apart = distance.abs().double()
        return ScaledDistance(
            1 / torch.log1p(c * length), torch.log1p(c * apart), self.hidden.double(), self.outer.double()
        )
