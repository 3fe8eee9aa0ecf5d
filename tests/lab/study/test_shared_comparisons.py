"""Concurrent calls in one folder, as jobs of a SLURM array. Each run is executed by one of them."""

import io
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import changed, of_kind
from rich.console import Console

from attention_priors._io import read_json, write_json
from attention_priors.lab.cli import app
from attention_priors.lab.output_folder import sole_writer
from attention_priors.lab.results import Results, read_rows
from attention_priors.lab.study import Recipe, compare
from attention_priors.lab.study.workers import FINISHED, TAKEN, LocalWorkers
from processes import fork, join

ONE_SCHEME: dict[str, Any] = {
    "schemes.BAM + SSMax": ...,
    "seeds": [3, 4],
    "training.steps": 5,
    "training.checkpoint_steps": ...,
    "evaluation.passkey.lengths": [150],
}

STUB = """#!{python}
import shutil, sys, time
from pathlib import Path
from select import select
from filelock import FileLock, Timeout

output, scheme, seed, wait = Path(sys.argv[4]), *sys.argv[5:]
run = output / "runs" / scheme.replace(" ", "_") / f"seed-{{seed}}"
try:
    with FileLock(run / ".lock", timeout=float(wait)):
        if (run / "done.json").exists():
            sys.exit({FINISHED})
        (output / "begun").touch()
        while not (output / "both").exists():
            if select([sys.stdin], [], [], 0.005)[0]:
                sys.exit("the call has ended")
        time.sleep(0.2)
        finished = Path({finished!r}, *run.parts[-3:])
        shutil.copytree(finished, run, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".lock", "done.json"))
        shutil.copy(finished / "done.json", run)
except Timeout:
    sys.exit({TAKEN})
"""
"""Let a worker copy a finished run once a file shows that both calls are at work."""


@pytest.fixture
def copying(finished: Any, stub_worker: Callable[[str], None]) -> None:
    """Let workers copy the runs that they should execute."""
    stub_worker(STUB.format(python=sys.executable, finished=str(finished.folder), TAKEN=TAKEN, FINISHED=FINISHED))


@pytest.fixture
def begin(tiny: Callable[..., Recipe], tmp_path: Path) -> Iterator[Callable[..., tuple[BaseProcess, Path]]]:
    """Start a call in a copy of this process. Return the process, and the file with its output."""
    calls: list[BaseProcess] = []

    def start(*only: str) -> tuple[BaseProcess, Path]:
        printed = tmp_path / f"printed-{len(calls)}"

        def call() -> None:
            compare(tiny(), tmp_path / "out", only=only, processes=1, console=Console(width=200))

        calls.append(fork(call, printed))
        return calls[-1], printed

    yield start
    for call in calls:
        call.kill()
        call.join()


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _runs(results: Results) -> list[tuple[str, int]]:
    return [*zip(results["run"].scheme, results["run"].seed, strict=True)]


@pytest.mark.deep
def test_calls_with_different_runs_work_concurrently(tiny, tmp_path, quiet, monkeypatch):
    """Uses real workers."""
    recipe, output = tmp_path / "tiny.yaml", tmp_path / "out"
    recipe.write_text(json.dumps(changed({"corpus.source": tiny().corpus.source} | ONE_SCHEME)))
    files = {seed: tmp_path / f"printed-{seed}" for seed in (3, 4)}
    words = ["compare", str(recipe), "--output", str(output), "--seeds"]
    calls = [fork(partial(app, [*words, str(seed)]), file) for seed, file in files.items()]
    for call, (seed, file) in zip(calls, files.items(), strict=True):
        printed = " ".join(join(call, file).split())  # words may be wrapped
        assert f"ALiBi, seed {seed}, has ended: 1 of 1 runs" in printed
        assert "other call" not in printed
    found = Results.read(output)
    assert _runs(found) == [("ALiBi", 3), ("ALiBi", 4)]  # the last call to end has collected both
    assert found.study["wall_seconds"] >= found["run"].train_seconds.sum()
    for name in ("report.html", "tables/passkey.md"):
        assert (output / name).exists()
    assert len([*(output / "cache").glob("tokenizer-*")]) == 1
    assert not [*output.rglob("*.tmp")]
    assert [path.read_text() for path in output.rglob("log.txt")] == ["", ""]

    # Without a choice of seeds, the same command collects both and runs nothing.
    monkeypatch.setattr(LocalWorkers, "start", lambda self, run: pytest.fail("a worker was started"))
    assert _runs(compare(tiny(ONE_SCHEME), output, console=quiet)) == [("ALiBi", 3), ("ALiBi", 4)]


def test_runs_of_another_call_are_not_executed(begin, copying, tiny, tmp_path):
    output = tmp_path / "out"
    call = begin("ALiBi")
    _wait_for(output / "begun")
    printed = io.StringIO()
    console = Console(file=printed, width=60)
    results = compare(tiny(), output, only=["ALiBi"], console=console)
    assert not [*output.rglob("done.json")]
    lines = printed.getvalue().splitlines()
    assert "ALiBi, seed 3, is running in another call: 1 of 1 runs" in lines
    assert "not finished yet, still running in other calls: ALiBi, seed 3" in lines
    assert lines[-1] == "to collect their results, run the same command again once they have ended"
    assert _runs(results) == []
    (output / "both").touch()
    assert "running in another call" not in join(*call)
    gathered = compare(tiny(), output, only=["ALiBi"], console=console)
    assert _runs(gathered) == [("ALiBi", 3)]


def test_calls_with_equal_runs_share_them(begin, copying, tmp_path):
    output = tmp_path / "out"
    calls = [begin(), begin()]
    _wait_for(output / "begun")
    (output / "both").touch()
    printed = [join(*call) for call in calls]
    for name in ("ALiBi", "BAM + SSMax"):
        ended = [f"{name}, seed 3, has ended" in words for words in printed]
        left = [f"{name}, seed 3, is running in another call" in words for words in printed]
        before = [f"{name}, seed 3, was finished by another call" in words for words in printed]
        assert sum(ended) == 1
        assert [a or b or c for a, b, c in zip(ended, left, before, strict=True)] == [True, True]
    assert len(_runs(Results.read(output))) == 2


def test_workers_do_not_read_the_recipe_of_another_call(tiny, tmp_path, quiet, monkeypatch, stub_worker):
    start = LocalWorkers.start

    def after_another_call(self: LocalWorkers, run: tuple[str, int]) -> None:
        write_json(tmp_path / "out" / "recipe.json", {"name": "Other"})
        start(self, run)

    monkeypatch.setattr(LocalWorkers, "start", after_another_call)
    stub_worker(f'cp "$3" {tmp_path / "read.json"}')
    compare(tiny(), tmp_path / "out", only=["ALiBi"], console=quiet)
    assert read_json(tmp_path / "read.json") == tiny().model_dump(mode="json")


def test_calls_wait_for_a_call_that_collects(finished, tiny, tmp_path, quiet):
    output = Path(shutil.copytree(finished.folder, tmp_path / "out"))
    with sole_writer(output):
        call = threading.Thread(target=compare, args=(tiny(), output), kwargs={"console": quiet})
        call.start()
        call.join(1.0)
        assert call.is_alive()
    call.join(60)
    assert not call.is_alive()
    assert of_kind(read_rows(output), "run") == finished.rows("run")
