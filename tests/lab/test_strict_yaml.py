"""Comparison of configs with the configs in a folder."""

from pathlib import Path
from typing import Any

import pytest

from attention_priors.lab.strict_yaml import differences, read_yaml


def test_numbers_may_have_an_exponent(tmp_path: Path):
    (tmp_path / "numbers.yaml").write_text('a: [1e-3, 1.e-3, .5E+2, -2e1, 1.0e-3, +1e3]\nb: ["1e-3", 1e, e3, 1e-3x, 1]')
    assert read_yaml(tmp_path / "numbers.yaml") == {
        "a": [0.001, 0.001, 50.0, -20.0, 0.001, 1000.0],
        "b": ["1e-3", "1e", "e3", "1e-3x", 1],
    }


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"a": None}, {}),
        ({"a": {"b": None, "c": {"d": None}}}, {}),
        ({}, {"a": {"b": None}}),
        ({"a": {}}, {"a": None}),
    ],
)
def test_unset_keys_equal_missing_keys(there: Any, here: Any):
    assert not differences(there, here)


def test_every_different_key_is_named():
    there = {"a": {"b": None, "c": 1}, "same": [1], "gone": {"d": 0}}
    here = {"a": {"b": 2, "c": 1}, "same": [1], "new": False}
    assert differences(there, here) == [
        "a.b (there None, here 2)",
        "gone (there {'d': 0}, here None)",
        "new (there None, here False)",
    ]
