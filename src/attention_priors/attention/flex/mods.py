"""FlexAttention's ``score_mod`` and ``mask_mod`` for any prior.

``flex_score_mod`` and ``flex_mask_mod`` are for direct calls of ``torch.nn.attention.flex_attention``, for example with
custom masks. ``attend(backend="flex")`` uses the same building blocks.
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
"""Number of queries and of keys per block of a block mask; PyTorch's default."""
MOST_TOKENS = 2**22
"""Upper bound on the span of positions in tokens, because tables also cover gaps between positions."""
FAR = 2**30
"""Position beyond all tokens, whose positions count from the first."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# ---- public functions


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
    """Return a prior as FlexAttention's ``score_mod``: ``c_i (score + K_ij)``, or ``c_i score + K_ij``.

    The function hides no keys; :func:`flex_mask_mod` does. It is valid for every pair of a query and a key, so it
    combines with any ``mask_mod``. Stationary terms are read from a float32 table by distance and head, which is
    computed in float64. Terms that depend on the key alone are shifted by a constant per query, because a float32
    score cannot represent ``slope · j`` at far positions. The shift leaves the weights unchanged, but changes the
    log-sum-exp.

    Call this function again in every training step, because the table depends on the parameters. Gradients flow to
    the parameters where FlexAttention has a backward pass, which is not on CPUs.

    Args:
        prior: Prior; None is allowed with a ``logit_scale``.
        num_queries: Number of queries ``Lq``.
        num_keys: Number of keys ``Lk``.
        causal: Whether the mask hides keys after the query. Some priors and the logit scale, which counts visible
            keys, depend on this argument.
        logit_scale: :class:`SSMax`. None applies no scale.
        visible_keys: Number of visible keys of each query, integers of shape ``(Lq,)``, ``(B, Lq)`` or
            ``(B, H or 1, Lq)``. Pass this for a ``logit_scale`` with a custom mask. By default, the keys are counted
            from ``causal``, documents, padding and positions.
        query_positions: Integers of shape ``(Lq,)`` or ``(B, Lq)``. This and the following arguments are as in
            :func:`attend`. A batch dimension fixes ``B``.
        key_positions: Integers of shape ``(Lk,)`` or ``(B, Lk)``.
        document_ids: Integers of shape ``(B, Lk)``. Positions restart at 0 in each document.
        key_padding_mask: Boolean, shape ``(B, Lk)``; True is ignored.
        device: Device of the queries; that of the prior's parameters by default.

    Returns:
        ``score_mod(score, b, h, q_idx, kv_idx)`` for ``H = prior.num_heads`` query heads.

    Raises:
        ValueError: An argument is invalid or incompatible with the others.
    """
    modules = {"prior": prior, "logit_scale": logit_scale}
    heads = {name: module.num_heads for name, module in modules.items() if module is not None}
    if not heads:
        raise ValueError("prior and logit_scale are both None; expected at least one of them")
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
            raise ValueError(f"visible_keys has batch size {len(visible_keys)}, but other arguments have {batch}")
        geometry = replace(geometry, batch=batch)
    if logit_scale is not None:
        like = torch.empty(0, device=geometry.device)
        row_scale = logit_scale(count_visible_keys(geometry, like) if visible_keys is None else visible_keys)
    return score_mod_of(prior, geometry, row_scale, logit_scale is not None and logit_scale.include_prior)[0]


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
    """Return the visibility of keys in :func:`attend` as FlexAttention's ``mask_mod``; True is visible.

    The mask hides keys after the query (``causal``), keys of other documents, padding, and keys that the prior hides
    (:class:`Window`). Combine it with custom masks by ``and_masks`` and ``or_masks`` of
    ``torch.nn.attention.flex_attention``.

    Args:
        prior: Prior. None hides no keys.
        num_queries: Number of queries ``Lq``.
        num_keys: Number of keys ``Lk``.
        causal: Whether keys after the query are hidden.
        query_positions: Integers of shape ``(Lq,)`` or ``(B, Lq)``. This and the following arguments are as in
            :func:`attend`. A batch dimension fixes ``B``.
        key_positions: Integers of shape ``(Lk,)`` or ``(B, Lk)``.
        document_ids: Integers of shape ``(B, Lk)``.
        key_padding_mask: Boolean, shape ``(B, Lk)``. True marks padding, which no query sees.
        device: Device of the queries. The default is the device of the prior's parameters.

    Returns:
        ``mask_mod(b, h, q_idx, kv_idx)``.

    Raises:
        ValueError: An argument is invalid or incompatible with the others.
    """
    check_in_use(prior, causal=causal, key_positions=key_positions)
    given = (query_positions, key_positions, document_ids, key_padding_mask)
    geometry = _geometry((1, num_queries, num_keys), _device(device, prior, *given), causal, *given)
    return Visibility.of(prior, geometry).mod()


def _device(device: torch.device | str | None, *owners: torch.nn.Module | Tensor | None) -> torch.device:
    """Return ``device``, or by default the device of the first parameter or tensor."""
    if device is not None:
        return torch.device(device)
    tensors = chain.from_iterable(x.parameters() if isinstance(x, torch.nn.Module) else (x,) for x in owners)
    return next((x.device for x in tensors if isinstance(x, Tensor)), torch.device("cpu"))


def _geometry(
    sizes: tuple[int, int, int], device: torch.device, causal: bool, *positions_and_masks: Tensor | None
) -> Geometry:
    """Return the geometry, with the batch size of the positions and masks, on one device."""
    for name, length in zip(("num_queries", "num_keys"), sizes[1:], strict=True):
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"{name} must be a positive integer, got {length!r}")
    batched = [len(x) for x in positions_and_masks if isinstance(x, Tensor) and x.dim() == 2]
    return make_geometry((max(batched, default=1), *sizes), device, causal, *positions_and_masks)


# ---- positions and distances


def _positions(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the positions of queries and keys in int32, shape ``(1 or B, L)`` each, counted from 0.

    Raises:
        ValueError: The caller's positions lie too far apart for a table.
    """
    queries, keys = geometry.query_positions, geometry.key_positions
    start = torch.minimum(queries.amin(), keys.amin())
    if geometry.has_given_positions:
        span = int(torch.maximum(queries.amax(), keys.amax()) - start)
        if span >= MOST_TOKENS:
            raise ValueError(
                f"query_positions and key_positions span {span} tokens, or several rows of a grid; FlexAttention's "
                f"table takes less than {MOST_TOKENS} tokens, or one row; use attend() with its default backend"
            )
    return (queries - start).int(), (keys - start).int()


