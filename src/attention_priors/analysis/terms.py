"""What a sum of priors is made of, and on which keys a prior puts its mass."""

from __future__ import annotations

from typing import Literal, TypedDict

import torch
from torch import nn

from attention_priors.analysis.curves import curve_distances, finite, priors_of
from attention_priors.priors import KeySink, Structure

EVERY_PLACE = 128
"""Distances and keys that are all in a curve; beyond them it grows sparse."""

_QUERIES_AT_A_TIME = 128


class PriorTermRow(TypedDict):
    """One summand of one head's log-prior."""

    layer: int
    head: int
    prior: str
    """The summand's name in the catalogue."""
    over: Literal["distance", "key"]
    """What it depends on: tokens between query and key, or the key's position."""
    places: list[int]
    """Distances or positions."""
    log_prior: list[float | None]
    """In nats; None where it hides the key."""


class PriorMassRow(TypedDict):
    """Where one head looks before it has read anything: mean over the queries that have three keys at least."""

    layer: int
    head: int
    first: float
    """Weight of the first key."""
    previous: float
    """Weight of the key before the query's own."""
    itself: float
    """Weight of the query's own key."""


@torch.no_grad()
def prior_term_rows(layers: list[nn.Module], *, length: int) -> list[PriorTermRow]:
    """The summands of every head's prior, as GOAT's Figure 1 shows them: ``K(d)`` and ``u(j)``.

    Priors that are no sums are left out, as :func:`prior_rows` has them whole; so are summands that depend on both
    positions otherwise than through their distance.

    Args:
        layers: as for :func:`prior_rows`.
        length: of the text, in tokens.
    """
    places = curve_distances(length, EVERY_PLACE)
    rows: list[PriorTermRow] = []
    for layer, prior, device in priors_of(layers):
        terms = list(prior.terms())
        at = torch.tensor(places, device=device)
        for term in terms if len(terms) > 1 else []:
            if isinstance(term, KeySink):
                over, curves = "key", term.log_prior_of_key(at, torch.float64)
            elif Structure.STATIONARY in term.structure:
                over, curves = "distance", term.log_prior(at, at[:1], torch.float64)[..., 0]
            else:
                continue
            for head in range(prior.num_heads):
                rows.append(
                    {
                        "layer": layer,
                        "head": head,
                        "prior": term.name,
                        "over": over,
                        "places": places,
                        "log_prior": [finite(value) for value in curves[head]],
                    }
                )
    return rows


@torch.no_grad()
def prior_mass_rows(layers: list[nn.Module], *, length: int) -> list[PriorMassRow]:
    """How much of its mass each head's prior, normalised over the visible keys, puts on which key.

    Args:
        layers: as for :func:`prior_rows`.
        length: of the text, in tokens, at least 3.

    Raises:
        ValueError: the text is too short.
    """
    if length < 3:
        raise ValueError(f"length must be at least 3 tokens, got {length}")
    rows: list[PriorMassRow] = []
    for layer, prior, device in priors_of(layers):
        sums = torch.zeros(3, prior.num_heads, dtype=torch.float64, device=device)
        keys = torch.arange(length, device=device)
        for queries in keys[2:].split(_QUERIES_AT_A_TIME):
            log_prior = prior.log_prior(queries, keys, torch.float64)
            weights = log_prior.masked_fill(keys > queries[:, None], -torch.inf).softmax(-1)
            for place, looked_at in enumerate((torch.zeros_like(queries), queries - 1, queries)):
                sums[place] += weights.gather(-1, looked_at[:, None].expand(prior.num_heads, -1, 1)).sum((-2, -1))
        for head, (first, previous, itself) in enumerate((sums / (length - 2)).T.tolist()):
            rows.append({"layer": layer, "head": head, "first": first, "previous": previous, "itself": itself})
    return rows
