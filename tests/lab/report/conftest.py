import copy

import pytest
import study_rows
from study_rows import Rows

_FIVE = study_rows.five_schemes()
_SWEEP = study_rows.sweep()


@pytest.fixture
def rows() -> Rows:
    """Five schemes: a copy that a test may change."""
    return copy.deepcopy(_FIVE)


@pytest.fixture
def swept() -> Rows:
    """A sweep: a copy that a test may change."""
    return copy.deepcopy(_SWEEP)
