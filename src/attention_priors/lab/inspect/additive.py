"""Positions that are added to embeddings: what they do to the logits.

With ``x_i = e_i + p_i`` the logit ``<Q x_i, K x_j>`` is a sum of four: content with content, content with position, and
so on. A prior adds one term that depends on positions alone; an encoding that is added to embeddings brings all four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Case = Literal["i", "ii", "iii", "iv"]
"""Whether ``Q 1`` and ``K 1`` matter: i, neither; ii, ``K 1`` alone; iii, ``Q 1`` alone; iv, both."""


class Projected(NamedTuple):
    """Queries or keys by where they come from, ``(..., L, D)`` each; what expands to that will do."""

    content: Tensor
    """Of the embedding, ``Q e``."""
    position: Tensor
    """Of what was added to it, ``Q p``."""
    bias: Tensor | None = None
    """Of neither: the projection's bias, and that of a normalisation before it."""


@dataclass(frozen=True)
class AdditiveLogits:
    """Logits by what their queries and keys come from, ``(..., Lq, Lk)`` each, in nats."""

    content_content: Tensor
    """``<Q e_i, K e_j>``: what position has no part in."""
    content_position: Tensor
    """``<Q e_i, K p_j>``: some tokens look for places."""
    position_content: Tensor
    """``<Q p_i, K e_j>``: from some places, certain tokens are looked for."""
    position_position: Tensor
    """``<Q p_i, K p_j>``: what a prior would be."""
    bias: Tensor
    """All that a bias has a part in."""

    @property
    def total(self) -> Tensor:
        """Their sum."""
        return self.content_content + self.content_position + self.position_content + self.position_position + self.bias

    def spreads(self, visible: Tensor) -> dict[str, Tensor]:
        """The standard deviation of each summand over the keys that a query sees, mean over queries, ``(...)``.

        In nats. A softmax does not see what all keys have in common, so a summand matters by how it differs between
        them. Queries that see one key alone do not count.

        Args:
            visible: boolean, which expands to ``(..., Lq, Lk)``.

        Raises:
            ValueError: no query sees two keys.
        """
        visible = visible.expand(self.content_content.shape)
        number = visible.sum(-1)
        choosing = number > 1
        if not bool(choosing.any(-1).all()):
            raise ValueError("visible: no query sees two keys, so no summand can differ between them")
        found = {}
        for name in ("content_content", "content_position", "position_content", "position_position", "bias"):
            term = getattr(self, name).masked_fill(~visible, 0.0)
            mean = term.sum(-1) / number.clamp(min=1)
            centred = (term - mean.unsqueeze(-1)).masked_fill(~visible, 0.0)
            variance = centred.square().sum(-1) / number.clamp(min=1)
            # The root of 0 has no gradient: where keys do not differ, as where there is one, nothing is to be learned.
            flat = variance == 0
            deviation = variance.masked_fill(flat, 1.0).sqrt().masked_fill(flat, 0.0)
            found[name] = deviation.masked_fill(~choosing, 0.0).sum(-1) / choosing.sum(-1)
        return found


def additive_logits(query: Projected, key: Projected, softmax_scale: float | None = None) -> AdditiveLogits:
    """Split the logits of queries and keys that are sums of content, position and bias. The split is exact.

    Args:
        query: ``(..., Lq, D)`` each.
        key: ``(..., Lk, D)`` each.
        softmax_scale: ``1/sqrt(D)`` by default.
    """
    scale = query.content.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def product(left: Tensor, right: Tensor) -> Tensor:
        return scale * (left @ right.mT)

    shape = torch.broadcast_shapes(query.content.shape[:-2], key.content.shape[:-2])
    summands = {
        f"{mine}_{theirs}": product(getattr(query, mine), getattr(key, theirs)).expand(
            *shape, query.content.shape[-2], key.content.shape[-2]
        )
        for mine in ("content", "position")
        for theirs in ("content", "position")
    }
    bias = torch.zeros_like(summands["content_content"])
    if query.bias is not None:
        bias = bias + product(query.bias, key.content + key.position)
    if key.bias is not None:
        bias = bias + product(query.content + query.position, key.bias)
        if query.bias is not None:
            bias = bias + product(query.bias, key.bias)
    return AdditiveLogits(**summands, bias=bias)


