"""Shaw's clipped offsets as a logit bias."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from attention_priors.checks import check_positive_integers
from attention_priors.priors.base import Init, Prior, Structure, checked_init, started
from attention_priors.priors.generalized_gaussian import TABLE_INITS, initial_log_prior


class ClippedOffsets(Prior):
    """Learned scalar per offset, clipped at ``±k``: ``K(i, j) = b_h[clip(j - i, -k, k)]``, in nats.

    This is the scalar form of Shaw's relative positions. The vector form is the encoding :class:`ShawVectors`.

    Source: Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative Position Representations" (NAACL 2018), section
    3.2.

    Args:
        num_heads: number of heads, ``H``.
        max_offset: largest offset ``k`` in tokens. Each head has ``2k + 1`` scalars, ordered from ``j - i = -k`` up.
        init: ``uniform`` (zeros), ``normal`` (N(0, 0.02²)), ``neighbours``, ``previous``, or numbers,
            ``{"bias": ...}``. Numbers have shape ``(2 max_offset + 1,)`` for all heads, or ``(H, 2 max_offset + 1)``.
            ``neighbours`` and ``previous`` are the log-priors of the Generalized Gaussian with these starts, at least
            -16.
        learn: whether the scalars train.
    """

    name = "clipped_offsets"
    structure = Structure.STATIONARY
    learnable = ("bias",)
    inits = ("uniform", "normal", *TABLE_INITS)

    def __init__(
        self,
        num_heads: int,
        max_offset: int = 16,
        init: Init = "uniform",
        learn: bool | str | Collection[str] = True,
    ) -> None:
        super().__init__(num_heads)
        check_positive_integers(max_offset=max_offset)
        self.max_offset = max_offset
        self.init = checked_init(init, self.inits, bias=(num_heads, 2 * max_offset + 1))
        self.bias = nn.Parameter(torch.empty(num_heads, 2 * max_offset + 1))
        self.reset_parameters()
        self._set_learned(learn, bias="bias")

    @classmethod
    def examples(cls, num_heads: int) -> tuple[Prior, ...]:
        """Return a prior with Shaw's default offset, and one with fewer offsets."""
        return cls(num_heads), cls(num_heads, max_offset=4, init="normal", learn=False)

    def reset_parameters(self) -> None:
        """Reset the scalars to ``init``."""
        with torch.no_grad():
            if not isinstance(self.init, str):
                self.bias.copy_(started(self.init, "bias", tuple(self.bias.shape)))
            elif self.init in TABLE_INITS:
                distance = torch.arange(self.max_offset, -self.max_offset - 1, -1, device="cpu")
                self.bias.copy_(initial_log_prior(self.init, self.num_heads, distance))
            else:
                self.bias.normal_(std=0.02) if self.init == "normal" else self.bias.zero_()

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``K`` at each distance ``d = i - j``, ``(H, *distance.shape)``."""
        offset = (-distance).clamp(-self.max_offset, self.max_offset) + self.max_offset
        return self.bias.to(dtype)[:, offset]
