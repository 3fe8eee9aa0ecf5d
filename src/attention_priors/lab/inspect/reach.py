"""How far a prior looks, the window that can stand in for it, and what a head's prior does, in a word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from attention_priors.attention import SSMax
from attention_priors.checks import check_positive_integers, check_share
from attention_priors.priors import Prior
from attention_priors.priors.base import check_over_line

ROUNDING = 1e-12
"""Share of the mass that sums over a million keys may be wrong by."""

REACH_LENGTHS = tuple(2**k for k in (10, 12, 14, 16, 18, 20))
"""Tokens: pages give the reach in texts of 1024 to 1048576."""

_KEYS_AT_A_TIME = 2**16


@torch.no_grad()
def effective_reach(
    prior: Prior, length: int, shares: Sequence[float] = (0.5, 0.9, 0.99), *, logit_scale: SSMax | None = None
) -> Tensor:
    """How far back the last query of a text must look for shares of its prior.

    ``r(share) = min { r : Σ_{d ≤ r} π(d) ≥ share }`` with ``π`` the prior alone, normalised over all keys of the text:
    where attention lies before content has its say. A share is reached up to 1e-12, which is what rounding may make of
    a sum over many keys: so a share of 1 leaves out keys that have no more than that together.

    Args:
        prior: whose heads are asked.
        length: of the text, in tokens.
        shares: of the mass, above 0 and at most 1.
        logit_scale: what attention multiplies the prior by, as in :func:`attention_priors.attend`.

    Returns:
        Distances in tokens, int64, ``(len(shares), H)``.

    Raises:
        ValueError: the length is no positive integer, a share is out of range, the prior is over a grid or hides every
            key, or the logit scale is of another number of heads.
    """
    for share in shares:
        if not 0 < share <= 1:
            raise ValueError(f"shares must be above 0 and at most 1, got {share}")
    # Summed from the farthest key on: small numbers first, so that what is far and faint is not lost.
    outside = _beyond(last_prior(prior, length, logit_scale).cumsum(-1), 0.0)
    # The mass beyond distance r falls with r; what may be left out is 1 - share, and what rounding makes of it.
    allowed = torch.tensor([1 - share + ROUNDING for share in shares], dtype=torch.float64, device=outside.device)
    return (outside[None] > allowed[:, None, None]).sum(-1)


@torch.no_grad()
def window_for(
    prior: Prior, length: int, tolerance: float, content_range: float = 0.0, *, logit_scale: SSMax | None = None
) -> Tensor:
    """How many keys before its own a query must see, so that all others together have at most a share of its weight.

    Of keys whose prior is ``π_out`` together, content logits of range ``ω`` make at most
    ``π_out e^ω / (π_out e^ω + 1 - π_out)`` of the posterior; so ``π_out ≤ τ / (τ + (1 - τ) e^ω)`` is enough for the
    tolerance ``τ``, whatever the content.

    Args:
        prior: whose heads are asked.
        length: of the text, in tokens.
        tolerance: ``τ``, from 0 to below 1.
        content_range: ``ω``, in nats: the largest less the smallest content logit, scaled as it enters.
        logit_scale: what attention multiplies the prior by, as in :func:`attention_priors.attend`.

    Returns:
        Distances in tokens, int64, ``(H,)``: the ``Window(num_heads, size)`` of each is one more.

    Raises:
        ValueError: an argument is out of range, the prior is over a grid or hides every key, or the logit scale is of
            another number of heads.
    """
    check_share(tolerance=tolerance)
    if not 0 <= content_range < math.inf:
        raise ValueError(f"content_range must be a finite number of nats, at least 0, got {content_range!r}")
    # In logarithms: beyond some 700 nats neither e^ω nor what it leaves of the prior is a number.
    log_spared = -math.inf
    if tolerance > 0:
        faintest = tolerance * math.exp(-content_range)
        log_spared = math.log(tolerance) - content_range - math.log(faintest + 1 - tolerance)
    from_farthest = _last_log_prior(prior, length, logit_scale).log_softmax(-1).logcumsumexp(-1)
    return (_beyond(from_farthest, -math.inf) > log_spared).sum(-1)


@torch.no_grad()
def last_prior(prior: Prior, length: int, logit_scale: SSMax | None = None) -> Tensor:
    """The prior alone of the last query of a text, over its keys from the first to its own: ``(H, length)``, float64.

    It is ``softmax(c K)`` with ``c`` the logit scale for ``length`` visible keys, if that multiplies the prior, else
    ``softmax(K)``.

    Raises:
        ValueError: the length is no positive integer, the prior is over a grid or hides every key, or the logit scale
            is of another number of heads.
    """
    return _last_log_prior(prior, length, logit_scale).softmax(-1)


def _last_log_prior(prior: Prior, length: int, logit_scale: SSMax | None) -> Tensor:
    """``c K`` of the last query, ``(H, length)``, float64, whose softmax is :func:`last_prior`."""
    check_positive_integers(length=length)
    check_over_line(prior)
    scale = prior_scale(prior, logit_scale)
    device = place_of(prior, scale)
    last = torch.tensor([length - 1], device=device)
    # A part at a time: some priors need several numbers for each key.
    parts = torch.arange(length, device=device).split(_KEYS_AT_A_TIME)
    log_prior = torch.cat([scaled_log_prior(prior, last, keys, scale, last + 1)[:, 0] for keys in parts], -1)
    if bool(torch.isneginf(log_prior).all(-1).any()):
        raise ValueError(f"prior hides every key of {length} from the last query: it has no reach")
    return log_prior


def prior_scale(prior: Prior, logit_scale: SSMax | None) -> SSMax | None:
    """What multiplies the prior, if anything does.

    Raises:
        ValueError: the logit scale is of another number of heads.
    """
    if logit_scale is None:
        return None
    if logit_scale.num_heads != prior.num_heads:
        raise ValueError(f"logit_scale has num_heads={logit_scale.num_heads}, but the prior {prior.num_heads}")
    return logit_scale if logit_scale.include_prior else None


def place_of(prior: Prior, scale: SSMax | None) -> torch.device:
    """Where the positions must be that both are given."""
    # The scale of a sliding window is no module; it has one.
    parts = [part for part in (prior, scale, getattr(scale, "scale", None)) if isinstance(part, nn.Module)]
    return next((parameter.device for part in parts for parameter in part.parameters()), torch.device("cpu"))


def scaled_log_prior(
    prior: Prior, query_positions: Tensor, key_positions: Tensor, scale: SSMax | None, visible_keys: Tensor
) -> Tensor:
    """``c K`` as attention applies it, ``(H, Lq, Lk)``, float64; ``-inf`` where hidden, whatever ``c`` is.

    Args:
        prior: ``K``.
        query_positions: integers ``(Lq,)``.
        key_positions: integers ``(Lk,)``.
        scale: what makes ``c``; None for 1.
        visible_keys: of each query, ``(Lq,)``.
    """
    bias, visible = prior.bias_and_visibility(query_positions, key_positions, torch.float64)
    if scale is not None:
        bias = bias * scale(visible_keys.unsqueeze(0), torch.float64).unsqueeze(-1)
    return bias if visible is None else bias.masked_fill(~visible, -torch.inf)


def _beyond(from_farthest: Tensor, nothing: float) -> Tensor:
    """By distance ``0 ... length - 1``, what the keys beyond it have together, ``(H, length)``.

    Args:
        from_farthest: by key, what it and the farther ones have together, ``(H, length)``.
        nothing: what no key has.
    """
    return torch.nn.functional.pad(from_farthest[:, :-1].flip(-1), (0, 1), value=nothing)


Role = Literal["uniform", "sink", "retrieval", "local", "long-tailed", "in between"]

UNIFORM_WITHIN = 0.1
"""Nats by which the log-prior of a uniform head may vary."""
SINK_ABOVE = 0.1
"""Share of the prior that a sink's first key holds at least, beside e times as much as the key after it."""
NEAR = 1 / 16
"""Share of the text, nearest to the query, that a retrieval head looks at less than at the farther half of the text."""
LOCAL = 1 / 4
"""Share of the text, nearest to the query, in which a local head has nine tenths of its prior."""