@dataclass(frozen=True)
class LinearAudit:
    """What positions ``p_i = i · 1`` do to the logits of one head, or of several, ``(...)``.

    The four summands are ``(Q e_i)ᵀ K e_j``, ``j (Q e_i)ᵀ K 1``, ``i (Q 1)ᵀ K e_j`` and ``i j (Q 1)ᵀ K 1``. After a
    normalisation the places ``i`` and ``j`` are no longer whole numbers, but rise with them.
    """

    logits: AdditiveLogits
    query_share: Tensor
    """Root mean square of ``i (Q 1)ᵀ K e_j`` over that of the content's summand, over visible pairs, ``(...)``; 0 where
    neither is there, inf where the content's is not."""
    key_share: Tensor
    """Likewise of ``j (Q e_i)ᵀ K 1``."""
    quadratic_share: Tensor
    """Likewise of ``i j (Q 1)ᵀ K 1``, for which both must matter: content may be blind to them, and they not to each
    other."""
    threshold: float
    """Share up to which ``Q 1`` or ``K 1`` counts as 0."""
    slope: Tensor
    """``(Q e_i)ᵀ K 1 + i (Q 1)ᵀ K 1``: nats by which the logit drifts with each place of the key, ``(..., Lq)``."""
    drift: Tensor
    """The slope times the places between the keys that the query sees, in nats, ``(..., Lq)``."""
    skewed: Tensor
    """Whether that drift exceeds the range of the content's summand, ``(..., Lq)``: then either end of the text is
    favoured, whatever stands there."""
    drowned: Tensor
    """Whether the range of ``i (Q 1)ᵀ K e_j`` over those keys exceeds that of the content's summand, ``(..., Lq)``."""
    quadratic_from: Tensor
    """``|(Q e_i)ᵀ K 1| / |(Q 1)ᵀ K 1|``: the place from which the part of the slope that grows with the query's own
    is the larger one, ``(..., Lq)``; inf where it never is."""

    @property
    def cases(self) -> list[Case]:
        """The case of each head, of those in the order in which ``(...)`` lists them."""
        names: dict[tuple[bool, bool], Case] = {
            (False, False): "i", (False, True): "ii", (True, False): "iii", (True, True): "iv"
        }  # fmt: skip
        matters = (share > self.threshold for share in (self.query_share, self.key_share, self.quadratic_share))
        query, key, both = (found.flatten().tolist() for found in matters)
        return [names[q or b, k or b] for q, k, b in zip(query, key, both, strict=True)]


def linear_audit(
    query_content: Tensor,
    query_one: Tensor,
    key_content: Tensor,
    key_one: Tensor,
    visible: Tensor,
    *,
    query_places: Tensor | None = None,
    key_places: Tensor | None = None,
    softmax_scale: float | None = None,
    threshold: float = 0.05,
) -> LinearAudit:
    """What becomes of attention when each token's position, as a number, is added to every feature of its embedding.

    Source: the analysis of the toy encoding ``p_i = i · 1``, whose four cases turn on whether ``Q 1 ≈ 0`` and
    ``K 1 ≈ 0``. It leaves open how near; here the summands that they make are held against the content's.

    Args:
        query_content: ``Q e_i``, ``(..., L, D)``.
        query_one: ``Q 1``, ``(..., D)``.
        key_content: ``K e_j``, ``(..., L, D)``.
        key_one: ``K 1``, ``(..., D)``.
        visible: boolean, which expands to ``(..., L, L)``.
        query_places: what multiplies ``Q 1``, which expands to ``(..., L)``; ``0, 1, 2, ...`` by default.
        key_places: what multiplies ``K 1``, likewise.
        softmax_scale: ``1/sqrt(D)`` by default.
        threshold: share of the content's root mean square up to which a summand counts as 0.

    Returns:
        Numbers in float32, or float64 if some of what is given are.

    Raises:
        ValueError: the threshold is negative, or nothing is visible.
    """
    if not 0 <= threshold < float("inf"):
        raise ValueError(f"threshold must be a finite number, at least 0, got {threshold!r}")
    if not bool(visible.any()):
        raise ValueError("visible: no query sees a key")
    # Half precision has no digits for squares that are summed over all pairs, nor for places beyond some hundreds.
    dtype = torch.float32
    for given in (query_content, query_one, key_content, key_one):
        dtype = torch.promote_types(dtype, given.dtype)
    query_content, query_one, key_content, key_one = (
        given.to(dtype) for given in (query_content, query_one, key_content, key_one)
    )
    scale = query_content.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    places = torch.arange(query_content.shape[-2], dtype=dtype, device=query_content.device)
    query_places, key_places = (places if given is None else given.to(dtype) for given in (query_places, key_places))
    query, key = (
        Projected(content, at.unsqueeze(-1) * one.unsqueeze(-2))
        for content, at, one in ((query_content, query_places, query_one), (key_content, key_places, key_one))
    )
    logits = additive_logits(query, key, scale)
    visible = visible.expand(logits.content_content.shape)

    def share(term: Tensor) -> Tensor:
        size, whole = (x.masked_fill(~visible, 0.0).square().sum((-2, -1)) for x in (term, logits.content_content))
        return torch.where(size == 0, 0.0, size / whole).sqrt()

    def extent(term: Tensor) -> Tensor:
        """The largest less the smallest over the keys that a query sees."""
        span = term.masked_fill(~visible, -torch.inf).amax(-1) - term.masked_fill(~visible, torch.inf).amin(-1)
        return span.masked_fill(~visible.any(-1), 0.0)

    of_content = scale * (query_content @ key_one.unsqueeze(-1)).squeeze(-1)
    of_position = scale * (query_one * key_one).sum(-1, keepdim=True)
    slope = of_content + query_places * of_position
    drift = slope * extent(key_places.unsqueeze(-2).expand_as(visible))
    own = extent(logits.content_content)
    return LinearAudit(
        logits=logits,
        query_share=share(logits.position_content),
        key_share=share(logits.content_position),
        quadratic_share=share(logits.position_position),
        threshold=threshold,
        slope=slope,
        drift=drift,
        skewed=drift.abs() > own,
        drowned=extent(logits.position_content) > own,
        quadratic_from=torch.where(of_position == 0, torch.inf, of_content.abs() / of_position.abs()),
    )
