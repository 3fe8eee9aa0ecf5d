"""KERPLE's logarithmic and power priors."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from attention_priors.checks import check_choice
from attention_priors.priors.base import LOG_PRIOR_FLOOR, Init, Prior, Structure, checked_init, per_head, started

LEAST = 0.01
"""Smallest ``r1`` and ``r2`` of a sampled start, as in KERPLE's code."""


class Kerple(Prior):
    """Logarithm or power of distance: ``K(i, j) = -r1 ln(1 + r2 |i - j|)`` or ``-r1 |i - j|^r2``, in nats.

    ``r1 > 0`` and ``r2 > 0``, with ``r2`` at most 2 in the power form, so both forms are conditionally positive
    definite kernels. The power form with ``r2 = 1`` is ALiBi. Except for BAM's ε, the power form is BAM's Generalized
    Gaussian with location 0, ``r1 = e^θα`` and ``r2 = θβ`` between 0 and 2.

    Source: KERPLE (Chi, Fan, Ramadge and Rudnicky 2022), section 4: the logarithmic and the power variant.

    Args:
        num_heads: number of heads, ``H``.
        form: ``logarithmic`` or ``power``.
        init: ``sampled``, as in KERPLE's code, or numbers, ``{"r1": 1.0, "r2": 0.5}``. ``sampled`` draws uniformly:
            ``r1`` from 0 to 2 and ``r2`` from 0 to 1 in the logarithmic form, and vice versa in the power form.
        learn: which of ``r1``, ``r2`` train. The trained coordinates keep both in range: ``ln r1``, and ``ln r2`` in
            the logarithmic form or ``ln(r2 / (2 - r2))`` in the power form.
    """

    name = "kerple"
    structure = Structure.STATIONARY
    learnable = ("r1", "r2")
    inits = ("sampled",)
    forms = ("logarithmic", "power")

    def __init__(
        self,
        num_heads: int,
        form: str = "logarithmic",
        init: Init = "sampled",
        learn: bool | str | Collection[str] = True,
    ) -> None:
        super().__init__(num_heads)
        check_choice("form", form, self.forms)
        self.form = form
        self.init = checked_init(init, self.inits, r1=(num_heads,), r2=(num_heads,))
        if not isinstance(self.init, str):
            for name, most in (("r1", math.inf), ("r2", math.inf if form == "logarithmic" else 2.0)):
                values = started(self.init, name, (num_heads,))
                if not bool(((values > 0) & (values <= most)).all()):
                    limits = "above 0" if most == math.inf else f"above 0 and at most {most:g}"
                    raise ValueError(f"init[{name!r}] must be {limits} in the {form} form, got {values.tolist()}")
        self.log_r1 = nn.Parameter(torch.empty(num_heads))
        self.theta_r2 = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()
        self._set_learned(learn, r1="log_r1", r2="theta_r2")

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return both forms, the power form fixed."""
        return cls(num_heads), cls(num_heads, form="power", init={"r1": 0.5, "r2": 0.7}, learn=False)

    def reset_parameters(self) -> None:
        """Reset the parameters to ``init``."""
        shape = (self.num_heads,)
        if isinstance(self.init, str):
            r1, r2 = (torch.rand(shape, device="cpu") for _ in range(2))
            r1, r2 = (2 * r1, r2) if self.form == "logarithmic" else (r1, 2 * r2)
        else:
            r1, r2 = (started(self.init, name, shape) for name in ("r1", "r2"))
        r1, r2 = (x.double().clamp(min=LEAST) if isinstance(self.init, str) else x.double() for x in (r1, r2))
        with torch.no_grad():
            self.log_r1.copy_(r1.log())
            self.theta_r2.copy_(r2.log() if self.form == "logarithmic" else torch.logit((r2 / 2).clamp(max=1 - 1e-6)))

    @property
    def r1(self) -> Tensor:
        """Amplitude ``r1``, ``(H,)``."""
        return self.log_r1.exp()

    @property
    def r2(self) -> Tensor:
        """Rate or exponent ``r2``, ``(H,)``."""
        return self.theta_r2.exp() if self.form == "logarithmic" else 2 * self.theta_r2.sigmoid()

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``K`` at each distance ``d = i - j``, ``(H, *distance.shape)``."""
        apart, most = distance.abs().double(), math.log(-LOG_PRIOR_FLOOR)
        log_r1, theta = (per_head(x.double(), distance) for x in (self.log_r1, self.theta_r2))
        if self.form == "logarithmic":
            # ln(1 + r2 d) = softplus(ln r2 + ln d) cannot overflow and is exact at d = 0. ONNX Runtime has no softplus
            # in float64.
            growth = torch.logaddexp(theta + apart.log(), torch.zeros_like(theta))
            return (-log_r1.clamp(max=most).exp() * growth).clamp(min=LOG_PRIOR_FLOOR).to(dtype)
        # The gradient of 0 to the power of r2 is NaN.
        exponent = log_r1 + 2 * theta.sigmoid() * apart.clamp(min=1).log()
        return (-exponent.clamp(max=most).exp() * (apart > 0)).to(dtype)
