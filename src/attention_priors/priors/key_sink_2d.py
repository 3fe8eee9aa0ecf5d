"""GOAT's key-only prior on grids."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from attention_priors.checks import check_positive_integers
from attention_priors.priors.base import Lanes, Prior
from attention_priors.priors.grid import OnGrid, places_of
from attention_priors.priors.key_sink import FLOAT32_LENGTHS, KeySink
from attention_priors.priors.spectral import angular_frequencies
from attention_priors.priors.starts import Init


class KeySink2d(OnGrid, KeySink):
    """A default on a grid, whatever the query: ``K(i, j) = gain · MLP(r, c) + bump · 1[j stands outside]``, in nats.

    The MLP reads ``[sin ω_m r, cos ω_m r, sin ω_m c, cos ω_m c, r / R, c / C]``,
    with ``R`` and ``C`` the rows and columns of the training grids. What stands outside (a class token) is where an
    image's sink is; its ``r`` and ``c`` are 0.

    Source: GOAT, section 4, for images, where its key bias is on too.

    Args:
        num_heads: ``H``.
        rows: ``R``, in patches.
        columns: ``C``, in patches.
        num_frequencies: how many ``ω_m`` on each axis.
        hidden_size: width of the MLP.
        base: ratio of the longest to the shortest period.
        init: ``uniform`` (gain and bump 0), or the numbers, ``{"bump": 2.0}``.
        learn: which of ``gain``, ``bump``, ``mlp`` train.
        activation: of the MLP's hidden layer: ``gelu`` or ``silu``.
    """

    name = "key_sink_2d"
    learnable = ("gain", "bump", "mlp")
    inits = ("uniform",)

    def __init__(
        self,
        num_heads: int,
        rows: int,
        columns: int,
        num_frequencies: int = 8,
        hidden_size: int = 32,
        base: float = 100.0,
        init: Init = "uniform",
        learn: bool | str | Collection[str] = ("gain", "bump", "mlp"),
        activation: str = "gelu",
    ) -> None:
        check_positive_integers(rows=rows, columns=columns)
        if not isinstance(init, str) and "slope" in init:
            raise ValueError(f"init: on a grid there is no slope; got {dict(init)!r}")
        super().__init__(num_heads, max(rows, columns), num_frequencies, hidden_size, base, init, learn, activation)
        self.rows, self.columns = rows, columns

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return a sink on a rectangle, and a bump for what stands outside."""
        sizes = {"num_frequencies": 2, "hidden_size": 5, "base": 20.0}
        return (
            cls(num_heads, 4, 6),
            cls(num_heads, 3, 3, **sizes, init={"bump": 1.5}, learn=("gain", "bump"), activation="silu"),
        )

    def _number_of_features(self) -> int:
        return 4 * self.num_frequencies + 2

    def _features(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        places = self._stands(positions)
        frequencies = angular_frequencies(self.num_frequencies, self.base, positions.device)
        found = []
        for place in (places.row, places.column):
            phase = place.double().unsqueeze(-1) * frequencies
            found += [phase.sin(), phase.cos()]
        sizes = torch.stack([places.row.double() / self.rows, places.column.double() / self.columns], -1)
        return torch.cat([*found, sizes], -1).to(dtype)

    def _is_far(self, positions: Tensor) -> bool:
        places = self._stands(positions)
        largest = torch.stack([places.row.abs().amax() / self.rows, places.column.abs().amax() / self.columns]).amax()
        return bool(largest > FLOAT32_LENGTHS)

    @torch.no_grad()
    def natural_parameters(self) -> dict[str, Tensor]:
        """``gain`` and ``bump`` (nats)."""
        return {"gain": self.gain.clone(), "bump": self.bump.clone()}

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """``[gain, bump]`` against ``[MLP(j), 1[j stands outside]]``."""
        outside = places_of(key_positions).outside.to(dtype)
        key = torch.stack([self._shared_curve(key_positions, dtype), outside], -1)
        ones = torch.ones_like(query_positions, dtype=dtype)
        coefficients = torch.stack([self.gain, self.bump], -1).to(dtype).unsqueeze(-2)
        return Lanes(coefficients * ones.unsqueeze(-1).unsqueeze(-3), key, None)
