"""Several calls at the same time in one folder, as jobs of a SLURM array: each run is carried out by one of them."""

import io
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from recipe_cases import changed, of_kind
from rich.console import Console

from attention_priors._io import write_json
from attention_priors.lab.output_folder import sole_writer
from attention_priors.lab.results import Results, read_rows
from attention_priors.lab.study import Recipe, compare
from attention_priors.lab.study.workers import LocalWorkers

BOTH: dict[str, Any] = {
    "schemes.BAM + SSMax.training": {},
    "seeds": [3, 4],
    "training.steps": 40,
    "training.checkpoint_steps": 10,
}
"""Schemes that take equally long, with two seeds."""


@pytest.fixture
def begin(tiny: Callable[..., Recipe], tmp_path: Path) -> Any:
    """Start the command in a process; all calls share the folder ``out``."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(changed({"corpus.source": tiny().corpus.source} | BOTH)))
    processes: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from attention_priors.lab.cli import main; main()", "compare", str(recipe)]
        options = ("--output", str(tmp_path / "out"), "--processes", "1", *options)
        processes.append(
            subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def _ended(process: subprocess.Popen[str]) -> str:
    """What a call printed; words may be wrapped."""
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return " ".join(output.split())


def _wait_for(condition: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def _runs(results: Results) -> list[tuple[str, int]]:
    return [*zip(results["run"].scheme, results["run"].seed, strict=True)]


def test_calls_with_different_runs_work_at_the_same_time(begin, tiny, tmp_path, quiet, monkeypatch):
    calls = [begin("--seeds", "3", "--only", "ALiBi"), begin("--seeds", "4", "--only", "ALiBi")]
    for call, seed in zip(calls, (3, 4), strict=True):
        printed = _ended(call)
        assert f"ALiBi, seed {seed}, has ended: 1 of 1 runs" in printed
        assert "other call" not in printed
    found = Results.read(tmp_path / "out")
    assert _runs(found) == [("ALiBi", 3), ("ALiBi", 4)]  # whichever ended last has gathered both
    assert found.study["wall_seconds"] >= found["run"].train_seconds.sum()
    for name in ("report.html", "tables/passkey.md"):
        assert (tmp_path / "out" / name).exists()
    assert len([*(tmp_path / "out" / "cache").glob("tokenizer-*")]) == 1
    assert not [*(tmp_path / "out").rglob("*.tmp")]

    # The same command without a choice of seeds gathers them and carries out nothing.
    monkeypatch.setattr(LocalWorkers, "start", lambda self, run: pytest.fail("a worker was started"))
    assert _runs(compare(tiny(BOTH), tmp_path / "out", only=["ALiBi"], console=quiet)) == [("ALiBi", 3), ("ALiBi", 4)]


def test_a_run_of_another_call_is_left_to_it(begin, tiny, tmp_path):
    call = begin("--only", "ALiBi", "--seeds", "3")
    run = tmp_path / "out" / "runs" / "ALiBi" / "seed-3"
    _wait_for(lambda: (run / "checkpoints" / "checkpoint-10").exists(), call)
    workers = psutil.Process(call.pid).children(recursive=True)
    for worker in workers:
        worker.suspend()
    printed = io.StringIO()
    console = Console(file=printed, width=60)
    results = compare(tiny(BOTH), tmp_path / "out", only=["ALiBi"], seeds=[3], console=console)
    assert not (run / "done.json").exists()
    for worker in workers:
        worker.resume()
    lines = printed.getvalue().splitlines()
    assert "ALiBi, seed 3, is left to another call, which is carrying it out: 1 of 1 runs" in lines
    assert "not finished, as other calls carry them out: ALiBi, seed 3" in lines
    assert lines[-1] == "to gather their results, run the same command once more when they have ended"
    assert _runs(results) == []
    assert "left to another call" not in _ended(call)
    assert (run / "log.txt").read_text() == ""
    gathered = compare(tiny(BOTH), tmp_path / "out", only=["ALiBi"], seeds=[3], console=console)
    assert _runs(gathered) == [("ALiBi", 3)]


def test_calls_with_the_same_runs_share_them_out(begin, tmp_path):
    outputs = [_ended(call) for call in [begin("--seeds", "3"), begin("--seeds", "3")]]
    for name in ("ALiBi", "BAM + SSMax"):
        ended = [f"{name}, seed 3, has ended" in output for output in outputs]
        left = [f"{name}, seed 3, is left to another call" in output for output in outputs]
        before = [f"{name}, seed 3, was finished by another call" in output for output in outputs]
        assert sum(ended) == 1
        assert [a or b or c for a, b, c in zip(ended, left, before, strict=True)] == [True, True]
    assert len(_runs(Results.read(tmp_path / "out"))) == 2


def test_workers_do_not_read_the_recipe_of_another_call(tiny, tmp_path, quiet, monkeypatch):
    start = LocalWorkers.start

    def after_another_call(self: LocalWorkers, run: tuple[str, int]) -> None:
        write_json(tmp_path / "out" / "recipe.json", {"name": "Other"})
        start(self, run)

    monkeypatch.setattr(LocalWorkers, "start", after_another_call)
    recipe = tiny({"training.steps": 1, "evaluation.passkey": ...})
    assert len(compare(recipe, tmp_path / "out", only=["ALiBi"], console=quiet)["run"]) == 1


def test_a_call_waits_for_another_one_that_gathers(finished, tiny, tmp_path, quiet):
    output = Path(shutil.copytree(finished.folder, tmp_path / "out"))
    with sole_writer(output):
        call = threading.Thread(target=compare, args=(tiny(), output), kwargs={"console": quiet})
        call.start()
        call.join(1.0)
        assert call.is_alive()
    call.join(60)
    assert not call.is_alive()
    assert of_kind(read_rows(output), "run") == finished.rows("run")