def _distances(geometry: Geometry) -> tuple[int, int]:
    """Return the highest distance of a table, and the number of distances, falling by one, that cover all pairs."""
    # Tokens of different documents may lie at any distance. A mask hides these pairs, but the table is still read.
    length = _blocks(max(geometry.num_queries, geometry.num_keys)) * BLOCK
    if not geometry.has_given_positions:
        return length - 1, 2 * length
    queries, keys = geometry.query_positions, geometry.key_positions
    highest, lowest = int(queries.amax() - keys.amin()), int(queries.amin() - keys.amax())
    # Rounding limits the number of shapes, as FlexAttention is compiled for each.
    return highest, max(2 * length, 1 << (highest - lowest).bit_length())


def _blocks(length: int) -> int:
    """Return the number of blocks that ``length`` slots fill."""
    return -(-length // BLOCK)


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    """Extend the last dimension to ``length`` by repeating its last entry."""
    missing = length - tensor.shape[-1]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], missing)], dim=-1)


def _in_slots(tensor: Tensor, geometry: Geometry, slots: int) -> Tensor:
    """Expand ``(1 or B, ..., L)`` to a contiguous ``(B, ..., slots)``.

    A fixed layout avoids recompilation of FlexAttention for other shapes and strides.
    """
    return _lengthened(tensor.expand(geometry.batch, *tensor.shape[1:]), slots).contiguous()


