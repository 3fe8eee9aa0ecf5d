"""What a sum of priors is made of, and on which keys a prior puts its mass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypedDict, cast

import torch
from torch import nn

from attention_priors.attention import SSMax
from attention_priors.hf.heads import OnHeads
from attention_priors.lab.inspect.curves import curve_distances, finite, logit_scales_of, priors_of
from attention_priors.lab.inspect.reach import effective_reach, place_of, prior_scale, scaled_log_prior
from attention_priors.priors import KeySink, Prior, Structure

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
    """In nats, as it was learned; None where it hides the key."""
    ahead: list[float | None] | None
    """Likewise of keys so far ahead of the query, which a causal mask hides; None of what depends on the key alone."""
    scale: list[float] | None
    """``c`` of the query at each of the places, by which attention multiplies the prior; None for 1."""


class PriorMassRow(TypedDict):
    """Where one head looks before it has read anything: mean over the queries that have three keys at least.

    That is ``softmax(c K)`` where a logit scale ``c`` multiplies the prior, and ``softmax(K)`` elsewhere.
    """

    layer: int
    head: int
    first: float
    """Weight of the first key."""
    previous: float
    """Weight of the key before the query's own."""
    itself: float
    """Weight of the query's own key."""
    scaled: bool
    """Whether a logit scale multiplied the prior."""


class PriorReachRow(TypedDict):
    """How far one head's prior looks as texts grow."""

    layer: int
    head: int
    half: dict[str, int]
    """By length of the text in tokens: the distance from the last query that holds half of its prior, as attention
    applies that. Lengths are written out, as JSON has no other keys; they rise."""


@torch.no_grad()
def prior_term_rows(
    layers: list[nn.Module], *, length: int, logit_scales: Sequence[SSMax | None] | None = None
) -> list[PriorTermRow]:
    """The summands of every head's prior, as GOAT's Figure 1 shows them: ``K(d)`` and ``u(j)``.

    A prior that is no sum is its only summand, and is left out if a number or a few describe each head whole, as
    :func:`prior_rows` has them: it is here if it is a table or a series. Summands that depend on both positions
    otherwise than through their distance are left out.

    Args:
        layers: as for :func:`prior_mass_rows`.
        length: of the text, in tokens.
        logit_scales: each layer's; None for those that stand in the layers.
    """
    places = curve_distances(length, EVERY_PLACE)
    rows: list[PriorTermRow] = []
    for layer, prior, scale in _applied(layers, logit_scales):
        terms = list(prior.terms())
        at = torch.tensor(places, device=place_of(prior, scale))
        scales = None if scale is None else scale((at + 1).unsqueeze(0), torch.float64).tolist()
        for term in terms if len(terms) > 1 or _is_tabulated(prior) else []:
            whole = term.prior if isinstance(term, OnHeads) else term
            ahead = None
            if isinstance(whole, KeySink):
                over, curves = "key", whole.log_prior_of_key(at, torch.float64)
                curves = term.spread(curves, 0) if isinstance(term, OnHeads) else curves
            elif Structure.STATIONARY in term.structure:
                over, curves = "distance", term.log_prior(at, at[:1], torch.float64)[..., 0]
                ahead = term.log_prior(at[:1], at, torch.float64)[..., 0, :]
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
                        "ahead": None if ahead is None else [finite(value) for value in ahead[head]],
                        "scale": None if scales is None else scales[head],
                    }
                )
    return rows


@torch.no_grad()
def prior_mass_rows(layers: list[nn.Module], *, length: int) -> list[PriorMassRow]:
    """How much of its mass each head's prior, as attention applies it, puts on which of the keys that a query sees.

    Args:
        layers: as for :func:`prior_rows`. A prior that layers with logit scales of their own share is another one in
            each of them, and has rows for each.
        length: of the text, in tokens, at least 3.

    Raises:
        ValueError: the text is too short.
    """
    if length < 3:
        raise ValueError(f"length must be at least 3 tokens, got {length}")
    rows: list[PriorMassRow] = []
    for layer, prior, scale in _applied(layers, None):
        keys = torch.arange(length, device=place_of(prior, scale))
        sums = torch.zeros(3, prior.num_heads, dtype=torch.float64, device=keys.device)
        for queries in keys[2:].split(_QUERIES_AT_A_TIME):
            log_prior = scaled_log_prior(prior, queries, keys, scale, queries + 1)
            weights = log_prior.masked_fill(keys > queries[:, None], -torch.inf).softmax(-1)
            for place, looked_at in enumerate((torch.zeros_like(queries), queries - 1, queries)):
                sums[place] += weights.gather(-1, looked_at[:, None].expand(prior.num_heads, -1, 1)).sum((-2, -1))
        for head, (first, previous, itself) in enumerate((sums / (length - 2)).T.tolist()):
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "first": first,
                    "previous": previous,
                    "itself": itself,
                    "scaled": scale is not None,
                }
            )
    return rows


@torch.no_grad()
def prior_reach_rows(layers: list[nn.Module], *, lengths: Iterable[int]) -> list[PriorReachRow]:
    """How far every head's prior looks as texts grow: :func:`effective_reach` of half of it.

    Args:
        layers: as for :func:`prior_mass_rows`.
        lengths: of texts, in tokens.

    Raises:
        ValueError: a length is not positive, or a prior hides every key.
    """
    sizes = sorted(lengths)
    rows: list[PriorReachRow] = []
    for layer, prior, scale in _applied(layers, None):
        found = {size: effective_reach(prior, size, (0.5,), logit_scale=scale)[0].tolist() for size in sizes}
        for head in range(prior.num_heads):
            rows.append({"layer": layer, "head": head, "half": {str(size): found[size][head] for size in sizes}})
    return rows


def _is_tabulated(prior: Prior) -> bool:
    """Whether a parameter of each head is many numbers."""
    return any(values.dim() > 1 for values in prior.natural_parameters().values())


def _applied(
    layers: list[nn.Module], logit_scales: Sequence[SSMax | None] | None
) -> Iterator[tuple[int, Prior, SSMax | None]]:
    """The number of each layer, its prior, and what multiplies that."""
    for layer, prior, _ in priors_of(layers):
        found = logit_scales_of(layers[layer]) if logit_scales is None else [logit_scales[layer]]
        for place, scale in enumerate(found or [None]):
            yield layer + place, prior, prior_scale(prior, cast("SSMax | None", scale))
