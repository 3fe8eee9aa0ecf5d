"""Null key: a share of the attention weight that goes to no key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.checks import check_booleans, check_positive_integers
from attention_priors.config import Described
from attention_priors.precision import KeepsFloat32, can_be_read


class NullKey(Described, KeepsFloat32):
    """Extra key of each head, with a learned logit ``s_h`` in nats and the value zero.

    A query without a relevant key can attend to the null key, with the weight ``p_null = e^s / (e^s + Σ_j e^z_ij)``.
    The null key multiplies the output by ``1 - p_null``. At ``s = 0``, this is the softmax "plus one", and
    ``add_zero_attn`` of :class:`torch.nn.MultiheadAttention`.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025), a learned bias in the softmax's denominator; Miller,
    "Attention Is Off By One" (2023).

    Args:
        num_heads: ``H``.
        init: initial ``s`` of every head, in nats.
        learn: whether ``s`` is learned.
    """

    name = "null_key"

    def __init__(self, num_heads: int, init: float = 0.0, learn: bool = True) -> None:
        super().__init__()
        check_positive_integers(num_heads=num_heads)
        check_booleans(learn=learn)
        if not isinstance(init, int | float) or not math.isfinite(init):
            raise ValueError(f"init must be a finite number, got {init!r}")
        self.num_heads = num_heads
        self.init = float(init)
        self.learn = learn
        self.logit = nn.Parameter(torch.empty(num_heads), requires_grad=learn)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset ``s`` to ``init``."""
        nn.init.constant_(self.logit, self.init)

    def present_values(self) -> Mapping[str, Tensor]:
        """Return ``s``, one number per head."""
        return {"s": self.logit.detach()}


def apply_null(out: Tensor, lse: Tensor, null_logit: NullKey | Tensor) -> Tensor:
    """Apply a null key to an attention output: ``out · σ(lse - s)``.

    Use this function after merging results over parts of the keys. (Outputs of :func:`attend` with a ``null_logit``
    cannot be merged, because the null key has already taken its share.)

    Args:
        out: attention over all keys. Shape ``(B, H, Lq, Dv)``.
        lse: log-sum-exp of all logits. Shape ``(B, H, Lq)``.
        null_logit: ``s`` in nats, ``(H,)`` or ``(B, H, Lq)``, or a :class:`NullKey`.

    Returns:
        Output ``(B, H, Lq, Dv)`` in the dtype of ``out``.

    Raises:
        ValueError: ``null_logit`` is not finite, or shapes do not fit.
    """
    if tuple(lse.shape) != tuple(out.shape[:-1]):
        raise ValueError(
            f"lse must have shape {tuple(out.shape[:-1])} (out without its last dimension), got {tuple(lse.shape)}"
        )
    return gated(out, lse, checked_null_logit(null_logit, tuple(lse.shape), out.device))


def gated(out: Tensor, lse: Tensor, logit: Tensor) -> Tensor:
    """Apply a checked null logit as :func:`apply_null` does."""
    share = torch.sigmoid(lse - logit.to(lse.dtype))
    return (out * share.unsqueeze(-1).to(torch.promote_types(out.dtype, torch.float32))).to(out.dtype)


def checked_null_logit(null_logit: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Check a null logit and return it as ``(1, H, 1)`` or ``(B, H, Lq)``.

    Args:
        null_logit: logit, as for :func:`apply_null`.
        shape: ``(B, H, Lq)``.
        device: device of the queries.

    Raises:
        ValueError: the type, dtype, shape, device or a value is invalid. Values are checked only on the CPU in eager
            mode.
    """
    logit = null_logit if isinstance(null_logit, Tensor) else getattr(null_logit, "logit", None)
    if not isinstance(logit, Tensor):
        raise ValueError(
            f"null_logit must be a NullKey or a tensor, got {null_logit!r}; pass NullKey(num_heads, init=...)"
        )
    if not logit.is_floating_point():
        raise ValueError(f"null_logit must be floating point, got {logit.dtype}")
    if tuple(logit.shape) != (shape[1],) if logit.dim() == 1 else tuple(logit.shape) != shape:
        raise ValueError(f"null_logit must have shape ({shape[1]},) or {shape}, got {tuple(logit.shape)}")
    if logit.device != device:
        raise ValueError(f"null_logit is on {logit.device}, but query is on {device}")
    plain = logit.detach()
    if can_be_read(plain) and not bool(plain.isfinite().all()):
        raise ValueError("null_logit must be finite; omit null_logit for attention without a null key")
    return logit if logit.dim() == 3 else logit.view(1, -1, 1)
