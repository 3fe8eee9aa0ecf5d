"""Priors on grids: one prior per axis, or one prior over Euclidean distance."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention_priors.config import build
from attention_priors.priors.base import Init, Lanes, Prior, Structure
from attention_priors.priors.clipped_offsets import ClippedOffsets
from attention_priors.priors.generalized_gaussian import GeneralizedGaussian
from attention_priors.priors.grid import OnGrid
from attention_priors.priors.laplace import Laplace
from attention_priors.priors.relative_buckets import RelativeBuckets
from attention_priors.priors.spectral import Spectral
from attention_priors.priors.uniform import Uniform

Description = Mapping[str, Any] | str | Prior


class Axial(OnGrid):
    """Sum of a prior over rows and one over columns: ``K(i, j) = K_rows(r_i - r_j) + K_columns(c_i - c_j)``.

    Positions are those of :func:`grid_positions`. A token outside the grid, such as a class token, has log-prior 0 to
    and from every patch. Among outside tokens, including a token to itself, the log-prior is that of distance 0.

    Source: GOAT, for images, with :class:`Spectral` on both axes; any stationary prior will do.

    Args:
        num_heads: number of heads, ``H``.
        rows: the prior over rows: a description, or a prior with ``num_heads`` heads.
        columns: the prior over columns; None for a second prior with the description of ``rows``.
    """

    name = "axial"
    structure = Structure.STATIONARY
    axes: ClassVar[dict[str, type[Prior]]] = {
        prior.name: prior
        for prior in (Uniform, Laplace, GeneralizedGaussian, Spectral, RelativeBuckets, ClippedOffsets)
    }
    """Priors that an axis may have. Distances on an axis have a sign, so buckets need ``bidirectional=True``."""

    def __init__(self, num_heads: int, rows: Description, columns: Description | None = None) -> None:
        super().__init__(num_heads)
        self.over_rows = _part("rows", rows, num_heads, Axial.axes)
        columns = self.over_rows.to_config() if columns is None else columns
        self.over_columns = _part("columns", columns, num_heads, Axial.axes)
        if all(Structure.FACTORED in part.structure for part in (self.over_rows, self.over_columns)):
            self.structure = Structure.STATIONARY | Structure.FACTORED

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return one family on both axes, two different families, and GOAT's prior."""
        series = Spectral(num_heads, 3, base=100.0, shortest_period=4.5)
        return (
            cls(num_heads, GeneralizedGaussian(num_heads)),
            cls(num_heads, Laplace(num_heads, learn=True), series),
            cls(num_heads, series),
        )

    @property
    def rows(self) -> dict[str, Any]:
        """Description of the prior over rows."""
        return _without_heads(self.over_rows)

    @property
    def columns(self) -> dict[str, Any]:
        """Description of the prior over columns."""
        return _without_heads(self.over_columns)

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``K`` at each difference of positions, ``(H, *distance.shape)``."""
        apart = self._apart(distance)
        both = self.over_rows.log_prior_at(apart.row, torch.float64)
        both = both + self.over_columns.log_prior_at(apart.column, torch.float64)
        return both.masked_fill(apart.outside, 0.0).to(dtype)

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """Return the row features, the column features, and one feature for pairs of outside tokens."""
        if Structure.FACTORED not in self.structure:
            return super().lanes(query_positions, key_positions, dtype=dtype)
        queries, keys = self._stands(query_positions), self._stands(key_positions)
        parts = [
            part.lanes(getattr(queries, axis), getattr(keys, axis), dtype=dtype)
            for part, axis in ((self.over_rows, "row"), (self.over_columns, "column"))
        ]
        query = torch.cat([part.query for part in parts], -1).masked_fill(queries.outside[..., None, :, None], 0.0)
        key = torch.cat([part.key for part in parts], -1).masked_fill(keys.outside.unsqueeze(-1), 0.0)
        at_home = self.log_prior_at(torch.zeros_like(query_positions[..., :1]), dtype).movedim(0, -2).unsqueeze(-1)
        own = at_home * queries.outside.to(dtype)[..., None, :, None]
        return Lanes(torch.cat([query, own], -1), torch.cat([key, keys.outside.to(dtype).unsqueeze(-1)], -1))

    def spaced(self, rows: float, columns: float) -> OnGrid:
        """Return the prior on another spacing (see :meth:`OnGrid.spaced`).

        Raises:
            ValueError: an axis has buckets or clipped offsets, which are defined at whole patches only.
        """
        for axis, part in (("rows", self.over_rows), ("columns", self.over_columns)):
            if isinstance(part, RelativeBuckets | ClippedOffsets):
                raise ValueError(f"{axis}: {part.name} is defined at whole patches only; use another prior")
        return super().spaced(rows, columns)

    def check(self, *, causal: bool) -> None:
        """Raise a ValueError if the prior of an axis cannot be used without a causal mask."""
        for part in (self.over_rows, self.over_columns):
            part.check(causal=False)

    def natural_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of both axes, named by axis and parameter: ``rows.beta``."""
        return {
            f"{axis}.{name}": value
            for axis, part in (("rows", self.over_rows), ("columns", self.over_columns))
            for name, value in part.natural_parameters().items()
        }