def _mask_in_slots(mask: Tensor, geometry: Geometry, num_queries: int, num_keys: int) -> Tensor:
    """Return an ``attn_mask`` over all slots, as a view where queries, heads or rows of the batch share entries."""
    mask = _lengthened(mask, num_keys)
    if mask.shape[2] > 1:
        mask = _lengthened(mask.mT, num_queries).mT
    return mask.expand(geometry.batch, geometry.heads, num_queries, num_keys)


# ---- score_mod


def score_mod_of(
    prior: Prior | None,
    geometry: Geometry,
    row_scale: Tensor | None,
    scales_prior: bool,
    key_bias: Tensor | None = None,
    slots: tuple[int, int] | None = None,
) -> tuple[ScoreMod, tuple[Tensor, Tensor] | None]:
    """Return a ``score_mod`` and a part of each query's log-prior that its scores lack, in float32.

    The bias is ``table[h, first_i + position_j] + Σ_r phi_r(h, i) psi_r(j) + of_keys(h, j) - own(h, i)``. The part that
    scores lack is ``own``, the approximate maximum of ``of_keys`` over the keys that the query sees. Both are sums of
    two float32 numbers each, because a single number would round values far from 0.

    Args:
        prior: Prior, or None.
        geometry: Positions and masks.
        row_scale: Factor of each query's scores, shape ``(1 or B, H, Lq)``. None applies no factor.
        scales_prior: Whether ``row_scale`` also multiplies the log-prior.
        key_bias: Bias of each key, shape ``(B, H, Lk)``. None adds no bias.
        slots: Padded numbers of queries and keys of FlexAttention. None adds no padding. Results of padding queries
            have no meaning.

    Returns:
        The ``score_mod``, and the two parts of ``own``, shape ``(B, H, Lq)``. None if no term is of keys alone.
    """
    num_queries, num_keys = slots or (geometry.num_queries, geometry.num_keys)
    terms = () if prior is None else tuple(prior.terms())
    for term in terms:
        if Structure.SCALED_DISTANCE in term.structure:
            raise ValueError(f"FlexAttention does not support the network of {term.name!r}; use attend()")
    queries, keys = _positions(geometry)
    highest, number = _distances(geometry)
    stationary = [term for term in terms if Structure.STATIONARY in term.structure]
    single = [term for term in terms if term not in stationary and Structure.OF_KEYS in term.structure]
    others = _lanes([term for term in terms if term not in (*stationary, *single)], geometry)
    table = consecutive_table(stationary, highest, highest - number + 1, geometry.device)
    sums, best = table_of_keys(single, geometry, key_bias), _own(single, geometry)
    if key_bias is not None:
        seen = best_seen(key_bias.double(), geometry)
        best = seen if best is None else best + seen
    added, mask = None, geometry.attn_mask
    if mask is not None and mask.dtype != torch.bool:
        # `Visibility` hides keys where the mask is -inf.
        finite = mask.float().clamp(min=torch.finfo(torch.float32).min)
        added = _mask_in_slots(finite, geometry, num_queries, num_keys)
    table = None if table is None else table.float().contiguous()
    first = _in_slots(highest - queries, geometry, num_queries)
    position = _in_slots(keys, geometry, num_keys)
    lanes = [(_in_slots(phi, geometry, num_queries), _in_slots(psi, geometry, num_keys)) for phi, psi in others]
    of_keys = None if sums is None else in_two(_in_slots(sums, geometry, num_keys))
    own = None if best is None else in_two(_in_slots(best, geometry, num_queries))
    scale = None if row_scale is None else _in_slots(row_scale, geometry, num_queries)
    # FlexAttention passes a batch index even if these tensors have batch size 1.
    each = int(len(position) > 1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        e = b * each
        if scale is not None and not scales_prior:
            score = score * scale[e, h, q_idx]
        if table is not None:
            score = score + table[h, first[e, q_idx] + position[e, kv_idx]]
        for phi, psi in lanes:
            score = score + phi[e, h, q_idx] * psi[e, kv_idx]
        if of_keys is not None and own is not None:
            low = of_keys[1][e, h, kv_idx] - own[1][e, h, q_idx]
            score = score + ((of_keys[0][e, h, kv_idx] - own[0][e, h, q_idx]) + low)
        if scale is not None and scales_prior:
            score = score * scale[e, h, q_idx]
        return score if added is None else score + added[b, h, q_idx, kv_idx]

    return score_mod, own


def _lanes(terms: list[Prior], geometry: Geometry) -> list[tuple[Tensor, Tensor]]:
    """Return ``phi`` and ``psi`` of each lane (see :func:`score_mod_of`)."""
    if not terms:
        return []
    queries, keys = geometry.query_positions, geometry.key_positions
    lanes = join_lanes([checked_lanes(term, queries, keys, torch.float64) for term in terms])
    # Separate tensors, because FlexAttention does not support the gradient of a tensor that is read twice.
    phi, psi = (part.float().unbind(-1) for part in lanes)
    return list(zip(phi, psi, strict=True))


@torch.no_grad()
def _own(terms: list[Prior], geometry: Geometry) -> Tensor | None:
    """Return the maximum of key terms at each query's position and at the first key, shape ``(1 or B, H, Lq)``.

    This approximates the maximum over the query's visible keys. None without terms.
    """
    first = geometry.key_positions.amin(-1, keepdim=True)
    ends = [table_at(terms, positions) for positions in (geometry.query_positions, first)]
    own, others = (None if end is None else end.transpose(0, 1) for end in ends)
    return None if own is None or others is None else torch.maximum(own, others)


# ---- mask_mod


@dataclass(frozen=True)
class Visibility:
    """Tensors that a ``mask_mod`` reads.

    Query ``i`` sees the keys of its segment at positions ``lowest_i`` to ``highest_i``.
    """

    lowest: Tensor
    """Lowest visible position of each query, shape ``(B, Lq)``."""
    highest: Tensor
    """Highest visible position of each query, shape ``(B, Lq)``."""
    position: Tensor
    """Position of each key, shape ``(B, Lk)``."""
    query_segment: Tensor
    """Segment of each query, shape ``(B, Lq)``."""
    key_segment: Tensor
    """Segment of each key, shape ``(B, Lk)``; padding has a segment without queries."""
    forbidden: Tensor | None
    """Boolean ``attn_mask``, or the ``-inf`` entries of a float ``attn_mask``, shape ``(B, H, Lq, Lk)``."""

    @classmethod
    def of(cls, prior: Prior | None, geometry: Geometry, slots: tuple[int, int] | None = None) -> Visibility:
        """Combine the causal mask, documents, padding and the visible distances of a prior.

        Args:
            prior: Prior, or None.
            geometry: Positions and masks.
            slots: Padded numbers of queries and keys (see :func:`score_mod_of`). No query sees a padding key.
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
            # The visible distances of a prior form one interval, which may be empty.
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
        """Return the ``mask_mod``."""
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
        """Return the block mask, derived from the ranges of each block without a mask of single pairs.

        Blocks that may have visible pairs are computed. They are masked pair by pair unless all pairs are visible.
        """
        # The module imports PyTorch's compiler, which takes a second.
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
    """Return the smallest and the largest number of each block, shape ``(B, blocks, 1)``."""
    blocks = _lengthened(tensor, _blocks(tensor.shape[-1]) * BLOCK).unflatten(-1, (-1, BLOCK))
    return blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)


def _whole(length: int, device: torch.device) -> Tensor:
    """Return which blocks are full; PyTorch's block masks treat other blocks as partly masked."""
    return torch.arange(1, _blocks(length) + 1, device=device) * BLOCK <= length


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, ``(B, 1, n)``, and their indices first, ``(B, 1, n, e)``."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)
