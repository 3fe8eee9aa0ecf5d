"""Learned priors without content: curves, mass on selected keys, reach, and the role of each head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

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
"""Share of the mass that sums over a million keys may lose to rounding."""

REACH_LENGTHS = tuple(2**k for k in (10, 12, 14, 16, 18, 20))
"""Text lengths in tokens, 1024 to 1048576, for which pages report the reach."""

EVERY_PLACE = 128
"""Number of distances or keys that the curve of a term lists in full; larger ones are sampled sparsely."""

_KEYS_AT_A_TIME = 2**16
_QUERIES_AT_A_TIME = 128


@torch.no_grad()
def effective_reach(
    prior: Prior, length: int, shares: Sequence[float] = (0.5, 0.9, 0.99), *, logit_scale: SSMax | None = None
) -> Tensor:
    """Return how far back the last query of a text must look to cover given shares of its prior.

    ``r(share) = min { r : Σ_{d ≤ r} π(d) ≥ share }``, where ``π`` is the prior without content, normalised over all
    keys of the text. A share counts as reached within 1e-12, the rounding error of a sum over many keys. A share of 1
    therefore ignores keys whose total mass is at most 1e-12.

    Args:
        prior: prior of all heads.
        length: length of the text, in tokens.
        shares: shares of the mass, above 0 and at most 1.
        logit_scale: logit scale that multiplies the prior, as in :func:`attention_priors.attend`.

    Returns:
        Distances in tokens, int64, ``(len(shares), H)``.

    Raises:
        ValueError: the length is not a positive integer, a share is out of range, or the prior is over a grid. Also if
            the prior hides every key, or the logit scale has another number of heads.
    """
    for share in shares:
        if not 0 < share <= 1:
            raise ValueError(f"shares must be above 0 and at most 1, got {share}")
    # Sum from the farthest key on: small numbers come first, so that the mass of distant keys is not rounded away.
    outside = _beyond(last_prior(prior, length, logit_scale).cumsum(-1), 0.0)
    # The mass beyond distance r falls with r. At most 1 - share may lie beyond the reach, plus rounding.
    allowed = torch.tensor([1 - share + ROUNDING for share in shares], dtype=torch.float64, device=outside.device)
    return (outside[None] > allowed[:, None, None]).sum(-1)


@torch.no_grad()
def window_for(
    prior: Prior, length: int, tolerance: float, content_range: float = 0.0, *, logit_scale: SSMax | None = None
) -> Tensor:
    """Return how many previous keys a query must see, so that all others hold at most a given share of the attention.

    Let ``π_out`` be the prior mass outside the window. Content logits of range ``ω`` raise its posterior share to at
    most ``π_out e^ω / (π_out e^ω + 1 - π_out)``. So ``π_out ≤ τ / (τ + (1 - τ) e^ω)`` is enough for the tolerance
    ``τ``, for any content.

    Args:
        prior: prior of all heads.
        length: length of the text, in tokens.
        tolerance: ``τ``, from 0 to below 1.
        content_range: ``ω``, in nats. Range of the scaled content logits.
        logit_scale: logit scale that multiplies the prior, as in :func:`attention_priors.attend`.

    Returns:
        Distances in tokens, int64, ``(H,)``; a ``Window(num_heads, size)`` needs a size of one more.

    Raises:
        ValueError: an argument is out of range, or the prior is over a grid. Also if the prior hides every key, or the
            logit scale has another number of heads.
    """
    check_share(tolerance=tolerance)
    if not 0 <= content_range < math.inf:
        raise ValueError(f"content_range must be a finite number of nats, at least 0, got {content_range!r}")
    # In logarithms, because e^ω overflows beyond about 700 nats.
    log_spared = -math.inf
    if tolerance > 0:
        faintest = tolerance * math.exp(-content_range)
        log_spared = math.log(tolerance) - content_range - math.log(faintest + 1 - tolerance)
    from_farthest = _last_log_prior(prior, length, logit_scale).log_softmax(-1).logcumsumexp(-1)
    return (_beyond(from_farthest, -math.inf) > log_spared).sum(-1)


@torch.no_grad()
def last_prior(prior: Prior, length: int, logit_scale: SSMax | None = None) -> Tensor:
    """Return the prior of the last query over all keys of a text, from the first, ``(H, length)``, float64.

    The weights are ``softmax(c K)`` if a logit scale multiplies the prior, else ``softmax(K)``. ``c`` is the scale for
    ``length`` visible keys.

    Raises:
        ValueError: the length is not a positive integer, or the prior is over a grid. Also if the prior hides every
            key, or the logit scale has another number of heads.
    """
    return _last_log_prior(prior, length, logit_scale).softmax(-1)


def _last_log_prior(prior: Prior, length: int, logit_scale: SSMax | None) -> Tensor:
    """Return ``c K`` of the last query, ``(H, length)``, float64: the logits of :func:`last_prior`."""
    check_positive_integers(length=length)
    check_over_line(prior)
    scale = prior_scale(prior, logit_scale)
    device = place_of(prior, scale)
    last = torch.tensor([length - 1], device=device)
    # In chunks, because some priors need several numbers per key.
    parts = torch.arange(length, device=device).split(_KEYS_AT_A_TIME)
    log_prior = torch.cat([scaled_log_prior(prior, last, keys, scale, last + 1)[:, 0] for keys in parts], -1)
    if bool(torch.isneginf(log_prior).all(-1).any()):
        raise ValueError(f"prior hides every key of {length} from the last query: it has no reach")
    return log_prior


def prior_scale(prior: Prior, logit_scale: SSMax | None) -> SSMax | None:
    """Return the logit scale that multiplies the prior, or None.

    Raises:
        ValueError: the logit scale has another number of heads than the prior.
    """
    if logit_scale is None:
        return None
    if logit_scale.num_heads != prior.num_heads:
        raise ValueError(f"logit_scale has num_heads={logit_scale.num_heads}, but the prior has {prior.num_heads}")
    return logit_scale if logit_scale.include_prior else None


def place_of(prior: Prior, scale: SSMax | None) -> torch.device:
    """Return the device on which a prior and its logit scale expect positions."""
    # The scale of a sliding window is not a module but holds one.
    parts = [part for part in (prior, scale, getattr(scale, "scale", None)) if isinstance(part, nn.Module)]
    return next((parameter.device for part in parts for parameter in part.parameters()), torch.device("cpu"))


def scaled_log_prior(
    prior: Prior, query_positions: Tensor, key_positions: Tensor, scale: SSMax | None, visible_keys: Tensor
) -> Tensor:
    """Return ``c K`` as attention applies it, ``(H, Lq, Lk)``, float64; ``-inf`` for hidden keys.

    Args:
        prior: log-prior ``K``.
        query_positions: integers ``(Lq,)``.
        key_positions: integers ``(Lk,)``.
        scale: logit scale that computes ``c``; None for 1.
        visible_keys: number of visible keys of each query, ``(Lq,)``.
    """
    bias, visible = prior.bias_and_visibility(query_positions, key_positions, torch.float64)
    if scale is not None:
        bias = bias * scale(visible_keys.unsqueeze(0), torch.float64).unsqueeze(-1)
    return bias if visible is None else bias.masked_fill(~visible, -torch.inf)


def _beyond(from_farthest: Tensor, nothing: float) -> Tensor:
    """Return the total over all keys beyond each distance ``0 ... length - 1``, ``(H, length)``.

    Args:
        from_farthest: cumulative total from the farthest key, ``(H, length)``.
        nothing: total of no keys.
    """
    return torch.nn.functional.pad(from_farthest[:, :-1].flip(-1), (0, 1), value=nothing)


Role = Literal["uniform", "sink", "retrieval", "local", "long-tailed", "in between"]

UNIFORM_WITHIN = 0.1
"""Largest range of a uniform head's log-prior, in nats."""
SINK_ABOVE = 0.1
"""Smallest share of the prior on a sink's first key; the first key must also hold e times the share of the second."""
NEAR = 1 / 16
"""Nearest share of the text; a retrieval head gives its keys less than keys in the farther half."""
LOCAL = 1 / 4
"""Nearest share of the text that holds nine tenths of a local head's prior."""


