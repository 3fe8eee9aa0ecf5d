import copy

import pytest
import study_rows
from study_rows import Rows

_FIVE = study_rows.five_schemes()
_SWEEP = study_rows.sweep()


@pytest.fixture
def rows() -> Rows:
    """Return five schemes, as a copy that a test may change."""
    return copy.deepcopy(_FIVE)


@pytest.fixture
def swept() -> Rows:
    """Return a sweep, as a copy that a test may change."""
    return copy.deepcopy(_SWEEP)
