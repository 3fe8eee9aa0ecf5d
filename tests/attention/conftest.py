"""Fixtures for several tests of attention."""

from collections.abc import Iterator
from unittest import mock

import pytest
from pruning_cases import pruned_above

from attention_priors.attention.tiles import bare, block_problem, tiling


@pytest.fixture(scope="module", autouse=True)
def short_sequences_are_pruned() -> Iterator[None]:
    """Prune from three blocks of keys on, where it would not save time."""
    with pruned_above(512):
        yield


@pytest.fixture(params=["in one tile", "in tiles"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute short contexts in several tiles too, as long contexts are."""
    if request.param == "in one tile":
        yield
        return
    with (
        mock.patch.object(block_problem, "FEW_PAIRS", 0),
        mock.patch.object(tiling, "FEW_PAIRS", 0),
        mock.patch.object(bare, "SHORT_PAIRS", 0),
    ):
        yield
