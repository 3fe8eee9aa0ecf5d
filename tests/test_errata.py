"""The errata name tests that there are."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "errata.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not a checkout of the project")


def test_every_test_that_is_named_exists():
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 10
    for path, function in named:
        source = (TESTS / path).read_text(encoding="utf-8")
        assert f"def {function}(" in source if function else "def test" in source, (path, function)
