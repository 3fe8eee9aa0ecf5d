"""Report of the keys that pruning skips in each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from attention_priors.attention.operator import read_inputs
from attention_priors.attention.plan import make_plan
from attention_priors.attention.problem import Options, make_problem
from attention_priors.attention.pruning.bounds import BLOCK
from attention_priors.attention.pruning.certificate import keep_everything, prune
from attention_priors.attention.tiles.backend import balls_of, operator_inputs
from attention_priors.priors import Prior


@dataclass(frozen=True)
class PruningReport:
    """Keys that ``attend(..., tolerance=...)`` reads and skips, per head."""

    reach: Tensor
    """Distance to the farthest visible key that any query reads, in tokens, ``(H,)``, integers."""
    skipped: Tensor
    """Share of the visible query-key pairs that are skipped, ``(H,)``.

    A pair is visible if neither a mask nor the prior (a :class:`Window`) hides the key.
    """
    dropped: Tensor
    """Largest share of its weight that a query may lose (the certificate), ``(H,)``, float64."""
    kept: Tensor
    """Blocks of 256 keys that each block of 256 queries reads, boolean, ``(B, H, ⌈Lq / 256⌉, ⌈Lk / 256⌉)``."""


@torch.no_grad()
def pruning_report(query: Tensor, key: Tensor, prior: Prior | None = None, **options: Unpack[Options]) -> PruningReport:
    """Return the keys that :func:`attend` would read and skip with this ``tolerance``, without computing attention.

    The arguments are those of :func:`attend`. For larger tiles, :func:`attend` may read a few more blocks than the
    report says.

    Raises:
        ValueError: If ``tolerance`` is 0, or if :func:`attend` would raise it.
    """
    problem = make_problem(query, key, key, prior, **options)
    if problem.tolerance == 0:
        raise ValueError("tolerance must be above 0, got 0: attend() then skips only keys without weight")
    geometry, plan = problem.geometry, make_plan(problem, "auto", need_lse=False)
    if geometry.offset is None or plan.unpruned is not None:
        # Positions with gaps are computed in full. A table of all their distances would be as large as a dense bias.
        kept, dropped = keep_everything(geometry)
    else:
        inputs = operator_inputs(problem, plan)
        assert inputs is not None
        kept, dropped = prune(*read_inputs(*inputs, None, False), problem.tolerance, balls_of(problem, plan))
    reach = torch.zeros(geometry.heads, dtype=torch.int64, device=query.device)
    seen = torch.zeros((), dtype=torch.float64, device=query.device)
    looked_at = torch.zeros(geometry.heads, dtype=torch.float64, device=query.device)
    queries, keys = geometry.query_positions, geometry.key_positions
    blocks_of_keys = torch.arange(geometry.num_keys, device=query.device) // BLOCK
    for block in range(kept.shape[2]):
        rows = slice(block * BLOCK, min((block + 1) * BLOCK, geometry.num_queries))
        distance = (queries[:, rows].unsqueeze(-1) - keys.unsqueeze(-2)).unsqueeze(1)
        visible = torch.ones_like(distance, dtype=torch.bool)
        for seen_pairs in (geometry.visible(rows), None if prior is None else prior.visible_at(distance)):
            visible = visible if seen_pairs is None else visible & seen_pairs
        here = visible & kept[:, :, block].unsqueeze(2)[..., blocks_of_keys]
        seen += visible.expand(geometry.batch, -1, rows.stop - rows.start, -1).sum()
        looked_at += here.sum((0, 2, 3))
        reach = torch.maximum(reach, torch.where(here, distance.abs(), 0).amax((0, 2, 3)))
    return PruningReport(reach, 1 - looked_at / seen.clamp(min=1), dropped.amax((0, 2)), kept)