class Spectral2d(Axial):
    """GOAT's prior for images: ``K(i, j) = Spectral(r_i - r_j) + Spectral(c_i - c_j)``.

    Source: GOAT, equation 12 on both axes.

    Args:
        num_heads: number of heads, ``H``.
        num_frequencies: number of frequencies on each axis, ``R``. Each has two weights per head.
        base: ratio of the longest to the shortest period.
        shortest_period: shortest period in patches, at least 2. The default is GOAT's, one radian per patch.
        init: initialisation of both axes, as for :class:`Spectral`.
        learn: which of ``alpha``, ``beta`` train, on both axes.
    """

    name = "spectral_2d"
    structure = Structure.STATIONARY | Structure.FACTORED
    learnable = Spectral.learnable

    def __init__(
        self,
        num_heads: int,
        num_frequencies: int = 8,
        base: float = 100.0,
        shortest_period: float = 2 * math.pi,
        init: Init = "uniform",
        learn: bool | str | Collection[str] = ("alpha", "beta"),
    ) -> None:
        axis = Spectral(num_heads, num_frequencies, base, shortest_period, init, learn)
        super().__init__(num_heads, axis)
        self.num_frequencies, self.base, self.shortest_period = axis.num_frequencies, axis.base, axis.shortest_period
        self.init, self.learn = axis.init, axis.learn

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return GOAT's frequencies, and a few frequencies of shorter periods."""
        return cls(num_heads), cls(num_heads, 3, base=30.0, shortest_period=2.5, init="recency", learn="beta")


class Radial(OnGrid):
    """Prior over Euclidean distance on a grid: ``K(i, j) = K(√((r_i - r_j)² + (c_i - c_j)²))``.

    All directions count alike. Positions are those of :func:`grid_positions`. Tokens outside the grid are treated as in
    :class:`Axial`.

    Source: this library.

    Args:
        num_heads: number of heads, ``H``.
        prior: the prior over distance in patches, ``laplace`` or ``generalized_gaussian``. The location μ must be 0,
            because a Euclidean distance has no sign.
    """

    name = "radial"
    structure = Structure.STATIONARY
    over: ClassVar[dict[str, type[Prior]]] = {prior.name: prior for prior in (Laplace, GeneralizedGaussian)}

    def __init__(self, num_heads: int, prior: Description) -> None:
        super().__init__(num_heads)
        self.over_distance = _part("prior", prior, num_heads, self.over)
        if isinstance(self.over_distance, GeneralizedGaussian):
            there = self.over_distance.theta_mu.device.type != "meta"  # parameters have no values on "meta"
            if "mu" in self.over_distance.learn or (there and bool(self.over_distance.theta_mu.any())):
                raise ValueError(f"prior must have fixed μ = 0 in all heads, got {self.over_distance!r}")

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return one prior of each family."""
        return cls(num_heads, Laplace(num_heads, learn=True)), cls(num_heads, GeneralizedGaussian(num_heads))

    @property
    def prior(self) -> dict[str, Any]:
        """Description of the prior over distance."""
        return _without_heads(self.over_distance)

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``K`` at each difference of positions, ``(H, *distance.shape)``."""
        apart = self._apart(distance)
        straight = torch.hypot(apart.row.double(), apart.column.double())
        return self.over_distance.log_prior_at(straight, torch.float64).masked_fill(apart.outside, 0.0).to(dtype)

    def natural_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the prior over distance."""
        return self.over_distance.natural_parameters()


def _part(name: str, given: Description, num_heads: int, allowed: Mapping[str, type[Prior]]) -> Prior:
    try:
        made = given if isinstance(given, Prior) else build("prior", allowed, given, num_heads=num_heads)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if made.num_heads != num_heads:
        raise ValueError(f"{name} has num_heads={made.num_heads}, expected {num_heads}")
    if made.name not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {made.name}")
    return made


def _without_heads(prior: Prior) -> dict[str, Any]:
    return {key: value for key, value in prior.to_config().items() if key != "num_heads"}