@torch.no_grad()
def head_roles(prior: Prior, length: int, *, logit_scale: SSMax | None = None) -> list[Role]:
    """Classify each head by its prior for the last query of a text.

    The first matching role wins:

    - **uniform**. The log-priors of all keys differ by at most 0.1 nats.
    - **sink**. The first key holds at least a tenth of the prior, and at least e times the share of the second key.
    - **retrieval**. A key in the nearest sixteenth of the text gets less on average than a key in the farther half.
    - **local**. The nearest quarter of the text holds at least nine tenths of the prior.
    - **long-tailed**. The nearest sixteenth of the text holds more than a sixteenth of the prior.
    - **in between**. All other priors, for example a peak at some distance.

    BAM clusters heads in Figures 17 and 18 by the sign of β alone. There, a Generalized Gaussian with β > 0 is local,
    even with a long tail, and one with β ≤ 0 is a retrieval head.

    Args:
        prior: prior of all heads.
        length: length of the text, in tokens. A prior that is local in a long text may be uniform in a short text.
        logit_scale: logit scale that multiplies the prior, as in :func:`attention_priors.attend`. Roles then describe
            ``c K``.

    Raises:
        ValueError: the length is not an integer of at least 2, or the prior is over a grid. Also if the prior hides
            every key, or the logit scale has another number of heads.
    """
    check_positive_integers(length=length)
    if length < 2:
        raise ValueError(f"length must be at least 2 tokens, got {length}")
    weights = last_prior(prior, length, logit_scale)  # ordered by key: the nearest key is last
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

