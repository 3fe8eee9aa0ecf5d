"""How thorough a test run is.

``make test`` leaves out tests marked ``deep``, and ``make check`` those marked ``slow`` too. With ``TEST_DEPTH=deep``
(``make test-deep``) all are run.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

DEEP = os.environ.get("TEST_DEPTH") == "deep"


def examples(quick: int) -> int:
    """Return the number of examples that hypothesis draws: ``quick``, or ten times as many in a deep run."""
    return 10 * quick if DEEP else quick


def every_other_deep(cases: Iterable[Any], quick: Sequence[Any]) -> list[Any]:
    """Return parameters of a test: those in ``quick`` always run, the others in a deep run alone."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.deep) for case in cases]


def every_other_slow(cases: Iterable[Any], quick: Sequence[Any]) -> list[Any]:
    """Return parameters of a test: those in ``quick`` always run, the others not in ``make check``."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
