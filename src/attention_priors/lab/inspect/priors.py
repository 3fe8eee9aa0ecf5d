"""What priors do alone: their curves, the keys with most mass, how far they look, and the role of each head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypedDict, cast

import torch
from torch import Tensor, nn

from attention_priors._io import with_nulls
from attention_priors.attention import SSMax
from attention_priors.checks import check_positive_integers, check_share
from attention_priors.hf.heads import OnHeads, ScaleOnHeads
from attention_priors.priors import KeySink, Prior, Structure
from attention_priors.priors.base import check_over_line

# ---- reach, windows and roles

ROUNDING = 1e-12
"""Share of the mass that sums over a million keys may be wrong by."""

REACH_LENGTHS = tuple(2**k for k in (10, 12, 14, 16, 18, 20))
"""Tokens: pages give the reach in texts of 1024 to 1048576."""

EVERY_PLACE = 128
"""Distances and keys that are all in the curve of a summand; beyond them it grows sparse."""

_KEYS_AT_A_TIME = 2**16
_QUERIES_AT_A_TIME = 128


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


# ---- rows of a model's heads


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
    for layer, prior in _priors_of(layers):
        distances = torch.tensor(curve_distances(length), device=place_of(prior, None))
        last = torch.full((1,), length - 1, device=distances.device)
        curves = prior.log_prior(last, last - distances, torch.float64)[:, 0]
        name = " + ".join(term.name for term in prior.terms())
        for head, (curve, parameters) in enumerate(zip(with_nulls(curves.tolist()), _parameters(prior), strict=True)):
            own = PriorRow(
                layer=layer, head=head, prior=name, parameters=parameters, distance=distances.tolist(), log_prior=curve
            )
            rows.append(own)
    return rows


@torch.no_grad()
def logit_scale_rows(layers: list[nn.Module]) -> list[LogitScaleRow]:
    """SSMax's ``s`` of every head that has one; ``layers`` as in :func:`prior_rows`."""
    rows: list[LogitScaleRow] = []
    for layer, module in enumerate(layers):
        for scale in _logit_scales_of(module):
            some = isinstance(scale, ScaleOnHeads)
            values = (scale.scale if some else scale).s
            heads = scale.heads if some else range(len(values))
            for head, value in sorted(zip(heads, values.tolist(), strict=True)):
                rows.append({"layer": layer, "head": head, "s": value})
    return rows


def _logit_scales_of(module: nn.Module) -> list[SSMax | ScaleOnHeads]:
    """Return the logit scales in a module; one of some heads as the whole layer has it."""
    within = {part.scale for part in module.modules() if isinstance(part, ScaleOnHeads)}
    return [part for part in module.modules() if isinstance(part, SSMax | ScaleOnHeads) and part not in within]


def _priors_of(layers: list[nn.Module]) -> Iterator[tuple[int, Prior]]:
    """Yield the number of each layer that has a :class:`Prior`, and the first one in it.

    Raises:
        ValueError: one is over a grid: what is said of it would be of a line.
    """
    for layer, module in enumerate(layers):
        prior = next((part for part in module.modules() if isinstance(part, Prior)), None)
        if prior is not None:
            check_over_line(prior)
            yield layer, prior


def _parameters(prior: Prior) -> list[dict[str, float | None]]:
    """Return each head's natural parameters that are one number."""
    values = {name: with_nulls(x.tolist()) for name, x in prior.natural_parameters().items() if x.dim() == 1}
    if "theta_alpha" in values:
        values["theta_beta"] = values["beta"]  # BAM's name for it
    return [{name: own[head] for name, own in values.items()} for head in range(prior.num_heads)]


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
    rows: list[Any] = []
    for layer, prior, scale in _applied(layers, logit_scales):
        terms, nothing = list(prior.terms()), [None] * prior.num_heads
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
                ahead = with_nulls(term.log_prior(at[:1], at, torch.float64)[..., 0, :].tolist())
            else:
                continue
            of_heads = zip(with_nulls(curves.tolist()), ahead or nothing, scales or nothing, strict=True)
            for head, (curve, beyond, own) in enumerate(of_heads):
                about = {"layer": layer, "head": head, "prior": term.name, "over": over, "places": places}
                rows.append({**about, "log_prior": curve, "ahead": beyond, "scale": own})
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
    rows: list[Any] = []
    for layer, prior, scale in _applied(layers, None):
        keys = torch.arange(length, device=place_of(prior, scale))
        sums = torch.zeros(3, prior.num_heads, dtype=torch.float64, device=keys.device)
        for queries in keys[2:].split(_QUERIES_AT_A_TIME):
            log_prior = scaled_log_prior(prior, queries, keys, scale, queries + 1)
            weights = log_prior.masked_fill(keys > queries[:, None], -torch.inf).softmax(-1)
            for place, looked_at in enumerate((torch.zeros_like(queries), queries - 1, queries)):
                sums[place] += weights.gather(-1, looked_at[:, None].expand(prior.num_heads, -1, 1)).sum((-2, -1))
        for head, (first, previous, itself) in enumerate((sums / (length - 2)).T.tolist()):
            mass = {"first": first, "previous": previous, "itself": itself}
            rows.append({"layer": layer, "head": head, **mass, "scaled": scale is not None})
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
    for layer, prior in _priors_of(layers):
        found = _logit_scales_of(layers[layer]) if logit_scales is None else [logit_scales[layer]]
        for place, scale in enumerate(found or [None]):
            yield layer + place, prior, prior_scale(prior, cast("SSMax | None", scale))
