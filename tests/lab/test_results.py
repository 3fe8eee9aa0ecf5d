"""Rows of results: written, read and refused."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from attention_priors.lab.results import FIELDS, FILE, FORMAT, Results, read_rows, recipe_sha256, write_rows
from written_pages import ROOT

STUDY: dict[str, Any] = {"row": "study", "format": FORMAT, "recipe": {"training": {"context_length": 64}}}
SCHEMES = [{"row": "scheme", "scheme": name} for name in ("b", "a")]


def test_rows_survive_writing_and_give_equal_bytes(tmp_path: Path):
    rows = [STUDY, *SCHEMES, {"row": "logit_scale", "scheme": "a", "seed": 0, "layer": 0, "head": 1, "s": 0.1 + 0.2}]
    first, second = (write_rows(tmp_path / name, rows).read_bytes() for name in ("one", "two"))
    assert first == second
    assert read_rows(tmp_path / "one") == rows
    assert gzip.decompress(first).decode().count("\n") == len(rows)
    results = Results.read(tmp_path / "one")
    assert results["logit_scale"].s.tolist() == [0.1 + 0.2]
    with pytest.raises(ValueError, match="JSON"):
        write_rows(tmp_path / "one", [STUDY | {"wall_seconds": float("nan")}])
    assert (tmp_path / "one" / FILE).read_bytes() == first


def test_curves_are_written_to_a_thousandth_of_a_nat(tmp_path: Path):
    curve = {"row": "prior_term", "scheme": "a", "seed": 0, "places": [0, 1], "log_prior": [1 / 3, None], "ahead": None}
    write_rows(tmp_path, [STUDY, *SCHEMES, curve, curve | {"log_prior": [[-2e6 / 3], [1]], "scale": [1 / 3]}])
    one, nested = read_rows(tmp_path)[-2:]
    assert one == curve | {"log_prior": [0.333, None]}
    assert (nested["log_prior"], nested["scale"]) == ([[-666666.667], [1]], [0.333333])
    assert curve["log_prior"] == [1 / 3, None]


def test_every_field_is_described():
    page = (ROOT / "docs/result-rows.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## `compare`: .*?\n(.*?)\n## ", page, re.DOTALL)
    described: dict[str, set[str]] = {}
    kind = ""
    for row, fields in re.findall(r"^\| (?:`(\w+)`)? ?\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE):
        kind = row or kind
        described.setdefault(kind, set()).update(re.findall(r"\w+", fields))
    assert described == {kind: set(fields.split()) for kind, fields in FIELDS.items()}


def test_frames_are_in_display_order_with_missing_values():
    runs = [{"row": "run", "scheme": name, "seed": 0, "stopped": None, "train_seconds": None} for name in ("a", "b")]
    results = Results.of([STUDY, *SCHEMES, *runs])
    assert results.names == ["b", "a"]
    assert [name for name, _ in results["run"].groupby("scheme", observed=True)] == ["b", "a"]
    assert results["run"].train_seconds.mean(skipna=False) != results["run"].train_seconds.mean(skipna=False)  # nan
    assert results["run"].stopped.isna().all()
    for kind, fields in FIELDS.items():
        assert list(results[kind]) == ["scheme", "seed", *fields.split()]
        assert len(results[kind]) == (2 if kind == "run" else 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([STUDY | {"format": 1}], "format must be 2, the only one that this version reads; got 1"),
        ([SCHEMES[0]], "format must be 2"),
        ([STUDY, SCHEMES[0], {"row": "run", "scheme": "c"}], "scheme of a run row must be one of b; got 'c'"),
        ([STUDY, SCHEMES[0], {"row": "passkey", "scheme": "b"}], "row must be one of scheme, run, .*; got 'passkey'"),
    ],
)
def test_invalid_rows_are_refused(rows: list[dict[str, Any]], message: str):
    with pytest.raises(ValueError, match=message):
        Results.of(rows)


def test_schemes_know_their_training_length():
    schemes = [SCHEMES[0] | {"context_length": 128}, SCHEMES[1]]
    results = Results.of([STUDY, *schemes])
    assert [results.context_length(name) for name in results.names] == [128, 64]
    assert results.context_lengths == [64, 128]
    pretrained = Results.of([STUDY, *(scheme | {"pretrained_length": 100} for scheme in schemes)])
    assert pretrained.context_lengths == [100, 128]
    assert [pretrained.row_length(name) for name in pretrained.names] == [128, 64]
    assert Results.of([STUDY | {"recipe": {}, "images": {}}, *SCHEMES]).context_lengths == []
    for length in (None, 0, "160"):
        broken = Results.of([STUDY | {"recipe": {"training": {"context_length": length}}}, *SCHEMES])
        with pytest.raises(ValueError, match=r"context_length of 'b' must be a positive integer \(tokens\), got"):
            broken.context_length("b")


def test_recipe_hashes_do_not_depend_on_the_order_of_keys():
    assert recipe_sha256({"a": 1, "b": {"c": "λ", "d": 2}}) == recipe_sha256({"b": {"d": 2, "c": "λ"}, "a": 1})
    assert recipe_sha256({"a": 1}) != recipe_sha256({"a": 2})
    assert json.dumps(recipe_sha256({})) == '"44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"'
