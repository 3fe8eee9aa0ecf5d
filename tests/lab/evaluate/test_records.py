import json
from pathlib import Path

import pytest

from attention_priors.lab.evaluate.records import Records

FIRST = {"task": "passkey", "seed": 0, "model": "é"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def _fill(path: Path) -> bytes:
    records = Records(path)
    run = records.begin(FIRST)
    for depth in range(3):
        records.append({"run": run, "length": 64, "depth": depth / 2, "output": "…\n"})
    return path.read_bytes()


def test_records_survive_writing_and_reading(path: Path):
    content = _fill(path)
    assert content.endswith(b"\n")
    lines = [json.loads(line) for line in content.splitlines()]
    records = Records(path)
    assert list(records) == lines
    assert lines[0] == {"run": lines[0]["run"], "identity": FIRST}
    run = lines[0]["run"]
    assert records.of(run) == lines[1:]
    assert records.of(run, depth=0.5, length=64) == [lines[2]]
    assert records.of(run, depth=0.5, length=32) == []
    assert records.of(run, missing=None) == []
    assert path.read_bytes() == content


def test_run_identities_include_all_inputs(path: Path):
    records = Records(path)
    run = records.begin(FIRST)
    assert records.begin(dict(reversed(FIRST.items()))) == run
    assert Records(path).begin(FIRST) == run
    others = {records.begin(FIRST | change) for change in ({"seed": 1}, {"model": "e"}, {"depths": None})}
    assert len(others | {run}) == 4
    assert len(path.read_bytes().splitlines()) == 4


def test_ids_of_other_runs_are_refused(path: Path):
    run = Records(path).begin(FIRST)
    path.write_text(json.dumps({"run": run, "identity": {"task": "other"}}) + "\n")
    with pytest.raises(ValueError, match=rf"run {run} has the identity"):
        Records(path).begin(FIRST)


def test_a_truncated_last_line_is_removed(path: Path):
    content = _fill(path)
    starts = [0, *(place + 1 for place, byte in enumerate(content) if byte == ord("\n"))]
    for size in range(len(content)):
        path.write_bytes(content[:size])
        kept = max(start for start in starts if start <= size)
        assert len(list(Records(path))) == starts.index(kept)
        assert path.read_bytes() == content[:kept]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"notes of mine", "line 1, is not a complete or cut-off line of an evaluation"),
        (b"notes of mine\n", "line 1, is not JSON"),
        (b'{"run": "a"}\n\xff\xfe\n', "line 2, is not JSON"),
        (b'{"run": "a"}\n\n', "line 2, is not JSON"),
        (b'{"run": "a"}\n{"loss": 1}\n', "line 2, is not a line of an evaluation: it has no 'run'"),
        (b"[1]\n", "line 1, is not a line of an evaluation"),
        (b'{"run": 3}\n', "line 1, is not a line of an evaluation"),
    ],
)
def test_foreign_files_are_named_and_unchanged(path: Path, content: bytes, complaint: str):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as raised:
        Records(path)
    assert str(path) in str(raised.value)
    assert path.read_bytes() == content


def test_non_finite_numbers_are_null(path: Path):
    record = Records(path).append({"run": "a", "losses": [[1, 1, float("nan")], [2, 3, 1.5]]})
    assert record == {"run": "a", "losses": [[1, 1, None], [2, 3, 1.5]]}
    assert list(Records(path)) == [record]
