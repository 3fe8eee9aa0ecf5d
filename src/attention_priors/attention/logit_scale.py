"""Logit scales, which grow with the number of visible keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.checks import check_booleans, check_positive_integers
from attention_priors.config import Described, build
from attention_priors.precision import KeepsFloat32


class SSMax(Described, KeepsFloat32):
    """Scalable softmax, which multiplies the logits of query ``i`` by ``c_i = s_h · ln n_i``.

    ``n_i`` is the number of keys that query ``i`` may see. The causal mask, documents and padding hide keys from the
    count; a :class:`Window` does not. Without the scale, a softmax flattens as the number of keys grows. ``s_h`` may
    become negative.

    Source: Nakanishi, "Scalable-Softmax Is Superior for Attention" (2025); BAM, Appendix H.4 / F.4.

    Args:
        num_heads: ``H``.
        init: initial ``s`` of every head.
        include_prior: whether the scale multiplies content and prior, ``c (content + K)``, as in BAM's released models.
            Otherwise, it multiplies only the content, ``c · content + K``.
    """

    name = "ssmax"

    def __init__(self, num_heads: int, init: float = 1.0, include_prior: bool = True) -> None:
        super().__init__()
        check_positive_integers(num_heads=num_heads)
        if not isinstance(init, int | float) or not math.isfinite(init):
            raise ValueError(f"init must be a finite number, got {init!r}")
        check_booleans(include_prior=include_prior)
        self.num_heads = num_heads
        self.init = float(init)
        self.include_prior = include_prior
        self.s = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset ``s`` to ``init``."""
        nn.init.constant_(self.s, self.init)

    def present_values(self) -> Mapping[str, Tensor]:
        """Return ``s``, one number per head."""
        return {"s": self.s.detach()}

    def forward(self, visible_keys: Tensor | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the logit scale ``c``, ``(..., H, Lq)``.

        Args:
            visible_keys: number of visible keys ``n``, integers ``(..., 1 or H, Lq)``, or one integer for ``Lq = 1``.
                The scale of 0 keys is 0.
            dtype: dtype of the computation and of the result, float32 or float64.
        """
        return self.s.to(dtype).unsqueeze(-1) * _log_beyond(visible_keys, 1, dtype)


class ResidualSSMax(SSMax):
    """Scalable softmax that starts as the identity: ``c_i = 1 + s_h · max(0, ln n_i - ln T)``, with ``s = 0`` at first.

    This scale suits models that were trained without a logit scale, because ``s = 0`` changes nothing. Models that have
    a logit scale from the start use :class:`SSMax`. With ``T = 1``, every query trains ``s``. With ``T`` the length of
    the earlier training, ``s`` has no effect on texts up to that length, and such texts do not train ``s``. If ``s``
    becomes negative, ``c`` falls as texts grow and reaches 0 at ``n = T e^(-1/s)`` keys.

    Args:
        num_heads: ``H``.
        init: initial ``s`` of every head.
        include_prior: whether the scale multiplies content and prior, as for :class:`SSMax`.
        train_length: ``T`` in tokens.
    """

    name = "residual_ssmax"

    def __init__(self, num_heads: int, init: float = 0.0, include_prior: bool = True, train_length: int = 1) -> None:
        super().__init__(num_heads, init, include_prior)
        check_positive_integers(train_length=train_length)
        self.train_length = train_length

    def forward(self, visible_keys: Tensor | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the logit scale ``c``, ``(..., H, Lq)``. The arguments are those of :class:`SSMax`."""
        return self.s.to(dtype).unsqueeze(-1) * _log_beyond(visible_keys, self.train_length, dtype) + 1


def _log_beyond(number: Tensor | int, least: int, dtype: torch.dtype) -> Tensor | float:
    """Return ``max(0, ln number - ln least)``."""
    if isinstance(number, int):
        # A decoding step computes this once per layer, and several small operations would take longer than attention.
        return math.log(max(number, least) / least)
    return (number.clamp(min=least).to(dtype) / least).log()


LOGIT_SCALES: dict[str, type[SSMax]] = {scale.name: scale for scale in (SSMax, ResidualSSMax)}


def logit_scale_from_config(config: Mapping[str, Any] | str | None, num_heads: int) -> SSMax | None:
    """Build a logit scale from its config. None gives None.

    Raises:
        ValueError: the name or an argument is unknown. The message lists the known ones.
    """
    return None if config is None else build("logit scale", LOGIT_SCALES, config, num_heads=num_heads)
