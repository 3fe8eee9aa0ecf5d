import json
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attention_priors._io import (
    read_json,
    remove_temporaries,
    replacing,
    with_nulls,
    writable_folder,
    write_bytes,
    write_json,
)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_and_folders_are_created_and_replaced(tmp_path):
    path = tmp_path / "a" / "b" / "file.bin"
    write_bytes(path, b"first\n\0")
    assert path.read_bytes() == b"first\n\0"
    write_bytes(path, b"second")
    assert path.read_bytes() == b"second"
    assert _names(path.parent) == ["file.bin"]


def test_names_may_have_the_maximum_length(tmp_path):
    path = tmp_path / ("n" * 251 + ".png")
    write_bytes(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert _names(tmp_path) == [path.name]


def test_a_failed_move_keeps_only_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.bin"
    write_bytes(path, b"old")

    def fail(source: Path, target: Path) -> None:
        assert Path(source).read_bytes() == b"new"  # complete before the move
        assert Path(source).parent == tmp_path
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert _names(tmp_path) == ["file.bin"]


def test_a_failed_write_keeps_only_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.bin"
    write_bytes(path, b"old")

    def cut_off(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", cut_off)
    with pytest.raises(OSError, match="disk full"):
        write_bytes(path, b"new content")
    assert path.read_bytes() == b"old"
    assert _names(tmp_path) == ["file.bin"]


def test_json_survives_writing_and_reading(tmp_path):
    content = {"θμ": [1, 2.5, None, True, "−0.5 · x"], "nested": {"a": []}, "small": 1e-300}
    write_json(tmp_path / "x.json", content)
    assert read_json(tmp_path / "x.json") == content
    assert json.loads((tmp_path / "x.json").read_bytes()) == content
    assert "θμ" in (tmp_path / "x.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_refused_and_the_old_file_stays(tmp_path, number):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": [number]})
    assert read_json(path) == {"a": 1}
    assert _names(tmp_path) == ["x.json"]


def test_non_finite_numbers_can_become_null():
    content = {"a": [1, math.nan, (2.5, -math.inf)], "b": {"c": math.inf, "d": "nan"}, "e": True}
    assert with_nulls(content) == {"a": [1, None, [2.5, None]], "b": {"c": None, "d": "nan"}, "e": True}


def test_truncated_json_is_named(tmp_path):
    (tmp_path / "cut.json").write_text('{"a": ')
    with pytest.raises(ValueError, match=r"cut\.json is not valid JSON"):
        read_json(tmp_path / "cut.json")


def test_writable_folders_are_created_and_left_empty(tmp_path):
    folder = tmp_path / "a" / "b"
    assert writable_folder(folder) == folder
    assert writable_folder(folder) == folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("below", ["", "sub"])
def test_files_in_place_of_folders_are_named(tmp_path, below):
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    with pytest.raises(OSError, match="cannot write to the output folder") as caught:
        writable_folder(blocked / below)
    assert str(blocked / below) in str(caught.value)
    assert blocked.read_text() == "mine"


def test_unwritable_folders_are_named(tmp_path, monkeypatch):
    # The user of the tests may have every permission, so the refusal is mocked.
    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(OSError, match=f"output folder {tmp_path}: Permission denied"):
        writable_folder(tmp_path)


def test_concurrent_threads_can_write_one_file(tmp_path):
    path = tmp_path / "file.json"
    start = threading.Barrier(8)

    def write(number: int) -> None:
        start.wait()
        for _ in range(30):
            write_json(path, {"by": [number] * 100})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    content = read_json(path)["by"]
    assert content == content[:1] * 100
    assert _names(tmp_path) == ["file.json"]


def test_only_leftovers_of_killed_writers_are_deleted(tmp_path):
    with replacing(tmp_path / "a.bin") as temporary:
        temporary.write_bytes(b"half")
    temporary.write_bytes(b"half")  # as if the writer had been killed
    others = [".hidden.tmp", ".a.bin.12345.tmp", "a.bin", "a.12345.tmp", ".a.bin.12345.other.tmp"]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    remove_temporaries(tmp_path)
    assert _names(tmp_path) == sorted(others)