Row = dict[str, Any]
"""Row of :mod:`attention_priors.lab.results` without scheme, seed and kind. docs/result-rows.md explains the fields."""


def curve_distances(length: int, every: int = 16) -> list[int]:
    """Return 0, every distance up to ``every``, then about eight distances per doubling, up to ``length - 1``."""
    if length < 1:
        raise ValueError(f"length must be a positive number of tokens, got {length}")
    doublings = math.log2(max(length - 1, 1))
    spaced = torch.logspace(0, doublings, 1 + round(8 * doublings), base=2.0, dtype=torch.float64).round()
    return sorted(d for d in {0, length - 1, *range(every + 1), *map(int, spaced)} if d < length)


@torch.no_grad()
def prior_rows(layers: list[nn.Module], *, length: int) -> list[Row]:
    """Return the prior of every head for the last query of a text, before any logit scale.

    Args:
        layers: one module per layer, described by its first :class:`Prior`. Pass a prior that all layers share as a
            single layer.
        length: length of the text, in tokens.
    """
    rows: list[Row] = []
    for layer, prior in _priors_of(layers):
        distances = torch.tensor(curve_distances(length), device=place_of(prior, None))
        last = torch.full((1,), length - 1, device=distances.device)
        curves = prior.log_prior(last, last - distances, torch.float64)[:, 0]
        name = " + ".join(term.name for term in prior.terms())
        for head, (curve, parameters) in enumerate(zip(with_nulls(curves.tolist()), _parameters(prior), strict=True)):
            about = {"layer": layer, "head": head, "prior": name, "parameters": parameters}
            rows.append({**about, "distance": distances.tolist(), "log_prior": curve})
    return rows


@torch.no_grad()
def logit_scale_rows(layers: list[nn.Module]) -> list[Row]:
    """Return ``s`` of every head with SSMax; ``layers`` as in :func:`prior_rows`."""
    rows: list[Row] = []
    for layer, module in enumerate(layers):
        for scale in _logit_scales_of(module):
            some = isinstance(scale, ScaleOnHeads)
            values = (scale.scale if some else scale).s
            heads = scale.heads if some else range(len(values))
            for head, value in sorted(zip(heads, values.tolist(), strict=True)):
                rows.append({"layer": layer, "head": head, "s": value})
    return rows


