"""Rows whose log-prior is far from 0 where they look: float32 has few digits left for it there.

A float32 of size ``z`` is wrong by up to ``z · 2^-24``: a log-prior of -5000 nats by 3e-4, one of half a million by
0.03. As a rule that is of no account, since a query looks where the log-prior is near 0, and a key at -5000 nats
weighs nothing beside it. But where all keys are far, or the logit scale is negative, or a slope points away from the
query, the best keys are at such numbers. A constant that is taken from their log-prior in float64 and given back to
the row's log-sum-exp leaves small numbers, and the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_priors.attention.content import Augmented, slope_term
from attention_priors.attention.geometry import Geometry, positions_in_documents
from attention_priors.attention.geometry_operator import geometry_arguments
from attention_priors.attention.operator import Table, attend_in_tiles
from attention_priors.attention.problem import Problem
from attention_priors.attention.sliding import sliding_maximum
from attention_priors.attention.tables import known_range
from attention_priors.precision import is_traced
from attention_priors.priors import Prior
from attention_priors.priors.base import checked_log_prior

NEAR = 400.0
"""Nats from 0 up to which float32 is exact to 1e-4: log-prior, logit and what they are made of are each rounded."""
ROWS = (1024, 256, 64, 16)
"""How many queries may share a constant."""


def table_of(terms: Sequence[Prior], slope: Tensor | None, distance: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The log-prior of the terms, and of a slope of the keys, at each distance, ``(H, *distance.shape)``."""
    parts = [checked_log_prior(term, distance, dtype) for term in terms]
    if slope is not None:
        parts.append(slope_term(slope, distance).to(dtype))
    return sum(parts[1:], parts[0]) if parts else None


def visible_at(problem: Problem, distance: Tensor) -> Tensor | None:
    """Whether the prior lets a query see each distance; None if it hides none."""
    return None if problem.prior is None else problem.prior.visible_at(distance)


# ---- whether it is needed


def may_look(problem: Problem) -> bool:
    """Whether there is something to look for, and values may be looked at: not while compiling or transforming."""
    if problem.near or problem.query.is_meta:
        return False
    traced = is_traced() or torch._C._are_functorch_transforms_active()
    return problem.compute_dtype != torch.float64 and not traced


def lanes_are_exact(problem: Problem, augmented: Augmented) -> bool:
    """Whether no lane holds a number too large for float32."""
    return augmented.size is None or not may_look(problem) or bool(augmented.size <= NEAR)


def is_near(
    problem: Problem,
    augmented: Augmented,
    terms: Sequence[Prior],
    prior: Table,
) -> bool:
    """Whether the best log-prior that each row sees, scaled, is within ``NEAR`` nats of 0.

    Of the masks only the causal one and windows are looked at: whoever hides the near keys from a query by padding or
    ``attn_mask`` gets the precision of float32.

    Args:
        problem: what was asked.
        augmented: its queries and keys.
        terms: those in the table.
        prior: their table.
    """
    geometry = problem.geometry
    table, row_scale, inside, listed, highest, _ = prior
    if table is None:
        return True
    stands_at_keys = _sees_itself(geometry) and listed is None
    # Before gradients are off: of a prior that learns there may be a table of numbers that it had before.
    if stands_at_keys and augmented.slope is None and is_known_near(terms, row_scale):
        return True
    with torch.no_grad():
        ends = None if row_scale is None else _ends(row_scale)
        occurring = _occurring(geometry, prior)
        seen, inside = table[:, occurring], None if inside is None else inside[occurring]
        seen = seen if inside is None else seen[:, inside]
        if not seen.shape[1]:
            return True
        # Linear in the scale, the worst is at one of its ends.
        seen = seen if ends is None else torch.stack(seen.aminmax(dim=1), dim=1).unsqueeze(2) * ends.unsqueeze(1)
        if float(seen.amax()) > NEAR:
            return False
        if stands_at_keys:
            # Its own key and the next ones: only a query that sees no other key lacks them.
            near = table[:, max(0, highest - 1) : highest + (1 if geometry.causal else 2)]
            best = near if ends is None else near.unsqueeze(1) * ends.unsqueeze(2)
            return float(best.amax(-1).min()) >= -NEAR
        if float(seen.amin()) >= -NEAR:
            return True
        distance, exists = _some_seen(geometry)
        some = table_of(terms, augmented.slope, distance, torch.float32)
        assert some is not None
        some = some if ends is None else some.unsqueeze(1) * ends.view(-1, 2, 1, 1, 1)
        within = visible_at(problem, distance)
        best = some.masked_fill(~exists if within is None else ~(exists & within), float("-inf")).amax(-1)
        return bool(((best >= -NEAR) | torch.isneginf(best)).all())


