"""ALiBi's slopes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attention_priors.checks import check_positive_integers


def alibi_slopes(num_heads: int) -> Tensor:
    """ALiBi's slope per head, ``(H,)`` in float64 on the CPU, in nats per token.

    For ``H`` a power of two: ``m_h = 2^(-8 (h + 1) / H)``. Otherwise, with ``P`` the largest power of two
    below ``H``: the slopes of ``P`` heads, then every other slope of ``2P`` heads until there are ``H``.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (ICLR 2022), section 3 and its published code.
    """
    check_positive_integers(num_heads=num_heads)
    power = 2 ** math.floor(math.log2(num_heads))

    def geometric(count: int) -> Tensor:
        exponents = torch.arange(1, count + 1, dtype=torch.float64, device="cpu") / count
        return torch.pow(2.0, -8.0 * exponents)

    return torch.cat([geometric(power), geometric(2 * power)[::2][: num_heads - power]])