def _logit_scales_of(module: nn.Module) -> list[SSMax | ScaleOnHeads]:
    """Return the logit scales in a module; of a :class:`ScaleOnHeads`, the wrapper and not the scale inside."""
    within = {part.scale for part in module.modules() if isinstance(part, ScaleOnHeads)}
    return [part for part in module.modules() if isinstance(part, SSMax | ScaleOnHeads) and part not in within]


def _priors_of(layers: list[nn.Module]) -> Iterator[tuple[int, Prior]]:
    """Yield the index and the first :class:`Prior` of each layer that has a prior.

    Raises:
        ValueError: a prior is over a grid; rows describe one-dimensional positions only.
    """
    for layer, module in enumerate(layers):
        prior = next((part for part in module.modules() if isinstance(part, Prior)), None)
        if prior is not None:
            check_over_line(prior)
            yield layer, prior


def _parameters(prior: Prior) -> list[dict[str, float | None]]:
    """Return the natural parameters of each head that are single numbers."""
    values = {name: with_nulls(x.tolist()) for name, x in prior.natural_parameters().items() if x.dim() == 1}
    return [{name: own[head] for name, own in values.items()} for head in range(prior.num_heads)]


@torch.no_grad()
def prior_term_rows(
    layers: list[nn.Module], *, length: int, logit_scales: Sequence[SSMax | None] | None = None
) -> list[Row]:
    """Return the terms of every head's prior, ``K(d)`` and ``u(j)``, as in GOAT's Figure 1.

    A prior that is not a sum counts as its only term. It is included only if it is a table or a series:
    :func:`prior_rows` already describes priors with a few numbers per head. Terms that depend on both positions, other
    than through their distance, are left out.

    Args:
        layers: see :func:`prior_mass_rows`.
        length: length of the text, in tokens.
        logit_scales: logit scale of each layer; by default the scales in ``layers``.
    """
    places = curve_distances(length, EVERY_PLACE)
    rows: list[Row] = []
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
def prior_mass_rows(layers: list[nn.Module], *, length: int) -> list[Row]:
    """Return the mass that each head's prior, as attention applies it, puts on selected visible keys.

    Args:
        layers: see :func:`prior_rows`. A prior shared by layers with separate logit scales has rows for each layer.
        length: length of the text, in tokens, at least 3.

    Raises:
        ValueError: the text is too short.
    """
    if length < 3:
        raise ValueError(f"length must be at least 3 tokens, got {length}")
    rows: list[Row] = []
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
def prior_reach_rows(layers: list[nn.Module], *, lengths: Iterable[int]) -> list[Row]:
    """Return the :func:`effective_reach` of half of every head's prior for several text lengths.

    Args:
        layers: see :func:`prior_mass_rows`.
        lengths: text lengths, in tokens.

    Raises:
        ValueError: a length is not positive, or a prior hides every key.
    """
    sizes = sorted(lengths)
    rows: list[Row] = []
    for layer, prior, scale in _applied(layers, None):
        found = {size: effective_reach(prior, size, (0.5,), logit_scale=scale)[0].tolist() for size in sizes}
        for head in range(prior.num_heads):
            rows.append({"layer": layer, "head": head, "half": {str(size): found[size][head] for size in sizes}})
    return rows


def _is_tabulated(prior: Prior) -> bool:
    """Whether each head has several numbers for one parameter."""
    return any(values.dim() > 1 for values in prior.natural_parameters().values())


def _applied(
    layers: list[nn.Module], logit_scales: Sequence[SSMax | None] | None
) -> Iterator[tuple[int, Prior, SSMax | None]]:
    """Yield the index of each layer, its prior, and the logit scale that multiplies the prior."""
    for layer, prior in _priors_of(layers):
        found = _logit_scales_of(layers[layer]) if logit_scales is None else [logit_scales[layer]]
        for place, scale in enumerate(found or [None]):
            yield layer + place, prior, prior_scale(prior, cast("SSMax | None", scale))
