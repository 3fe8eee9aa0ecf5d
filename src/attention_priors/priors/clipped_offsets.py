"""Shaw's clipped offsets as a logit bias."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from attention_priors.checks import check_positive_integers
from attention_priors.priors.base import Init, Prior, Structure, checked_init, started


class ClippedOffsets(Prior):
    """A learned scalar per offset, clipped at ``±k``: ``K(i, j) = b_h[clip(j - i, -k, k)]``, in nats.

    The scalar form of Shaw's relative positions; its vector form is the encoding :class:`ShawVectors`.

    Source: Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative Position Representations" (NAACL
    2018), section 3.2.

    Args:
        num_heads: ``H``.
        max_offset: ``k`` in tokens; there are ``2k + 1`` scalars per head, ordered from ``j - i = -k`` up.
        init: ``uniform`` (zeros) or ``normal`` (N(0, 0.02²)); or the numbers, ``{"bias": ...}``:
            ``(2 max_offset + 1,)`` for all heads or ``(H, 2 max_offset + 1)``.
        learn: whether the scalars train.
    """

    name = "clipped_offsets"
    structure = Structure.STATIONARY
    learnable = ("bias",)
    inits = ("uniform", "normal")

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
        """Return Shaw's offsets, and a few."""
        return cls(num_heads), cls(num_heads, max_offset=4, init="normal", learn=False)

    def reset_parameters(self) -> None:
        """Start anew from ``init``."""
        with torch.no_grad():
            if not isinstance(self.init, str):
                self.bias.copy_(started(self.init, "bias", tuple(self.bias.shape)))
            else:
                self.bias.normal_(std=0.02) if self.init == "normal" else self.bias.zero_()

    @torch.no_grad()
    def natural_parameters(self) -> dict[str, Tensor]:
        """``bias`` in nats, ``(H, 2 max_offset + 1)``."""
        return {"bias": self.bias.clone()}

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``K`` at each distance ``d = i - j``, ``(H, *distance.shape)``."""
        offset = (-distance).clamp(-self.max_offset, self.max_offset) + self.max_offset
        return self.bias.to(dtype)[:, offset]
