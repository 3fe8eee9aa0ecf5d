"""Scaling of the logits with the number of visible keys."""

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
    """Scalable softmax: query ``i``'s logits are multiplied by ``c_i = s_h · ln n_i``.

    ``n_i`` is the number of keys that query ``i`` may see: causal mask, documents and padding count,
    a :class:`Window` does not. Without it, a softmax over ever more keys flattens. ``s_h`` may go negative.

    Source: Nakanishi, "Scalable-Softmax Is Superior for Attention" (2025); BAM, Appendix H.4 / F.4.

    Args:
        num_heads: ``H``.
        init: the ``s`` every head starts with.
        include_prior: whether the scale multiplies content and prior, ``c (content + K)``, as BAM's
            released models do, or the content alone, ``c · content + K``.
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
        """Start anew: ``s = init``."""
        nn.init.constant_(self.s, self.init)

    def forward(self, visible_keys: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``c``.

        Args:
            visible_keys: ``n``, integers ``(..., 1 or H, Lq)``. Where it is 0 the scale is 0.
            dtype: of the result.

        Returns:
            ``(..., H, Lq)``.
        """
        return (self.s.double().unsqueeze(-1) * visible_keys.clamp(min=1).double().log()).to(dtype)


class ResidualSSMax(SSMax):
    """Scalable softmax that starts as the identity: ``c_i = 1 + s_h · max(0, ln n_i - ln T)``, with ``s = 0`` at first.

    For a model that was trained without: at ``s = 0`` nothing changes. With ``T = 1`` every query moves ``s``; with
    ``T`` the length of that training, texts no longer than it stay as they are, whatever ``s`` becomes (and do not
    train it). ``s`` may become negative: then ``c`` falls as texts grow, through 0 at ``n = T e^(-1/s)`` keys. Models
    that begin with it rather take :class:`SSMax`.

    Args:
        num_heads: ``H``.
        init: the ``s`` every head starts with.
        include_prior: as for :class:`SSMax`.
        train_length: ``T`` in tokens.
    """

    name = "residual_ssmax"

    def __init__(self, num_heads: int, init: float = 0.0, include_prior: bool = True, train_length: int = 1) -> None:
        super().__init__(num_heads, init, include_prior)
        check_positive_integers(train_length=train_length)
        self.train_length = train_length

    def forward(self, visible_keys: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``c``, ``(..., H, Lq)``; arguments as for :class:`SSMax`."""
        beyond = (visible_keys.clamp(min=1).double().log() - math.log(self.train_length)).clamp(min=0)
        return (1 + self.s.double().unsqueeze(-1) * beyond).to(dtype)


LOGIT_SCALES: dict[str, type[SSMax]] = {scale.name: scale for scale in (SSMax, ResidualSSMax)}


def logit_scale_from_config(config: Mapping[str, Any] | str | None, num_heads: int) -> SSMax | None:
    """Build a logit scale from its plain description; None is no scaling.

    Raises:
        ValueError: if the name or an argument is unknown; it says what is allowed.
    """
    return None if config is None else build("logit scale", LOGIT_SCALES, config, num_heads=num_heads)
