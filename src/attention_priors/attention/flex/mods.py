"""Any prior as FlexAttention's ``score_mod`` and ``mask_mod``.

``flex_score_mod`` and ``flex_mask_mod`` are for people who call ``torch.nn.attention.flex_attention`` themselves
and combine a prior with masks of their own. ``backend="flex"`` of ``attend()`` is made of the same parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.geometry import Geometry
from attention_priors.attention.key_bias import best_seen, in_two
from attention_priors.attention.logit_scale import SSMax
from attention_priors.attention.operator import count_visible_keys
from attention_priors.attention.problem import check_visible_keys, make_geometry
from attention_priors.attention.tables import consecutive_table, table_at, table_of_keys
from attention_priors.priors import Prior, Structure
from attention_priors.priors.base import check_in_use, checked_lanes, join_lanes

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries, and keys, per block of a block mask, as PyTorch has it."""
MOST_TOKENS = 2**22
"""That positions may span: tables are read by arithmetic on positions, and so cover every gap."""
FAR = 2**30
"""Beyond every position, which count from the first one."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# ---- what FlexAttention users compose with


def flex_score_mod(
    prior: Prior | None,
    num_queries: int,
    num_keys: int,
    *,
    causal: bool = True,
    logit_scale: SSMax | None = None,
    visible_keys: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> ScoreMod:
    """A prior as FlexAttention's ``score_mod``: ``c_i (score + K_ij)``, or ``c_i score + K_ij``.

    It masks nothing (:func:`flex_mask_mod` does) and is right for every pair of a query and a key, so any
    ``mask_mod`` goes with it. Stationary terms are read from a table of float32 numbers, one per distance and
    head, which is computed in float64. What depends on the key alone is applied up to a constant per query, for a
    float32 score could not hold ``slope · j`` at far positions. That leaves the weights as they are and shifts the
    log-sum-exp.

    Make it anew in every training step: the table is a function of the parameters, to which gradients flow,
    where FlexAttention has a backward pass (not on CPUs).

    Args:
        prior: or None, if there is a ``logit_scale``.
        num_queries: ``Lq``.
        num_keys: ``Lk``.
        causal: whether you mask keys after the query. It is read by the logit scale, which counts visible
            keys, and by priors that need it.
        logit_scale: :class:`SSMax`, or None.
        visible_keys: ``n``, how many keys each query may see, integers ``(Lq,)``, ``(B, Lq)`` or
            ``(B, H or 1, Lq)``: for a ``logit_scale`` under a mask of your own. By default counted from
            ``causal``, documents, padding and positions.
        query_positions: as in :func:`attend`, like all that follow; those with a batch dimension fix ``B``.
        key_positions: integers ``(Lk,)`` or ``(B, Lk)``.
        document_ids: integers ``(B, Lk)``. Positions restart at 0 in each document.
        key_padding_mask: boolean ``(B, Lk)``, True = ignore.
        device: of the queries; by default that of the prior's parameters.

    Returns:
        ``score_mod(score, b, h, q_idx, kv_idx)`` for ``H = prior.num_heads`` query heads.

    Raises:
        ValueError: if an argument is impossible or does not fit the others.
    """
    modules = {"prior": prior, "logit_scale": logit_scale}
    heads = {name: module.num_heads for name, module in modules.items() if module is not None}
    if not heads:
        raise ValueError("prior and logit_scale are both None: there is no score to modify")
    if len(set(heads.values())) > 1:
        raise ValueError(f"prior has num_heads={heads['prior']}, but logit_scale has num_heads={heads['logit_scale']}")
    check_in_use(prior, causal=causal, key_positions=key_positions)
    given = (query_positions, key_positions, document_ids, key_padding_mask)
    where = _device(device, prior, logit_scale, *given)
    geometry = _geometry((max(heads.values()), num_queries, num_keys), where, causal, *given)
    row_scale = None
    if visible_keys is not None:
        visible_keys = check_visible_keys(visible_keys, logit_scale, geometry.heads, num_queries).to(geometry.device)
        batch = len(visible_keys) if geometry.batch == 1 else geometry.batch
        if len(visible_keys) not in (1, batch):
            raise ValueError(f"visible_keys has a batch of {len(visible_keys)}, and other arguments one of {batch}")
        geometry = replace(geometry, batch=batch)
    if logit_scale is not None:
        like = torch.empty(0, device=geometry.device)
        row_scale = logit_scale(count_visible_keys(geometry, like) if visible_keys is None else visible_keys)
    return Scores.of(prior, geometry, row_scale, logit_scale is not None and logit_scale.include_prior).mod()


def flex_mask_mod(
    prior: Prior | None,
    num_queries: int,
    num_keys: int,
    *,
    causal: bool = True,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> MaskMod:
    """All that :func:`attend` would hide, as FlexAttention's ``mask_mod``: True = visible.

    Keys after the query (``causal``), of other documents, padding, and what the prior hides (:class:`Window`).
    ``and_masks`` and ``or_masks`` of ``torch.nn.attention.flex_attention`` combine it with masks of your own.

    Args:
        prior: or None.
        num_queries: ``Lq``.
        num_keys: ``Lk``.
        causal: whether a query sees only keys at positions up to its own.
        query_positions: as in :func:`attend`, like all that follow; those with a batch dimension fix ``B``.
        key_positions: integers ``(Lk,)`` or ``(B, Lk)``.
        document_ids: integers ``(B, Lk)``.
        key_padding_mask: boolean ``(B, Lk)``, True = ignore.
        device: of the queries; by default that of the prior's parameters.

    Returns:
        ``mask_mod(b, h, q_idx, kv_idx)``.

    Raises:
        ValueError: if an argument is impossible or does not fit the others.
    """
    check_in_use(prior, causal=causal, key_positions=key_positions)
    given = (query_positions, key_positions, document_ids, key_padding_mask)
    geometry = _geometry((1, num_queries, num_keys), _device(device, prior, *given), causal, *given)
    return Visibility.of(prior, geometry).mod()


def _device(device: torch.device | str | None, *owners: torch.nn.Module | Tensor | None) -> torch.device:
    """The one asked for, or the first that parameters or tensors are on."""
    if device is not None:
        return torch.device(device)
    tensors = chain.from_iterable(x.parameters() if isinstance(x, torch.nn.Module) else (x,) for x in owners)
    return next((x.device for x in tensors if isinstance(x, Tensor)), torch.device("cpu"))


def _geometry(
    sizes: tuple[int, int, int], device: torch.device, causal: bool, *positions_and_masks: Tensor | None
) -> Geometry:
    """As many batches as the tensors have, on one device."""
    heads, num_queries, num_keys = sizes
    for name, length in (("num_queries", num_queries), ("num_keys", num_keys)):
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"{name} must be a positive integer, got {length!r}")
    batched = [len(x) for x in positions_and_masks if isinstance(x, Tensor) and x.dim() == 2]
    query_positions, key_positions, document_ids, key_padding_mask = positions_and_masks
    return make_geometry(
        batch=max(batched, default=1),
        heads=heads,
        num_queries=num_queries,
        num_keys=num_keys,
        device=device,
        causal=causal,
        query_positions=query_positions,
        key_positions=key_positions,
        document_ids=document_ids,
        key_padding_mask=key_padding_mask,
        attn_mask=None,
    )


# ---- positions and distances


def _positions(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the positions of queries and keys, ``(1 or B, L)`` each, int32, from 0.

    Raises:
        ValueError: if the caller's positions lie too far apart for a table.
    """
    queries, keys = geometry.query_positions, geometry.key_positions
    start = torch.minimum(queries.amin(), keys.amin())
    if geometry.has_given_positions:
        span = int(torch.maximum(queries.amax(), keys.amax()) - start)
        if span >= MOST_TOKENS:
            raise ValueError(
                f"query_positions and key_positions span {span} tokens, or several rows of a grid; FlexAttention's "
                f"table takes less than {MOST_TOKENS} tokens, or one row; attend() of itself takes any number"
            )
    return (queries - start).int(), (keys - start).int()


