"""What several tests of attention need."""

from collections.abc import Iterator
from unittest import mock

import pytest

from attention_priors.attention.tiles import short


@pytest.fixture(params=["as one matrix", "in tiles"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Short contexts, as tests have them, are one matrix; here also computed in tiles, as long ones are."""
    if request.param == "as one matrix":
        yield
        return
    with mock.patch.object(short, "MOST_PAIRS", 0):
        yield
