"""Attention problems with small blocks, so that short sequences have many blocks to prune."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
from attention_cases import Case, cases
from hypothesis import strategies as st
from torch import Tensor

from attention_priors.attention import operator
from attention_priors.attention.pruning import band, bounds, certificate, report
from attention_priors.attention.pruning.certificate import Pruned
from attention_priors.attention.tiles import backend, backward, block_problem, forward
from attention_priors.attention.tiles.block_problem import BlockProblem, Content
from attention_priors.attention.tiles.tiling import Part


@contextmanager
def small_blocks(size: int, worth_pruning: float = math.inf) -> Iterator[None]:
    """Use blocks of ``size`` and matching settings. With a tolerance, heads with little to gain are pruned too."""
    with ExitStack() as stack:
        for module in (forward, backward, block_problem, bounds, operator, certificate, report):
            stack.enter_context(mock.patch.object(module, "BLOCK", size))
        stack.enter_context(
            mock.patch.multiple(
                certificate,
                COARSE_BLOCKS=4,
                TOGETHER=2,
                NUMBERS=200,
                WORTH_PRUNING=worth_pruning,
                MOST_PAIRS=0,
            )
        )
        stack.enter_context(mock.patch.multiple(band, BAND_ROWS=max(1, size // 2), BAND=2))
        stack.enter_context(pruned_above(2 * size))
        yield


@contextmanager
def pruned_above(fewest: int) -> Iterator[None]:
    """Prune with more than ``fewest`` keys, for any number of queries and on any device."""
    with (
        mock.patch.multiple(
            certificate, FEWEST_KEYS=fewest, FEWEST_KEYS_ON_CUDA=fewest, FEWEST_CACHED_KEYS=fewest, FEWEST_QUERIES=0
        ),
        mock.patch.object(backend, "FEWEST_WEIGHTLESS", 0),
    ):
        yield


@dataclass(frozen=True)
class Observed:
    """Effect of pruning in one call of ``attend``."""

    out: Tensor
    lse: Tensor
    pruned: Pruned | None
    """Certificate of the call; None if there were no blocks to prune."""
    looked_at: Tensor
    """Mask of the computed pairs, ``(B, H, Lq, Lk)``."""


def attend_pruned(case: Case, size: int) -> Observed:
    """Run ``attend`` and record the effect of pruning."""
    seen: list[tuple[Content, BlockProblem, Pruned]] = []
    prune = certificate.prune

    def watched(content: Content, problem: BlockProblem, tolerance, balls) -> Pruned:
        pruned = prune(content, problem, tolerance, balls)
        seen.append((content, problem, pruned))
        return pruned

    with small_blocks(size), mock.patch.object(operator, "prune", watched):
        out, lse = case.attend("toeplitz")
        batch, heads, num_queries, _ = case.query.shape
        looked_at = torch.ones(batch, heads, num_queries, case.key.shape[2], dtype=torch.bool)
        if not seen:
            return Observed(out, lse, None, looked_at)
        _, problem, pruned = seen[0]
        looked_at[:] = False
        sizes = forward.sizes_of(problem, problem.bias())
        for text in range(batch):
            for head in range(heads):
                part = Part(slice(text, text + 1), slice(head, head + 1), slice(0, 1))
                for block in forward.blocks_of(part, replace(problem, kept=pruned.kept), sizes):
                    for tile in (tile for strip in block.strips for tile in strip):
                        pairs = (tile.batches, head, tile.rows, tile.keys)
                        assert not looked_at[pairs].any(), "a key is computed twice"
                        looked_at[pairs] = True
    return Observed(out, lse, pruned, looked_at)


def spread(kept: Tensor, size: int, num_queries: int, num_keys: int) -> Tensor:
    """Return the mask of the pairs in the blocks, ``(B, H, Lq, Lk)``."""
    pairs = kept.repeat_interleave(size, dim=-2).repeat_interleave(size, dim=-1)
    return pairs[..., :num_queries, :num_keys]


@st.composite
def prunable_cases(draw: st.DrawFn, prior_name: str, tolerances: st.SearchStrategy[float]) -> Case:
    """Draw a problem with a tolerance and without dense masks. Its keys are often hard for a bound."""
    case = draw(cases(prior_name, longest=70, masks=False))
    if draw(st.booleans()):
        case = replace(case, query_positions=None, key_positions=None)
    key = case.key.clone()
    kind = draw(st.sampled_from(["normal", "normal", "one huge key", "all equal", "far from the origin", "zero"]))
    if kind == "one huge key":
        key[:, :, draw(st.integers(0, key.shape[2] - 1))] *= 30
    elif kind == "all equal":
        key = key[:, :, :1].expand_as(key)
    elif kind == "far from the origin":
        key = key + 20 * torch.ones_like(key)
    elif kind == "zero":
        key = torch.zeros_like(key)
    prior = case.prior
    if prior is not None and draw(st.booleans()):
        # Steeper than the library's usual range, so that short sequences have blocks to prune.
        with torch.no_grad():
            for name, parameter in prior.named_parameters():
                if name.endswith(("log_slope", "theta_alpha")):
                    parameter += 2.0
    return replace(case, key=key.contiguous(), tolerance=draw(tolerances))