def _distances(geometry: Geometry) -> tuple[int, int]:
    """The highest distance of any query and key, and how many, falling by one, are enough for all of them."""
    # Two tokens of different documents may lie either way; a mask hides them, but the table is read there too.
    length = _blocks(max(geometry.num_queries, geometry.num_keys)) * BLOCK
    if not geometry.has_given_positions:
        return length - 1, 2 * length
    queries, keys = geometry.query_positions, geometry.key_positions
    highest, lowest = int(queries.amax() - keys.amin()), int(queries.amin() - keys.amax())
    # Few different numbers: each is a shape for which FlexAttention is compiled anew.
    return highest, max(2 * length, 1 << (highest - lowest).bit_length())


def _blocks(length: int) -> int:
    """How many hold so many slots."""
    return -(-length // BLOCK)


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    """Repeat the last number of the last dimension up to a length."""
    missing = length - tensor.shape[-1]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], missing)], dim=-1)


def _in_slots(tensor: Tensor, geometry: Geometry, slots: int) -> Tensor:
    """Return ``(1 or B, ..., L)`` as ``(B, ..., slots)``, in memory.

    FlexAttention is compiled anew for other shapes and strides.
    """
    return _lengthened(tensor.expand(geometry.batch, *tensor.shape[1:]), slots).contiguous()


