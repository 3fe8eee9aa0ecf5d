"""GOAT's key-only prior, an explicit attention sink, on lines and on grids."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention_priors.checks import check_above, check_choice, check_positive_integers
from attention_priors.precision import without_autocast
from attention_priors.priors.base import Init, Prior, Structure, checked_init, per_head, started
from attention_priors.priors.grid import OnGrid, places_of
from attention_priors.priors.laplace import alibi_slopes
from attention_priors.priors.spectral import angular_frequencies


class KeySink(Prior):
    """Bias of each key, independent of the query: ``K(i, j) = slope · j + gain · MLP(j) + bump · 1[j = 0]``, in nats.

    The MLP reads ``[sin ω_m j, cos ω_m j, j / T, ln(1 + j) / ln(1 + T)]``, with ``T`` the training length and geometric
    ``ω_m`` as in :class:`Spectral`. All heads share one MLP with one hidden layer. Slope, gain and bump are per head. A
    linear slope is a recency prior only under a causal mask (GOAT, Proposition F.6), so bidirectional attention with a
    slope raises an error.

    Source: GOAT, section 4 ("Explicit sink parameterization"), equation 19, Theorem 4.

    Args:
        num_heads: number of heads, ``H``.
        train_length: training length ``T`` in tokens.
        num_frequencies: number of frequencies ``ω_m``. Each adds a sine and a cosine.
        hidden_size: width of the MLP's hidden layer.
        base: ratio of the longest to the shortest period. Periods are geometric.
        init: ``uniform`` (gain, bump and slope 0), ``recency`` (gain and bump 0, ALiBi's slopes), or numbers,
            ``{"slope": 0.1, "bump": [2.0, 0.0]}``. A mapping holds one number for all heads or one per head; missing
            parameters are 0.
        learn: which of ``slope``, ``gain``, ``bump``, ``mlp`` train; None for all that ``init`` has. ``uniform`` has no
            slope.
        activation: ``gelu``, or ``silu`` as in the authors' package.
    """

    name = "key_sink"
    structure = Structure.OF_KEYS
    learnable = ("slope", "gain", "bump", "mlp")
    inits = ("uniform", "recency")
    activations: ClassVar[dict[str, type[nn.Module]]] = {"gelu": nn.GELU, "silu": nn.SiLU}

    def __init__(
        self,
        num_heads: int,
        train_length: int,
        num_frequencies: int = 8,
        hidden_size: int = 32,
        base: float = 10000.0,
        init: Init = "uniform",
        learn: bool | str | Collection[str] | None = None,
        activation: str = "gelu",
    ) -> None:
        super().__init__(num_heads)
        check_positive_integers(train_length=train_length, num_frequencies=num_frequencies, hidden_size=hidden_size)
        check_above(1, base=base)
        check_choice("activation", activation, tuple(self.activations))
        self.train_length = train_length
        self.num_frequencies = num_frequencies
        self.hidden_size = hidden_size
        self.base = float(base)
        self.init = checked_init(init, self.inits, slope=(num_heads,), bump=(num_heads,))
        self.activation = activation
        if learn is None:
            learn = self.learnable if self._starts_with_slope else ("gain", "bump", "mlp")
        if "slope" in self.learnable:  # KeySink2d has none
            self.slope = nn.Parameter(torch.empty(num_heads))
        self.gain = nn.Parameter(torch.empty(num_heads))
        self.bump = nn.Parameter(torch.empty(num_heads))
        self.mlp = nn.Sequential(
            nn.Linear(self._number_of_features(), hidden_size),
            self.activations[activation](),
            nn.Linear(hidden_size, 1),
        )
        self.reset_parameters()
        self._set_learned(learn, **{name: name for name in self.learnable})

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return a sink, and a sink with slopes."""
        sizes = {"num_frequencies": 3, "hidden_size": 5, "base": 77.0}
        return (
            cls(num_heads, 64),
            cls(num_heads, 100, **sizes, init="recency", learn=("gain", "bump"), activation="silu"),
        )

    @property
    def has_slope(self) -> bool:
        """Whether ``K`` has a linear slope, fixed or trained."""
        return self._starts_with_slope or "slope" in self.learn

    @property
    def _starts_with_slope(self) -> bool:
        return self.init == "recency" if isinstance(self.init, str) else "slope" in self.init

    def check(self, *, causal: bool) -> None:
        """Raise a ValueError for a slope without a causal mask."""
        if self.has_slope and not causal:
            raise ValueError(
                "KeySink with a slope needs a causal mask: in bidirectional attention the slope prefers the last key "
                "of the sequence, not near keys; use causal=True, or init='uniform' without 'slope' in learn"
            )

    def reset_parameters(self) -> None:
        """Reset the parameters to ``init``, and draw the MLP's weights anew."""
        with torch.no_grad():
            self.gain.zero_()
            given = {} if isinstance(self.init, str) else self.init
            self.bump.copy_(started(given, "bump", (self.num_heads,)))
            if "slope" in self.learnable:
                steep = alibi_slopes(self.num_heads) if self.init == "recency" else None
                self.slope.copy_(started(given, "slope", (self.num_heads,)) if steep is None else steep)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def _number_of_features(self) -> int:
        return 2 * self.num_frequencies + 2

    def _features(self, positions: Tensor) -> Tensor:
        """Return the MLP's input, ``(..., F)`` in float64."""
        position = positions.double().unsqueeze(-1)
        phase = position * angular_frequencies(self.num_frequencies, self.base, positions.device)
        # Negative positions are padding, which no query sees; any finite value is fine.
        logarithm = position.clamp(min=0).log1p() / math.log1p(self.train_length)
        return torch.cat([phase.sin(), phase.cos(), position / self.train_length, logarithm], -1)

    def _shared_curve(self, positions: Tensor) -> Tensor:
        """Return the MLP's output at each position, in the shape of ``positions``, in float64.

        Features grow with position and hidden units cancel, so precision matters. Autocast is disabled: bfloat16 would
        blur far positions.
        """
        first, activation, last = self.mlp
        # A replaced layer (quantised, LoRA) does not compute x @ weight.T + bias.
        if type(first) is not nn.Linear or type(last) is not nn.Linear:
            raise TypeError(
                f"KeySink's mlp has layers of {type(first).__module__}.{type(first).__qualname__}, expected "
                "torch.nn.Linear: exclude priors from quantisation and from LoRA "
                "(PEFT: LoraConfig(exclude_modules=r'.*prior.*'))"
            )
        with without_autocast(positions.device.type):
            hidden = nn.functional.linear(self._features(positions), first.weight.double(), first.bias.double())
            if torch.compiler.is_exporting() and isinstance(activation, nn.GELU):
                # ONNX Runtime has no erf in float64; the error of a hidden unit is 1e-7.
                active = hidden * (0.5 + 0.5 * torch.erf((hidden / math.sqrt(2)).float()).double())
            else:
                active = activation(hidden)
            out = nn.functional.linear(active, last.weight.double(), last.bias.double())
        return out.squeeze(-1)

    def log_prior_of_key(self, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``K`` of each key, ``(H, *key_positions.shape)``."""
        slope, gain, bump = (per_head(x.double(), key_positions) for x in (self.slope, self.gain, self.bump))
        curve = gain * self._shared_curve(key_positions) + bump * (key_positions == 0)
        return (curve + slope * key_positions).to(dtype)


class KeySink2d(OnGrid, KeySink):
    """Bias of each key on a grid: ``K(i, j) = gain · MLP(r, c) + bump · 1[j stands outside]``, in nats.

    The MLP reads ``[sin ω_m r, cos ω_m r, sin ω_m c, cos ω_m c, r / R, c / C]``, with ``R`` and ``C`` the rows and
    columns of the training grids. A token outside the grid (a class token) is an image's sink; its ``r`` and ``c`` are
    0.

    Source: GOAT, section 4, for images, where its key bias is on too.

    Args:
        num_heads: number of heads, ``H``.
        rows: rows of the training grids, ``R``, in patches.
        columns: columns of the training grids, ``C``, in patches.
        num_frequencies: number of frequencies ``ω_m`` on each axis. Each adds a sine and a cosine.
        hidden_size: width of the MLP's hidden layer.
        base: ratio of the longest to the shortest period.
        init: ``uniform`` (gain and bump 0), or numbers, ``{"bump": 2.0}``. A mapping holds one number for all heads or
            one per head.
        learn: which of ``gain``, ``bump``, ``mlp`` train.
        activation: activation of the MLP's hidden layer, ``gelu`` or ``silu``.
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
            raise ValueError(f"init must not set 'slope' on a grid, got {dict(init)!r}")
        super().__init__(num_heads, max(rows, columns), num_frequencies, hidden_size, base, init, learn, activation)
        self.rows, self.columns = rows, columns

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return a sink on a rectangle, and a bump for tokens outside the grid."""
        sizes = {"num_frequencies": 2, "hidden_size": 5, "base": 20.0}
        return (
            cls(num_heads, 4, 6),
            cls(num_heads, 3, 3, **sizes, init={"bump": 1.5}, learn=("gain", "bump"), activation="silu"),
        )

    def _number_of_features(self) -> int:
        return 4 * self.num_frequencies + 2

    def _features(self, positions: Tensor) -> Tensor:
        places = self._stands(positions)
        frequencies = angular_frequencies(self.num_frequencies, self.base, positions.device)
        found = []
        for place in (places.row, places.column):
            phase = place.double().unsqueeze(-1) * frequencies
            found += [phase.sin(), phase.cos()]
        sizes = torch.stack([places.row.double() / self.rows, places.column.double() / self.columns], -1)
        return torch.cat([*found, sizes], -1)

    def log_prior_of_key(self, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``K`` of each key, ``(H, *key_positions.shape)``."""
        gain, bump = (per_head(x.double(), key_positions) for x in (self.gain, self.bump))
        return (gain * self._shared_curve(key_positions) + bump * places_of(key_positions).outside).to(dtype)
