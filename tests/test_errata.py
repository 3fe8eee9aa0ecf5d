"""The errata name existing tests."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "errata.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not a checkout of the project")


def test_named_tests_exist():
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 10
    for path, function in named:
        source = (TESTS / path).read_text(encoding="utf-8")
        assert f"def {function}(" in source if function else "def test" in source, (path, function)