def _mask_in_slots(mask: Tensor, geometry: Geometry, num_queries: int, num_keys: int) -> Tensor:
    """Return an ``attn_mask`` over all slots: a view where queries, heads or texts share it."""
    mask = _lengthened(mask, num_keys)
    if mask.shape[2] > 1:
        mask = _lengthened(mask.mT, num_queries).mT
    return mask.expand(geometry.batch, geometry.heads, num_queries, num_keys)


# ---- score_mod


@dataclass(frozen=True)
class Scores:
    """What a ``score_mod`` reads.

    The bias is ``table[h, first_i + position_j] + Σ_r phi_r(h, i) psi_r(j) + keys(h, j) - own(h, i)``. The last two
    are sums of two float32 numbers each: one would round what is far from 0.
    """

    table: Tensor | None
    """``(H, N)``, of the stationary terms."""
    first: Tensor
    """``(B, Lq)``."""
    position: Tensor
    """``(B, Lk)``."""
    lanes: list[tuple[Tensor, Tensor]]
    """``phi (B, H, Lq)`` and ``psi (B, Lk)`` of each lane."""
    keys: tuple[Tensor, Tensor] | None
    """What depends on the key alone, ``(B, H, Lk)`` each."""
    own: tuple[Tensor, Tensor] | None
    """About the best of it that each query sees, ``(B, H, Lq)`` each: what the scores leave out of the log-prior."""
    row_scale: Tensor | None
    """``(B, H, Lq)``."""
    scales_prior: bool
    added: Tensor | None
    """A float ``attn_mask``, ``(B, H, Lq, Lk)``, finite."""

    @classmethod
    def of(
        cls,
        prior: Prior | None,
        geometry: Geometry,
        row_scale: Tensor | None,
        scales_prior: bool,
        key_bias: Tensor | None = None,
        slots: tuple[int, int] | None = None,
    ) -> Scores:
        """Tables and lanes of a prior. All in float32: that is what FlexAttention's scores are.

        Args:
            prior: or None.
            geometry: positions and masks.
            row_scale: what multiplies the scores, ``(1 or B, H, Lq)``, or None.
            scales_prior: whether it multiplies the log-prior too.
            key_bias: ``(B, H, Lk)``, or None.
            slots: numbers of queries and keys that FlexAttention gets: the geometry's own by default, or more. The
                additional queries have no meaning.
        """
        num_queries, num_keys = slots or (geometry.num_queries, geometry.num_keys)
        terms = () if prior is None else tuple(prior.terms())
        for term in terms:
            if Structure.SCALED_DISTANCE in term.structure:
                raise ValueError(f"FlexAttention does not compute the network of {term.name!r}; use attend()")
        queries, keys = _positions(geometry)
        highest, number = _distances(geometry)
        stationary = [term for term in terms if Structure.STATIONARY in term.structure]
        of_keys = [term for term in terms if term not in stationary and Structure.OF_KEYS in term.structure]
        lanes = _lanes([term for term in terms if term not in (*stationary, *of_keys)], geometry)
        table = consecutive_table(stationary, highest, highest - number + 1, geometry.device)
        sums, own = table_of_keys(of_keys, geometry, key_bias), _own(of_keys, geometry)
        if key_bias is not None:
            best = best_seen(key_bias.double(), geometry)
            own = best if own is None else own + best
        added, mask = None, geometry.attn_mask
        if mask is not None and mask.dtype != torch.bool:
            # Visibility hides the keys where it is -inf.
            finite = mask.float().clamp(min=torch.finfo(torch.float32).min)
            added = _mask_in_slots(finite, geometry, num_queries, num_keys)
        return cls(
            table=None if table is None else table.float().contiguous(),
            first=_in_slots(highest - queries, geometry, num_queries),
            position=_in_slots(keys, geometry, num_keys),
            lanes=[(_in_slots(phi, geometry, num_queries), _in_slots(psi, geometry, num_keys)) for phi, psi in lanes],
            keys=None if sums is None else in_two(_in_slots(sums, geometry, num_keys)),
            own=None if own is None else in_two(_in_slots(own, geometry, num_queries)),
            row_scale=None if row_scale is None else _in_slots(row_scale, geometry, num_queries),
            scales_prior=scales_prior,
            added=added,
        )

    def mod(self) -> ScoreMod:
        """The ``score_mod``."""
        table, scale, scales_prior, added = self.table, self.row_scale, self.scales_prior, self.added
        first, position, lanes, keys, own = self.first, self.position, self.lanes, self.keys, self.own
        # FlexAttention counts batches whether or not what is read here has them.
        each = int(len(position) > 1)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            e = b * each
            if scale is not None and not scales_prior:
                score = score * scale[e, h, q_idx]
            if table is not None:
                score = score + table[h, first[e, q_idx] + position[e, kv_idx]]
            for phi, psi in lanes:
                score = score + phi[e, h, q_idx] * psi[e, kv_idx]
            if keys is not None and own is not None:
                low = keys[1][e, h, kv_idx] - own[1][e, h, q_idx]
                score = score + ((keys[0][e, h, kv_idx] - own[0][e, h, q_idx]) + low)
            if scale is not None and scales_prior:
                score = score * scale[e, h, q_idx]
            return score if added is None else score + added[b, h, q_idx, kv_idx]

        return score_mod


