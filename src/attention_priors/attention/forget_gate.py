"""Gates that forget: biases of keys that come from the content, a step for each token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid, softplus

from attention_priors.checks import check_positive_integers
from attention_priors.config import Described, build

FORGET_FLOOR = -1e4
"""The least ``ln f``, in nats: a gate of 0. What came before weighs nothing then, and later sums keep their digits."""


class ForgetGate(Described, nn.Module):
    """How much a token lets its successors see of what came before it: ``f_l = σ(<w_h, x_l> + b_h)``, per head.

    ``K_ij = Σ_{l=j+1..i} ln f_l = c_i - c_j``: ALiBi whose slope depends on the text. ``c`` is a sum over all tokens so
    far, and ``-c_j`` the ``key_bias`` of :func:`attend`; what depends on the query alone changes no weight.

    Source: Lin, Nikishin, He, Courville, "Forgetting Transformer: Softmax Attention with a Forget Gate" (ICLR 2025).

    Args:
        num_heads: ``H``.
        width: of the hidden states.
        init: ``b``, which every head starts with, or one for each head. At 0, half of what was is forgotten with every
            token; at ``b``, about a share ``e^-b``.
    """

    name = "forget_gate"

    def __init__(self, num_heads: int, width: int, init: float | list[float] = 0.0) -> None:
        super().__init__()
        check_positive_integers(num_heads=num_heads, width=width)
        starts = init if isinstance(init, list | tuple) else [init] * num_heads
        if len(starts) != num_heads or not all(isinstance(b, int | float) and math.isfinite(b) for b in starts):
            raise ValueError(f"init must be a finite number, or a list of {num_heads}, got {init!r}")
        self.num_heads = num_heads
        self.width = width
        self.init = init
        self.weight = nn.Parameter(torch.empty(num_heads, width))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew: weights of standard deviation 0.02, and ``init``."""
        nn.init.normal_(self.weight, std=0.02)
        with torch.no_grad():
            starts = torch.as_tensor(self.init, dtype=self.bias.dtype, device=self.bias.device)
            self.bias.copy_(starts.expand(self.num_heads))

    def log_forget(self, hidden: Tensor) -> Tensor:
        """``ln f`` of each token, in nats, ``(B, L, H)``: at most 0, at least ``FORGET_FLOOR``.

        Args:
            hidden: ``(B, L, width)``.
        """
        return self._log_forget(linear(hidden, self.weight, self.bias).float()).clamp(min=FORGET_FLOOR)

    def _log_forget(self, logit: Tensor) -> Tensor:
        return logsigmoid(logit)

    def forward(
        self,
        hidden: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        before: Tensor | None = None,
    ) -> Tensor:
        """The ``key_bias`` of :func:`attend`, ``-c``, ``(B, H, L)`` in float64.

        Args:
            hidden: of all tokens, or of the new ones of a text, ``(B, L, width)``.
            key_padding_mask: ``(B, L)``, True = ignore: there nothing is forgotten.
            document_ids: ``(B, L)``: each document has a sum of its own.
            before: the biases of the tokens before these, of the last one of a token's document,
                ``(B, H, 1 or L)``; none by default.
        """
        steps = self.log_forget(hidden).double().transpose(1, 2)
        if key_padding_mask is not None:
            steps = steps.masked_fill(key_padding_mask.unsqueeze(1), 0.0)
        found = -(steps.cumsum(-1) if document_ids is None else _sums_in_documents(steps, document_ids))
        return found if before is None else found + before


class Cable(ForgetGate):
    """``K_ij = -Σ_{l=j+1..i} softplus(<w_h, x_l> + b_h)``: a :class:`ForgetGate` with ``-w`` and ``-b``, written anew.

    Source: Veisi, Amirzadeh, Mansourian, "Context-aware Biases for Length Extrapolation" (2025), as its code has it.

    Args:
        num_heads: ``H``.
        width: of the hidden states.
        init: ``b``, which every head starts with, or one for each head.
    """

    name = "cable"

    def _log_forget(self, logit: Tensor) -> Tensor:
        return -softplus(logit)


KEY_BIASES: dict[str, type[ForgetGate]] = {cls.name: cls for cls in (ForgetGate, Cable)}
"""By name: modules that make a ``key_bias`` of hidden states."""


def key_bias_from_config(config: Mapping[str, Any] | str | None, num_heads: int, width: int) -> ForgetGate | None:
    """Build what makes biases of keys from its plain description; None for none.

    Raises:
        ValueError: if the name or an argument is unknown; it says what is allowed.
    """
    return None if config is None else build("key bias", KEY_BIASES, config, num_heads=num_heads, width=width)


def last_of_documents(biases: Tensor, documents: Tensor, new: Tensor) -> Tensor:
    """The ``before`` of :meth:`ForgetGate.forward`: of each new token, the bias of its document's last token so far.

    Args:
        biases: of the tokens so far, ``(B, H, L)``.
        documents: theirs, ``(B, L)``.
        new: documents of the new tokens, ``(B, n)``.

    Returns:
        ``(B, H, n)``; 0 where a document begins.
    """
    ordered, places = documents.sort(dim=-1, stable=True)
    at = torch.searchsorted(ordered, new.contiguous(), right=True) - 1
    last = places.gather(-1, at.clamp(min=0)).unsqueeze(1)
    known = (at >= 0) & (ordered.gather(-1, at.clamp(min=0)) == new)
    return biases.gather(-1, last.expand(-1, biases.shape[1], -1)).masked_fill(~known.unsqueeze(1), 0.0)


def _sums_in_documents(steps: Tensor, documents: Tensor) -> Tensor:
    """Running sums of ``(B, H, L)`` within each document, whose tokens need not stand together."""
    order = documents.argsort(dim=-1, stable=True)
    together = steps.gather(-1, order.unsqueeze(1).expand_as(steps))
    sums, own = together.cumsum(-1), documents.gather(-1, order)
    begins = torch.ones_like(own, dtype=torch.bool)
    begins[:, 1:] = own[:, 1:] != own[:, :-1]
    first = (torch.arange(own.shape[-1], device=own.device) * begins).cummax(-1).values
    before = (sums - together).gather(-1, first.unsqueeze(1).expand_as(sums))
    return (sums - before).gather(-1, order.argsort(dim=-1).unsqueeze(1).expand_as(sums))