def is_known_near(terms: Sequence[Prior], row_scale: Tensor | None) -> bool:
    """Whether kept tables, just asked for, say so by a few numbers; each query stands at a key.

    Args:
        terms: those in the table.
        row_scale: what multiplies them, or None.
    """
    known = known_range(terms)
    if known is None:
        return False
    best, largest = known
    low, high = (1.0, 1.0) if row_scale is None else (float(end) for end in row_scale.detach().aminmax())
    return low >= 0 and largest * high <= NEAR and best * high >= -NEAR


def _occurring(geometry: Geometry, prior: Table) -> slice:
    """Entries of a table whose distances a query may see: not in the future, not beyond the longest document."""
    highest, number = prior.highest, prior.number
    if prior.listed is not None:
        return slice(int(torch.searchsorted(prior.listed, 0)) if geometry.causal else 0, None)
    first, last = highest, 0 if geometry.causal else highest - number + 1
    if geometry.key_documents is not None and not geometry.has_given_positions:
        longest = int(positions_in_documents(geometry.key_documents).max())
        first, last = min(first, longest), max(last, -longest)
    return slice(max(0, highest - first), max(0, highest - last + 1))


def _ends(scale: Tensor) -> Tensor:
    """The lowest and the highest logit scale of each head, ``(H, 2)``: one that falls with length may change sign."""
    return torch.stack([scale.amin((0, 2)), scale.amax((0, 2))], dim=1)


def _sees_itself(geometry: Geometry) -> bool:
    """Whether each query stands at a key, with the next token at the next one."""
    if not geometry.has_given_positions:
        return geometry.num_queries <= geometry.num_keys
    offset = geometry.offset
    return offset is not None and 0 <= offset <= geometry.num_keys - geometry.num_queries


