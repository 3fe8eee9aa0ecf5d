import copy

import pytest
from synthetic_results import make_results

_RESULTS = make_results()


@pytest.fixture
def results() -> dict:
    """A copy that a test may change."""
    return copy.deepcopy(_RESULTS)
