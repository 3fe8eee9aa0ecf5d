"""Fixtures for several tests of attention."""

from collections.abc import Iterator
from unittest import mock

import pytest

from attention_priors.attention.tiles import bare, block_problem, tiling


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