def _some_seen(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Distances to a few keys that each query sees, ``(1 or B, Lq, C)``, and whether there is such a key.

    A query that sees a single key has none: its weight is 1 whatever the log-prior.
    """
    queries, keys = geometry.query_positions, geometry.key_positions.sort(-1).values
    batch = max(len(queries), len(keys))
    queries, keys = (x.expand(batch, -1).contiguous() for x in (queries, keys))
    after = torch.searchsorted(keys, queries, right=True)
    several = (after if geometry.causal else torch.full_like(after, geometry.num_keys)) > 1
    first, last = torch.zeros_like(after), torch.full_like(after, geometry.num_keys - 1)
    slots = torch.stack([after - 2, after - 1, after, first, last], dim=-1)
    places = slots.clamp(0, geometry.num_keys - 1)
    distance = queries.unsqueeze(-1) - keys.unsqueeze(1).expand(-1, places.shape[1], -1).gather(-1, places)
    exists = (slots >= 0) & (slots < geometry.num_keys) & several.unsqueeze(-1)
    return distance, exists & (distance >= 0) if geometry.causal else exists


# ---- how it is done


def attend_recentred(
    problem: Problem, augmented: Augmented, terms: Sequence[Prior], fused: bool
) -> tuple[Tensor, Tensor] | None:
    """Attention over queries and keys with lanes, with a constant of its own for each block of queries and head.

    None where it takes the dense formula, whose rows each have their own: with masks and documents, for positions with
    gaps, where the best log-priors of neighbouring queries are far from each other, and where the logit scale is
    negative for some queries of a head and positive for others.
    """
    geometry, offset = problem.geometry, problem.geometry.offset
    if offset is None or geometry.has_masks:
        return None
    content = augmented.content
    num_queries, num_keys = geometry.num_queries, geometry.num_keys
    highest = num_queries - 1 + offset
    distances = torch.arange(highest, offset - num_keys, -1, device=geometry.device)
    table = table_of(terms, augmented.slope, distances, torch.float64)
    assert table is not None
    inside = visible_at(problem, distances)
    scale, sign = problem.row_scale if problem.scales_prior else None, table.new_ones(len(table), 1)
    if scale is not None:
        low, high = _ends(scale.detach()).unsqueeze(2).unbind(1)
        if bool(((low < 0) & (high > 0)).any()):
            return None
        sign = torch.where(low < 0, -1.0, 1.0).double()
    best = _best_of_rows(table, distances, inside, sign, geometry)
    rows = _rows_per_block(best, scale)
    if rows is None:
        return None
    outs, lses = [], []
    for start in range(0, num_queries, rows):
        here = slice(start, min(start + rows, num_queries))
        keys = slice(0, min(num_keys, max(1, here.stop + offset)) if geometry.causal else num_keys)
        part = _block(geometry, here, keys, offset)
        top, bottom = here.stop - 1 + offset, lowest_distance(part, start + offset)
        cut = slice(highest - top, highest - bottom + 1)
        row_scale = None if scale is None else scale[:, :, here]
        constant = (best[:, here] * sign).amax(1, keepdim=True) * sign
        out, lse = attend_in_tiles(
            content.query[:, :, here],
            content.key[:, :, keys],
            content.value[:, :, keys],
            None if content.query_scale is None else content.query_scale[:, :, here],
            None if content.lane_query is None else content.lane_query[:, :, here],
            None if content.lane_key is None else content.lane_key[:, keys],
            (table[:, cut] - constant).to(torch.float32),
            row_scale,
            None if inside is None else inside[cut],
            None,
            top,
            top - bottom + 1,
            problem.softmax_scale,
            *geometry_arguments(part),
            None,
            fused,
        )
        outs.append(out)
        lses.append(lse + (constant if row_scale is None else constant * row_scale.double()))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def lowest_distance(geometry: Geometry, offset: int) -> int:
    """The last entry of a table; ``offset`` is the distance of the first query from the first key."""
    lowest = offset - (geometry.num_keys - 1)
    lowest = max(lowest, 0) if geometry.causal else lowest
    return min(lowest, geometry.num_queries - 1 + offset)


def _best_of_rows(table: Tensor, distances: Tensor, inside: Tensor | None, sign: Tensor, geometry: Geometry) -> Tensor:
    """The best log-prior that each query sees, ``(H, Lq)``: the highest, or with a negative ``sign`` the lowest.

    0 for a query that sees nothing.
    """
    with torch.no_grad():
        hidden = (distances < 0) & geometry.causal
        hidden = hidden if inside is None else hidden | ~inside
        # The last query's keys come first in the table.
        best = sliding_maximum((table * sign).masked_fill(hidden, float("-inf")), geometry.num_keys).flip(1)
        return best.masked_fill(torch.isneginf(best), 0.0) * sign


def _rows_per_block(best: Tensor, scale: Tensor | None) -> int | None:
    """How many queries may share a constant, so that it is within ``NEAR`` nats of the best of each; None for none."""
    with torch.no_grad():
        size = best.new_ones(len(best)) if scale is None else scale.abs().amax((0, 2)).double()
        for rows in ROWS:
            missing = -best.shape[1] % rows
            blocks = torch.cat([best, best[:, -1:].expand(-1, missing)], dim=1).unflatten(1, (-1, rows))
            low, high = blocks.aminmax(dim=2)
            if bool(((high - low) * size.unsqueeze(1) <= NEAR).all()):
                return rows
        return None


def _block(geometry: Geometry, rows: slice, keys: slice, offset: int) -> Geometry:
    """Some of the queries and the first keys; positions are counted in slots."""
    slots = torch.arange(max(rows.stop, keys.stop), device=geometry.device).unsqueeze(0)
    return Geometry(
        batch=geometry.batch,
        heads=geometry.heads,
        num_queries=rows.stop - rows.start,
        num_keys=keys.stop,
        device=geometry.device,
        causal=geometry.causal,
        given_query_positions=slots[:, rows] + offset,
        given_key_positions=slots[:, keys],
    )