@torch.no_grad()
def head_roles(prior: Prior, length: int, *, logit_scale: SSMax | None = None) -> list[Role]:
    """What each head's prior does for the last query of a text, the first of these that is true.

    - **uniform**: it does not tell keys apart: their log-priors differ by at most 0.1 nats;
    - **sink**: a tenth of it or more is on the first key, and e times as much as on the second;
    - **retrieval**: per key, it gives the nearest sixteenth of the text less than the farther half;
    - **local**: nine tenths of it are within the nearest quarter;
    - **long-tailed**: it favours what is near, and reaches on: the nearest sixteenth has more than a sixteenth of it;
    - **in between**: none of these, as where what is at some distance is favoured.

    BAM's clusters of Figures 17 and 18 are by the sign of β alone: there a Generalized Gaussian with β > 0 is local,
    however long its tail, and one with β ≤ 0 a retrieval head.

    Args:
        prior: whose heads are asked.
        length: of the text, in tokens: what is local in a long text is uniform in a short one.
        logit_scale: what attention multiplies the prior by, as in :func:`attention_priors.attend`: ``c K`` is asked
            where it does.

    Raises:
        ValueError: the length is no integer of at least 2, the prior is over a grid or hides every key, or the logit
            scale is of another number of heads.
    """
    check_positive_integers(length=length)
    if length < 2:
        raise ValueError(f"length must be at least 2 tokens, got {length}")
    weights = last_prior(prior, length, logit_scale)  # by key: the nearest stands last
    near = max(1, round(NEAR * length))
    roles: list[Role] = []
    for head in weights:
        seen = head[head > 0]
        spread = float(seen.max().log() - seen.min().log()) if len(seen) == length else torch.inf
        if spread <= UNIFORM_WITHIN:
            roles.append("uniform")
        elif float(head[0]) >= SINK_ABOVE and float(head[0]) >= torch.e * float(head[1]):
            roles.append("sink")
        elif float(head[-near:].mean()) < float(head[: length - length // 2].mean()):
            roles.append("retrieval")
        elif float(head[-max(1, round(LOCAL * length)) :].sum()) >= 0.9:
            roles.append("local")
        elif float(head[-near:].mean()) > 1 / length:
            roles.append("long-tailed")
        else:
            roles.append("in between")
    return roles
