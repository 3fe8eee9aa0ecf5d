"""The Generalized Gaussian prior of BAM."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from attention_priors.checks import check_booleans
from attention_priors.priors.base import LOG_PRIOR_FLOOR, Init, Prior, Structure, checked_init, per_head, started
from attention_priors.priors.laplace import alibi_slopes

EPSILON = 1e-5
"""Constant added to the distance, so that ``K`` with β < 0 is finite at d = 0 (BAM, Appendix C)."""

LARGEST_GRADIENT = 1e38
"""Bound on gradients, just below the largest float32."""

LARGEST_EXPONENT = math.log(-LOG_PRIOR_FLOOR)
"""Bound on ``ln(-K)``, at which ``K`` reaches the log-prior floor."""

FEW_DISTANCES = {"cpu": 2**10, "cuda": 2**14}
"""Number of distances up to which the forward pass keeps intermediate values for the backward pass, by device type.

Recomputing them for so short a table costs more in time than it saves in memory.
"""

MINIMUM_SHAPE = 0.05
"""Smallest ``|β|`` of any head with ``keep_sign``."""

PHRASE = 20
"""Scale α of the phrase head of ``init="phrases"``, in tokens."""

TABLE_INITS = ("neighbours", "previous")
"""Names of ``init`` that learned tables have too."""


class GeneralizedGaussian(Prior):
    """BAM's prior: ``K(i, j) = -e^θα · ( |(j - i) - μ| + ε )^β``, ε = 1e-5, in nats.

    Each head has a scale, a shape and a location. A parameter θ of its own trains each of them.

    - *Scale* α, ``alpha``: the distance from μ that costs one nat, in tokens. ``α = e^(-θα/β)`` is undefined (nan)
      where ``β = 0``. The trained θα, ``theta_alpha``, is always defined: ``e^θα`` is the penalty one token from μ, in
      nats.
    - *Shape* β, ``beta``. The trained parameter is θβ, ``theta_beta``. Without ``keep_sign``, ``β = θβ``.
    - *Location* μ, ``mu``: the peak, in tokens along ``j - i``. ``μ > 0`` moves the peak beyond a causal mask. The
      trained parameter is θμ, ``theta_mu``, with ``μ = 2 sinh θμ``.

    The shape decides the kind of head.

    - ``β = 1, μ = 0, α = 1/m`` is ALiBi, and ``β = 2`` a Gaussian.
    - ``0 < β < 1`` has a heavier tail than ALiBi.
    - ``β < 0`` is not a proper distribution. A *retrieval head* with ``β < 0`` suppresses near keys and leaves far keys
      unchanged.
    - ``β = 0`` is the uniform prior.

    Source: BAM, section 2.3, section 2.4 and Appendix C.

    Args:
        num_heads: number of heads, ``H``.
        init: initial parameters, a name or numbers. μ starts at 0 unless stated.
            - ``uniform``: the paper's best, ``θα = β = 0``. The parameter θα gets no gradient until β has moved.
            - ``laplace``: ALiBi. ``β = 1``, and ``e^θα`` are ALiBi's slopes.
            - ``linear``: β from 0 to 1 over the heads, θα = 0.
            - ``spread``: β from -0.5 to 1 over the heads, θα = 0. Added by this library.
            - ``roles``: the first half of the heads retrieve (β = -0.5, θα = 0). The others are local (β = 1, slopes
              from 1/2 to 1/16). Added by this library.
            - ``neighbours``: the first half of the heads retrieve, as in ``roles``. The others look at the first,
              second, third, ... token before the query (β = 1, θα = 0, μ = -1, -2, -3, ...). Added by this library.
            - ``previous``: all heads look at the first, second, third, ... token before the query. For layers below
              layers with retrieval heads. Added by this library.
            - ``phrases``: as ``neighbours``, but the last head looks at the last phrase, a Gaussian over 20 tokens
              (β = 2, α = 20). Fixed heads (``learn=False``) tell keys of several tokens apart. Added by this library.
            - ``sampled``: θα, β ~ N(0, 1).
            - A mapping such as ``{"theta_alpha": 0.0, "beta": [-0.5, 1.0], "mu": [0.0, -1.0]}``: one number for all
              heads, or one per head. Missing parameters are 0. θα stands in for α, which β = 0 leaves undefined.
        learn: which of ``alpha``, ``beta``, ``mu`` train, by θα, θβ, θμ.
        keep_sign: whether each head keeps the sign of its initial β. Then ``β = ±(softplus(2 θβ)/2 + 0.05)``. A
            retrieval head stays a retrieval head, and BAM's Theorem 4 holds for it throughout training. ``init`` must
            give every head a definite sign. A head that ``spread`` puts on ``β = 0`` becomes local, with ``β = 0.06``.
    """

    name = "generalized_gaussian"
    structure = Structure.STATIONARY
    learnable = ("alpha", "beta", "mu")
    inits = ("uniform", "laplace", "linear", "spread", "roles", "neighbours", "previous", "phrases", "sampled")
    signed_inits = ("laplace", "spread", "roles", "neighbours", "previous", "phrases")
    """Names of ``init`` that start every head with a definite sign of β."""

    def __init__(
        self,
        num_heads: int,
        init: Init = "uniform",
        learn: bool | str | Collection[str] = ("alpha", "beta"),
        keep_sign: bool = False,
    ) -> None:
        super().__init__(num_heads)
        self.init = checked_init(init, self.inits, theta_alpha=(num_heads,), beta=(num_heads,), mu=(num_heads,))
        check_booleans(keep_sign=keep_sign)
        if keep_sign and not self._starts_signed():
            raise ValueError(
                "keep_sign=True needs an init that gives every head a β of definite sign "
                f"({', '.join(self.signed_inits)}, or numbers beyond ±{MINIMUM_SHAPE}); got init={init!r}"
            )
        self.keep_sign = keep_sign
        self.theta_alpha = nn.Parameter(torch.empty(num_heads))
        self.theta_beta = nn.Parameter(torch.empty(num_heads))
        self.theta_mu = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()
        self._set_learned(learn, alpha="theta_alpha", beta="theta_beta", mu="theta_mu")

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return a uniform start, and starts with near and far heads."""
        return (
            cls(num_heads),
            cls(num_heads, init="roles", learn=("alpha", "mu"), keep_sign=True),
            cls(num_heads, init="neighbours", learn=False),
        )

    def _starts_signed(self) -> bool:
        if isinstance(self.init, str):
            return self.init in self.signed_inits
        return bool((started(self.init, "beta", (self.num_heads,)).abs() > MINIMUM_SHAPE).all())

    def _initial(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the initial θα, β and μ, each ``(H,)``, on the CPU: parameters on "meta" have no values."""
        heads = self.num_heads
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        zero = torch.zeros(heads, **options)
        if not isinstance(self.init, str):
            theta_alpha, beta, mu = (started(self.init, name, (heads,)) for name in ("theta_alpha", "beta", "mu"))
            return theta_alpha, beta, mu
        if self.init == "laplace":
            return alibi_slopes(heads).log(), torch.ones(heads, **options), zero
        if self.init == "linear":
            return zero, torch.linspace(0, 1, heads, **options), zero
        if self.init == "spread":
            return zero, torch.linspace(-0.5, 1, heads, **options), zero
        if self.init in ("roles", "neighbours", "previous", "phrases"):
            retrieval = 0 if self.init == "previous" else heads // 2
            theta_alpha, mu = zero.clone(), zero.clone()
            beta = torch.ones(heads, **options)
            beta[:retrieval] = -0.5
            if self.init == "roles":
                theta_alpha[retrieval:] = -math.log(2) * torch.linspace(1, 4, heads - retrieval, **options)
            else:
                mu[retrieval:] = -torch.arange(1, heads - retrieval + 1, **options)
            if self.init == "phrases":
                theta_alpha[-1], beta[-1], mu[-1] = -2 * math.log(PHRASE), 2, 0
            return theta_alpha, beta, mu
        if self.init == "sampled":
            return torch.randn(heads, **options), torch.randn(heads, **options), zero
        return zero, zero, zero

    def reset_parameters(self) -> None:
        """Reset the parameters to ``init``."""
        theta_alpha, beta, mu = self._initial()
        if self.keep_sign:
            # The inverse of the softplus needs a size above 0; `spread` may start a head close to β = 0.
            size = (beta.abs() - MINIMUM_SHAPE).clamp(min=0.01)
            theta_beta = torch.log(torch.expm1(2 * size.double())) / 2
        else:
            theta_beta = beta
        with torch.no_grad():
            self.theta_alpha.copy_(theta_alpha)
            self.theta_beta.copy_(theta_beta)
            self.theta_mu.copy_(torch.asinh(mu / 2))

    @property
    def beta(self) -> Tensor:
        """Shape β, ``(H,)``."""
        if not self.keep_sign:
            return self.theta_beta
        sign = torch.where(self._initial()[1] < 0, -1.0, 1.0).to(self.theta_beta.device)
        return sign * (softplus(2 * self.theta_beta) / 2 + MINIMUM_SHAPE)

    @property
    def alpha(self) -> Tensor:
        """Scale α in tokens, ``(H,)``; nan where β = 0."""
        beta = self.beta
        return torch.where(beta == 0, torch.nan, torch.exp(-self.theta_alpha / beta))

    @property
    def mu(self) -> Tensor:
        """Location μ in tokens along ``j - i``, ``(H,)``."""
        return 2 * torch.sinh(self.theta_mu)

    @torch.no_grad()
    def natural_parameters(self) -> dict[str, Tensor]:
        """Return ``alpha`` and ``mu`` (tokens), ``beta``, and ``theta_alpha``, which is defined where α is not."""
        return super().natural_parameters() | {"theta_alpha": self.theta_alpha.detach().clone()}

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``K`` at each distance ``d = i - j``, ``(H, *distance.shape)``."""
        function = _Eager
        if torch.compiler.is_compiling():
            function = _LogPrior  # Dynamo cannot compile a function with jvp
        elif torch._C._are_functorch_transforms_active():
            function = _WithTangents
        return function.apply(self.theta_alpha, self.beta, self.theta_mu, distance).to(dtype)


def initial_log_prior(init: str, num_heads: int, distance: Tensor) -> Tensor:
    """Return the log-prior of ``GeneralizedGaussian(num_heads, init)``, at least -16 nats.

    Learned tables with :data:`TABLE_INITS` start here. A lower entry would take long to change.

    Args:
        init: name of the start.
        num_heads: number of heads, ``H``.
        distance: ``i - j`` in tokens, on the CPU.

    Returns:
        Log-prior in nats, ``(H, *distance.shape)``.
    """
    with torch.device("cpu"):  # a table on "meta" has no values
        return GeneralizedGaussian(num_heads, init, learn=False).log_prior_at(distance).clamp(min=-16.0)


def _log_prior(theta_alpha: Tensor, beta: Tensor, theta_mu: Tensor, distance: Tensor) -> Tensor:
    """Return ``K`` in float64.

    Custom gradients are faster: autograd would take longer than a short context's attention.
    """
    return _power(_steps(theta_alpha, beta, theta_mu, distance)[0])


def _power(exponent: Tensor) -> Tensor:
    return exponent.clamp(max=_constants()[1]).exp_().neg_()


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def _differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    return _sums(gradients[0], given, _steps(*given), ctx.needs_input_grad)


def _sums(
    gradient: Tensor, given: Sequence[Tensor], steps: tuple[Tensor, ...], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the parameters in ``wanted``, and None for the distances."""
    largest, found = _constants()[2], []
    for parameter, slope, want in zip(given, _slopes(given, steps, gradient), wanted, strict=False):
        # Within ε of the peak the derivative by θμ is K / ε, which may overflow float32.
        total = slope().flatten(1).sum(1).clamp(-largest, largest) if want else None
        found.append(None if total is None else total.to(parameter.dtype))
    return *found, None


def _advance(ctx: Any, *tangents: Tensor | None) -> Tensor:
    given = ctx.saved_tensors
    slopes = zip(_slopes(given, _steps(*given), 1.0), tangents, strict=False)
    parts = [slope() * per_head(t.double(), given[3]) for slope, t in slopes if t is not None]
    return sum(parts[1:], parts[0])


class _LogPrior(torch.autograd.Function):
    generate_vmap_rule = True
    forward, setup_context, backward = staticmethod(_log_prior), staticmethod(_save), staticmethod(_differentiate)


class _WithTangents(_LogPrior):
    jvp = staticmethod(_advance)


class _Eager(torch.autograd.Function):
    """``_WithTangents`` without ``setup_context``, whose binding of arguments by name is slow in eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        _save(ctx, inputs, inputs[0])
        steps = _steps(*inputs)
        ctx.steps = steps if inputs[3].numel() <= FEW_DISTANCES.get(inputs[3].device.type, 0) else None
        return _power(steps[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        # Second derivatives need the intermediate values recomputed with gradients.
        steps = None if torch.is_grad_enabled() else ctx.steps
        return _sums(gradients[0], given, steps or _steps(*given), ctx.needs_input_grad)

    jvp = staticmethod(_advance)


def _constants() -> tuple[float, float, float]:
    """Return the constant ε, and the bounds on exponent and gradient."""
    return EPSILON, LARGEST_EXPONENT, LARGEST_GRADIENT


# Dynamo turns a global float into a graph input, and graphs of several layers could not be shared.
_constants._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _steps(theta_alpha: Tensor, beta: Tensor, theta_mu: Tensor, distance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``ln(-K)``, ``j - i - μ`` and the logarithm of its magnitude, each ``(H, *distance.shape)`` in float64."""
    # sinh overflows near 710; 2 sinh 30 is already beyond any context.
    apart = -2 * torch.sinh(per_head(theta_mu.double().clamp(-30, 30), distance)) - distance
    # In the log domain neither the power nor its gradient can overflow.
    logarithm = (apart.abs() + _constants()[0]).log()
    exponent = torch.addcmul(per_head(theta_alpha, distance), per_head(beta, distance), logarithm)
    return exponent, apart, logarithm


def _slopes(
    given: Sequence[Tensor], steps: tuple[Tensor, ...], factor: Tensor | float
) -> tuple[Callable[[], Tensor], ...]:
    """Return functions that compute the derivatives of ``K`` by θα, β and θμ, times ``factor``.

    The derivatives are 0 where ``K`` is at the log-prior floor.
    """
    (_, beta, theta_mu, distance), (exponent, apart, logarithm) = given, steps
    log_prior = torch.where(exponent <= _constants()[1], -exponent.exp(), 0.0) * factor

    def by_location() -> Tensor:
        theta = per_head(theta_mu.double(), distance)
        towards = torch.where(theta.abs() <= 30, -2 * torch.cosh(theta), 0.0) * per_head(beta.double(), distance)
        return log_prior * towards * apart.sign() * (-logarithm).exp()

    return lambda: log_prior, lambda: log_prior * logarithm, by_location
