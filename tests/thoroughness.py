"""Number of examples and cases of a test run.

``make test`` skips tests marked ``deep``, and ``make check`` also tests marked ``slow``. ``TEST_DEPTH=deep`` (``make
test-deep``) runs all tests.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

DEEP = os.environ.get("TEST_DEPTH") == "deep"


def examples(quick: int) -> int:
    """Return the number of random examples: ``quick``, or ten times as many in a deep run."""
    return 10 * quick if DEEP else quick


def every_other_deep(cases: Iterable[Any], quick: Sequence[Any]) -> list[Any]:
    """Return parameters of a test. Those in ``quick`` always run, and the others only in a deep run."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.deep) for case in cases]


def each_once(many: Iterable[Any], few: Sequence[Any]) -> list[Any]:
    """Return pairs as parameters of a test. Each case of ``many`` always runs with one of ``few``, in turn, and with
    the others only in a deep run.
    """
    return [
        pytest.param(one, other, marks=[] if place % len(few) == turn else [pytest.mark.deep])
        for place, one in enumerate(many)
        for turn, other in enumerate(few)
    ]


def every_other_slow(cases: Iterable[Any], quick: Sequence[Any]) -> list[Any]:
    """Return parameters of a test. Those in ``quick`` always run, and the others not in ``make check``."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