def _lanes(terms: list[Prior], geometry: Geometry) -> list[tuple[Tensor, Tensor]]:
    """Return ``phi`` and ``psi`` of :class:`Scores`."""
    if not terms:
        return []
    queries, keys = geometry.query_positions, geometry.key_positions
    lanes = join_lanes([checked_lanes(term, queries, keys, torch.float64) for term in terms])
    # Apart from each other: FlexAttention has no gradient of a tensor that is read at two places.
    phi, psi = (part.float().unbind(-1) for part in lanes)
    return list(zip(phi, psi, strict=True))


@torch.no_grad()
def _own(terms: list[Prior], geometry: Geometry) -> Tensor | None:
    """About the best that each query sees of terms that depend on the key: at its own position, or at the first key's.

    ``(1 or B, H, Lq)``; None if there are no terms.
    """
    first = geometry.key_positions.amin(-1, keepdim=True)
    ends = [table_at(terms, positions) for positions in (geometry.query_positions, first)]
    own, others = (None if end is None else end.transpose(0, 1) for end in ends)
    return None if own is None or others is None else torch.maximum(own, others)


# ---- mask_mod


@dataclass(frozen=True)
class Visibility:
    """What a ``mask_mod`` reads: query ``i`` sees its segment's keys at positions ``lowest_i`` to ``highest_i``."""

    lowest: Tensor
    """``(B, Lq)``."""
    highest: Tensor
    """``(B, Lq)``."""
    position: Tensor
    """``(B, Lk)``."""
    query_segment: Tensor
    """``(B, Lq)``."""
    key_segment: Tensor
    """``(B, Lk)``; of padding, one that no query has."""
    forbidden: Tensor | None
    """A boolean ``attn_mask``, or where a float one is ``-inf``, ``(B, H, Lq, Lk)``."""

    @classmethod
    def of(cls, prior: Prior | None, geometry: Geometry, slots: tuple[int, int] | None = None) -> Visibility:
        """Causal mask, documents, padding and what the prior hides.

        Args:
            prior: or None.
            geometry: positions and masks.
            slots: as for :meth:`Scores.of`. No query sees an additional key.
        """
        num_queries, num_keys = slots or (geometry.num_queries, geometry.num_keys)
        queries, keys = _positions(geometry)
        lowest, highest = torch.full_like(queries, -FAR), torch.full_like(queries, FAR)
        if geometry.causal:
            highest = queries
        top, number = _distances(geometry)
        distances = torch.arange(top, top - number, -1, device=geometry.device, dtype=torch.int32)
        inside = None if prior is None else prior.visible_at(distances)
        if inside is not None:
            # What a prior shows is one run of distances. Where it shows none of these, the run is empty.
            farthest = torch.where(inside, distances, -FAR).amax()
            nearest = torch.where(inside, distances, FAR).amin()
            lowest, highest = queries - farthest, torch.minimum(highest, queries - nearest)
        query_segment, key_segment = geometry.query_documents, geometry.key_documents
        if query_segment is None or key_segment is None:
            query_segment, key_segment = torch.zeros_like(queries), torch.zeros_like(keys)
        key_segment, hidden = _in_slots(key_segment.long(), geometry, num_keys), geometry.key_padding_mask
        if hidden is None:
            hidden = torch.zeros(1, geometry.num_keys, dtype=torch.bool, device=geometry.device)
        hidden = pad(hidden, (0, num_keys - geometry.num_keys), value=True)
        forbidden = geometry.attn_mask
        if forbidden is not None:
            forbidden = forbidden if forbidden.dtype == torch.bool else torch.isneginf(forbidden)
            forbidden = _mask_in_slots(forbidden, geometry, num_queries, num_keys)
        return cls(
            lowest=_in_slots(lowest, geometry, num_queries),
            highest=_in_slots(highest, geometry, num_queries),
            position=_in_slots(keys, geometry, num_keys),
            query_segment=_in_slots(query_segment.long(), geometry, num_queries),
            key_segment=torch.where(hidden, key_segment.amax() + 1, key_segment),
            forbidden=forbidden,
        )

    def mod(self) -> MaskMod:
        """The ``mask_mod``."""
        lowest, highest, position = self.lowest, self.highest, self.position
        query_segment, key_segment, forbidden = self.query_segment, self.key_segment, self.forbidden
        each = int(len(position) > 1)

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            e = b * each
            at = position[e, kv_idx]
            seen = (lowest[e, q_idx] <= at) & (at <= highest[e, q_idx])
            seen = seen & (query_segment[e, q_idx] == key_segment[e, kv_idx])
            return seen if forbidden is None else seen & ~forbidden[b, h, q_idx, kv_idx]

        return mask_mod

    def block_mask(self) -> BlockMask:
        """Which blocks hold visible keys, from the ranges that blocks span, without a mask of single pairs.

        A block that may hold some is computed, and masked pair by pair unless all are surely visible.
        """
        # Its module brings all of PyTorch's compiler, whose import takes a second.
        from torch.nn.attention.flex_attention import BlockMask

        num_queries, num_keys = self.lowest.shape[-1], self.position.shape[-1]
        low, high, own = _ranges(self.lowest), _ranges(self.highest), _ranges(self.query_segment)
        position, segment = ([bound.mT for bound in _ranges(x)] for x in (self.position, self.key_segment))
        some = (position[0] <= high[1]) & (position[1] >= low[0]) & (segment[0] <= own[1]) & (segment[1] >= own[0])
        every = (position[0] >= low[1]) & (position[1] <= high[0]) & (segment[0] == own[1]) & (segment[1] == own[0])
        every = every & _whole(num_queries, every.device).unsqueeze(-1) & _whole(num_keys, every.device)
        if self.forbidden is not None:
            every = torch.zeros_like(every)
        return BlockMask.from_kv_blocks(
            *_listed(some & ~every),
            *_listed(some & every),
            BLOCK_SIZE=BLOCK,
            mask_mod=self.mod(),
            seq_lengths=(num_queries, num_keys),
        )


def _ranges(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest number of each block, ``(B, blocks, 1)``."""
    blocks = _lengthened(tensor, _blocks(tensor.shape[-1]) * BLOCK).unflatten(-1, (-1, BLOCK))
    return blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)


def _whole(length: int, device: torch.device) -> Tensor:
    """Which blocks have all of their slots; PyTorch's own block masks count the others as partly masked."""
    return torch.arange(1, _blocks(length) + 1, device=device) * BLOCK <= length


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each block of queries has, ``(B, 1, n)``, and which, those first, ``(B, 1, n, e)``."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)
