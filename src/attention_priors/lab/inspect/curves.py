"""The priors of a trained model as numbers and curves: of each head, of the summands, and the keys with most mass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypedDict, cast

import torch
from torch import Tensor, nn

from attention_priors.attention import SSMax
from attention_priors.hf.heads import OnHeads, ScaleOnHeads
from attention_priors.lab.inspect.reach import effective_reach, place_of, prior_scale, scaled_log_prior
from attention_priors.priors import KeySink, Prior, Structure
from attention_priors.priors.base import check_over_line


class PriorRow(TypedDict):
    """One head's prior."""

    layer: int
    head: int
    prior: str
    """Its name in the catalogue; ``a + b`` for sums."""
    parameters: dict[str, float | None]
    """Natural parameters that are one number per head; None where undefined, and for heads without a prior."""
    distance: list[int]
    """Tokens between query and key."""
    log_prior: list[float | None]
    """``K``, in nats, as it was learned: no logit scale is in it. None where the prior hides the key."""


class LogitScaleRow(TypedDict):
    """One head's SSMax scale."""

    layer: int
    head: int
    s: float


def curve_distances(length: int, every: int = 16) -> list[int]:
    """0, every distance up to ``every``, then about eight per doubling, the last of them ``length - 1``."""
    if length < 1:
        raise ValueError(f"length must be a positive number of tokens, got {length}")
    doublings = math.log2(max(length - 1, 1))
    spaced = torch.logspace(0, doublings, 1 + round(8 * doublings), base=2.0, dtype=torch.float64).round()
    return sorted(d for d in {0, length - 1, *range(every + 1), *map(int, spaced)} if d < length)


@torch.no_grad()
def prior_rows(layers: list[nn.Module], *, length: int) -> list[PriorRow]:
    """The prior of every head, as seen by the last query of a text, before any logit scale.

    Args:
        layers: one module per layer; the first :class:`Prior` in each is described. A prior that is shared
            by all layers is given as a single layer.
        length: of the text, in tokens.
    """
    rows: list[PriorRow] = []
    for layer, prior, device in priors_of(layers):
        distances = torch.tensor(curve_distances(length), device=device)
        last = torch.tensor([length - 1], device=device)
        curves = prior.log_prior(last, last - distances, torch.float64)[:, 0]
        parameters = _scalars(prior)
        for head in range(prior.num_heads):
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "prior": " + ".join(term.name for term in prior.terms()),
                    "parameters": {name: finite(values[head]) for name, values in parameters.items()},
                    "distance": distances.tolist(),
                    "log_prior": [finite(value) for value in curves[head]],
                }
            )
    return rows


@torch.no_grad()
def logit_scale_rows(layers: list[nn.Module]) -> list[LogitScaleRow]:
    """SSMax's ``s`` of every head that has one; ``layers`` as in :func:`prior_rows`."""
    rows: list[LogitScaleRow] = []
    for layer, module in enumerate(layers):
        for scale in logit_scales_of(module):
            some = isinstance(scale, ScaleOnHeads)
            values = (scale.scale if some else scale).s
            heads = scale.heads if some else range(len(values))
            for head, value in sorted(zip(heads, values.tolist(), strict=True)):
                rows.append({"layer": layer, "head": head, "s": value})
    return rows


def logit_scales_of(module: nn.Module) -> list[SSMax | ScaleOnHeads]:
    """The logit scales in a module; one of some heads as the whole layer has it."""
    within = {part.scale for part in module.modules() if isinstance(part, ScaleOnHeads)}
    return [part for part in module.modules() if isinstance(part, SSMax | ScaleOnHeads) and part not in within]


def priors_of(layers: list[nn.Module]) -> Iterator[tuple[int, Prior, torch.device]]:
    """The first :class:`Prior` in each layer that has one: the layer's number, the prior and where it lives.

    Raises:
        ValueError: one is over a grid: what is said of it would be of a line.
    """
    for layer, module in enumerate(layers):
        prior = next((part for part in module.modules() if isinstance(part, Prior)), None)
        if prior is not None:
            check_over_line(prior)
            yield layer, prior, next((parameter.device for parameter in prior.parameters()), torch.device("cpu"))


def _scalars(prior: Prior) -> dict[str, Tensor]:
    values = {name: x for name, x in prior.natural_parameters().items() if x.dim() == 1}
    if "theta_alpha" in values:
        values["theta_beta"] = values["beta"]  # BAM's name for it
    return values


def finite(value: Tensor) -> float | None:
    """A number, or None for what JSON has no number for."""
    return float(value) if bool(torch.isfinite(value)) else None


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
