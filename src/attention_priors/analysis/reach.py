"""How far a prior looks: the distances that hold most of its mass, and the window that can stand in for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attention_priors.priors import Prior

ROUNDING = 1e-12
"""Share of the mass that sums over a million keys may be wrong by."""

REACH_LENGTHS = tuple(2**k for k in (10, 12, 14, 16, 18, 20))
"""Tokens: pages give the reach in texts of 1024 to 1048576."""

_KEYS_AT_A_TIME = 2**16


@torch.no_grad()
def effective_reach(prior: Prior, length: int, shares: Sequence[float] = (0.5, 0.9, 0.99)) -> Tensor:
    """How far back the last query of a text must look for shares of its prior.

    ``r(share) = min { r : Σ_{d ≤ r} π(d) ≥ share }`` with ``π`` the prior alone, normalised over all keys of the text:
    where attention lies before content has its say.

    Args:
        prior: whose heads are asked.
        length: of the text, in tokens.
        shares: of the mass, above 0 and at most 1.

    Returns:
        Distances in tokens, int64, ``(len(shares), H)``.

    Raises:
        ValueError: the length is not positive, a share is out of range, or the prior hides every key.
    """
    for share in shares:
        if not 0 < share <= 1:
            raise ValueError(f"shares must be above 0 and at most 1, got {share}")
    outside = _mass_beyond(prior, length)
    # The mass beyond distance r falls with r; what may be left out is 1 - share, and what rounding makes of it.
    allowed = torch.tensor([1 - share + ROUNDING for share in shares], dtype=torch.float64, device=outside.device)
    return (outside[None] > allowed[:, None, None]).sum(-1)


@torch.no_grad()
def window_for(prior: Prior, length: int, tolerance: float, content_range: float = 0.0) -> Tensor:
    """How many keys before its own a query must see, so that all others together have at most a share of its weight.

    Of keys whose prior is ``π_out`` together, content logits of range ``ω`` make at most
    ``π_out e^ω / (π_out e^ω + 1 - π_out)`` of the posterior; so ``π_out ≤ τ / (τ + (1 - τ) e^ω)`` is enough for the
    tolerance ``τ``, whatever the content.

    Args:
        prior: whose heads are asked.
        length: of the text, in tokens.
        tolerance: ``τ``, from 0 to below 1.
        content_range: ``ω``, in nats: the largest less the smallest content logit, scaled as it enters.

    Returns:
        Distances in tokens, int64, ``(H,)``: the ``Window(num_heads, size)`` of each is one more.

    Raises:
        ValueError: an argument is out of range, or the prior hides every key.
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be in [0, 1), got {tolerance!r}")
    if not 0 <= content_range < math.inf:
        raise ValueError(f"content_range must be a finite number of nats, at least 0, got {content_range!r}")
    spared = tolerance / (tolerance + (1 - tolerance) * math.exp(content_range)) if tolerance else 0.0
    return (_mass_beyond(prior, length) > spared).sum(-1)


@torch.no_grad()
def last_prior(prior: Prior, length: int) -> Tensor:
    """The prior alone of the last query of a text, over its keys from the first to its own: ``(H, length)``, float64.

    Raises:
        ValueError: the length is not positive, or the prior hides every key.
    """
    if length < 1:
        raise ValueError(f"length must be a positive number of tokens, got {length}")
    device = next((parameter.device for parameter in prior.parameters()), torch.device("cpu"))
    last = torch.tensor([length - 1], device=device)
    # A part at a time: some priors need several numbers for each key.
    parts = torch.arange(length, device=device).split(_KEYS_AT_A_TIME)
    log_prior = torch.cat([prior.log_prior(last, keys, torch.float64)[:, 0] for keys in parts], -1)
    if bool(torch.isneginf(log_prior).all(-1).any()):
        raise ValueError(f"prior hides every key of {length} from the last query: it has no reach")
    return log_prior.softmax(-1)


def _mass_beyond(prior: Prior, length: int) -> Tensor:
    """The share of the last query's prior beyond each distance ``0 ... length - 1``, ``(H, length)``, in float64."""
    # Summed from the farthest key on: small numbers first, so that what is far and faint is not lost.
    from_farthest = last_prior(prior, length).cumsum(-1)
    return torch.nn.functional.pad(from_farthest[:, :-1].flip(-1), (0, 1))
