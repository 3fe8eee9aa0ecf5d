"""Forget gates: key biases computed from hidden states."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid, softplus

from attention_priors.checks import check_at_least, check_positive_integers
from attention_priors.config import Described
from attention_priors.precision import compute_dtype_of

FORGET_FLOOR = -1e4
"""Lowest ``ln f``, in nats. It stands for a gate of 0: earlier keys get no weight, and later sums stay exact."""


class ForgetGate(Described, nn.Module):
    """Forget gate ``f_l = σ(<w_h, x_l> + b_h)`` of each token and head: ALiBi with slopes that depend on the text.

    The log-prior is ``K_ij = Σ_{l=j+1..i} ln f_l = c_i - c_j``, where ``c`` is the running sum of ``ln f``. ``c_i``
    does not change the weights of query ``i``, so ``-c_j`` is all that :func:`attend` needs, as ``key_bias``.

    Source: Lin, Nikishin, He, Courville, "Forgetting Transformer: Softmax Attention with a Forget Gate" (ICLR 2025).

    Args:
        num_heads: ``H``.
        width: width of the hidden states.
        init: initial ``b``, one number or one per head. With ``b = 0`` each token halves the weight of all earlier
            keys; with a large ``b`` it takes about ``e^-b`` of it.
        std: standard deviation of the initial ``w``. The larger, the more the gates depend on the text at first.
    """

    name = "forget_gate"

    def __init__(self, num_heads: int, width: int, init: float | list[float] = 0.0, std: float = 0.02) -> None:
        super().__init__()
        check_positive_integers(num_heads=num_heads, width=width)
        check_at_least(0, std=std)
        starts = init if isinstance(init, list | tuple) else [init] * num_heads
        if len(starts) != num_heads or not all(isinstance(b, int | float) and math.isfinite(b) for b in starts):
            raise ValueError(f"init must be a finite number, or a list of {num_heads}, got {init!r}")
        self.num_heads = num_heads
        self.width = width
        self.init = init
        self.std = std
        self.weight = nn.Parameter(torch.empty(num_heads, width))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the weights to random numbers of standard deviation ``std``, and the biases to ``init``."""
        nn.init.normal_(self.weight, std=self.std)
        with torch.no_grad():
            starts = torch.as_tensor(self.init, dtype=self.bias.dtype, device=self.bias.device)
            self.bias.copy_(starts.expand(self.num_heads))

    def log_forget(self, hidden: Tensor) -> Tensor:
        """Return ``ln f`` in nats, ``(B, L, H)``, from ``FORGET_FLOOR`` to 0.

        Args:
            hidden: ``(B, L, width)``.
        """
        logit = linear(hidden, self.weight, self.bias)
        return self._log_forget(logit.to(compute_dtype_of(logit))).clamp(min=FORGET_FLOOR)

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
        """Return the ``key_bias`` for :func:`attend`: ``-c``, ``(B, H, L)`` in float64.

        Args:
            hidden: hidden states of the tokens, ``(B, L, width)``.
            key_padding_mask: ``(B, L)``, True = padding, whose gates count as 1.
            document_ids: ``(B, L)``. Each document has its own sum.
            before: key bias of the token before each token in its document, if earlier tokens were in another call,
                ``(B, H, 1 or L)``.
        """
        steps = self.log_forget(hidden).double().transpose(1, 2)
        if key_padding_mask is not None:
            steps = steps.masked_fill(key_padding_mask.unsqueeze(1), 0.0)
        found = -(steps.cumsum(-1) if document_ids is None else _sums_in_documents(steps, document_ids))
        return found if before is None else found + before


class Cable(ForgetGate):
    """CABLE's bias ``K_ij = -Σ_{l=j+1..i} softplus(<w_h, x_l> + b_h)``.

    It equals a :class:`ForgetGate` with the weights ``-w`` and ``-b``, since ``-softplus(x) = ln σ(-x)``.

    Source: Veisi, Amirzadeh, Mansourian, "Context-aware Biases for Length Extrapolation" (2025), as released.

    Args:
        num_heads: ``H``.
        width: width of the hidden states.
        init: initial ``b``, one number or one per head.
        std: standard deviation of the initial ``w``.
    """

    name = "cable"

    def _log_forget(self, logit: Tensor) -> Tensor:
        return -softplus(logit)


KEY_BIASES: dict[str, type[ForgetGate]] = {cls.name: cls for cls in (ForgetGate, Cable)}
"""Modules that compute a ``key_bias`` from hidden states, by name."""


def last_of_documents(biases: Tensor, documents: Tensor, new: Tensor) -> Tensor:
    """Return the key bias of the last earlier token in each new token's document, ``(B, H, n)``.

    A new document gets 0. The result is the ``before`` of :meth:`ForgetGate.forward`.

    Args:
        biases: key biases of the earlier tokens, ``(B, H, L)``.
        documents: documents of the earlier tokens, ``(B, L)``.
        new: documents of the new tokens, ``(B, n)``.
    """
    ordered, places = documents.sort(dim=-1, stable=True)
    at = torch.searchsorted(ordered, new.contiguous(), right=True) - 1
    last = places.gather(-1, at.clamp(min=0)).unsqueeze(1)
    known = (at >= 0) & (ordered.gather(-1, at.clamp(min=0)) == new)
    return biases.gather(-1, last.expand(-1, biases.shape[1], -1)).masked_fill(~known.unsqueeze(1), 0.0)


def _sums_in_documents(steps: Tensor, documents: Tensor) -> Tensor:
    """Return the running sums of ``(B, H, L)`` within each document; documents may interleave."""
    order = documents.argsort(dim=-1, stable=True)
    together = steps.gather(-1, order.unsqueeze(1).expand_as(steps))
    sums, own = together.cumsum(-1), documents.gather(-1, order)
    begins = torch.ones_like(own, dtype=torch.bool)
    begins[:, 1:] = own[:, 1:] != own[:, :-1]
    first = (torch.arange(own.shape[-1], device=own.device) * begins).cummax(-1).values
    before = (sums - together).gather(-1, first.unsqueeze(1).expand_as(sums))
    return (sums - before).gather(-1, order.argsort(dim=-1).unsqueeze(1).expand_as(sums))
