"""What a head's prior does, in a word."""

from __future__ import annotations

from typing import Literal

import torch

from attention_priors.attention import SSMax
from attention_priors.checks import check_positive_integers
from attention_priors.lab.inspect.reach import last_prior
from attention_priors.priors import Prior

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
