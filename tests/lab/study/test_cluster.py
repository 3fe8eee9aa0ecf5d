"""Runs on the workers of a Dask cluster, here two processes of this machine."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask.config
import psutil
import pytest
from distributed import Client, LocalCluster
from recipe_cases import of_kind
from rich.console import Console

from attention_priors.lab.results import Results, read_rows
from attention_priors.lab.study import RunFailedError, compare
from attention_priors.lab.study import cluster as cluster_module
from attention_priors.lab.study.cluster import ClusterWorkers
from attention_priors.lab.study.compare import _Display
from processes import fork

BOTH: dict[str, Any] = {"schemes.BAM + SSMax.training": {}}
"""Schemes that take equally long."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": None}
    # Copies of this process, which has imported packages that take seconds.
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "fork"}),
        LocalCluster(**options, local_directory=str(tmp_path_factory.mktemp("dask"))) as found,
    ):
        yield found


@pytest.fixture
def stub_worker_there(cluster: Any, stub_worker: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Replace the workers that a Dask worker starts by a script, as ``stub_worker`` does for this process."""
    python = sys.executable

    def use(script: str) -> None:
        stub_worker(script)
        client.run(setattr, sys, "executable", sys.executable)

    with Client(cluster, set_as_default=False) as client:
        yield use
        client.run(setattr, sys, "executable", python)


def _processes(scheme: str) -> list[psutil.Process]:
    """Return the processes that run the scheme."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if "attention_priors.lab.study.worker" in words and scheme in words:
            found.append(process)
    return found


def _wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.deep
def test_a_run_moves_when_its_machine_is_lost(cluster, finished, tiny, tmp_path, quiet, monkeypatch):
    steps: list[tuple[str, int]] = []
    show = _Display._show

    def remember(self: _Display, run: tuple[str, int], event: dict[str, Any]) -> None:
        if event["stage"] == "train":
            steps.append((run[0], event["done"]))
        show(self, run, event)

    monkeypatch.setattr(_Display, "_show", remember)
    output, results = tmp_path / "out", list[Results]()

    def call() -> None:
        results.append(compare(tiny(BOTH), output, scheduler=cluster.scheduler_address, console=quiet))

    caller = threading.Thread(target=call)
    caller.start()
    run = output / "runs" / "ALiBi" / "seed-3"
    _wait_for(lambda: (run / "checkpoints" / "checkpoint-40" / "trainer_state.json").exists())
    _wait_for(lambda: _processes("BAM + SSMax"))
    (lost,), (other,) = _processes("ALiBi"), _processes("BAM + SSMax")
    before = len(steps)
    machine = lost.parent()
    assert machine is not None
    machine.kill()
    _, alive = psutil.wait_procs([lost], timeout=20)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    assert other.is_running()
    caller.join(240)
    assert not caller.is_alive()

    # The run resumed from the checkpoint and has the results of an uninterrupted one.
    assert {scheme for scheme, _ in steps} == {"ALiBi", "BAM + SSMax"}
    assert not [done for scheme, done in steps[before + 1 :] if scheme == "ALiBi" and 0 < done < 40]
    trained, whole = (
        json.loads((folder / "training.json").read_text())
        for folder in (run, finished.folder / "runs" / "ALiBi" / "seed-3")
    )
    assert trained["history"] == whole["history"]
    found = of_kind(read_rows(output), "retrieval", scheme="ALiBi")
    assert found == finished.rows("retrieval", scheme="ALiBi")
    assert {*results[0]["run"].scheme} == {"ALiBi", "BAM + SSMax"}
    assert [path.read_text() for path in output.rglob("log.txt")] == ["", ""]


def test_runs_end_with_a_killed_call(cluster, tiny, tmp_path, stub_worker_there):
    stub_worker_there("while read line; do :; done")  # ends with its standard input, as a worker does

    def call() -> None:
        compare(tiny(), tmp_path / "out", only=["ALiBi"], scheduler=cluster.scheduler_address, console=Console())

    process = fork(call, tmp_path / "printed")
    try:
        _wait_for(lambda: not process.is_alive() or _processes("ALiBi"))
        assert process.is_alive(), (tmp_path / "printed").read_text()
    finally:
        process.kill()
        process.join()
    _wait_for(lambda: not _processes("ALiBi"))


def test_a_run_that_fails_is_named(cluster, tiny, tmp_path, quiet, stub_worker_there):
    stub_worker_there("echo \"KeyError: 'RoPE'\" >&2; exit 3")
    with pytest.raises(
        RunFailedError, match=r"ALiBi, seed 3, ended with exit code 3; the end of .*:\nKeyError: 'RoPE'"
    ):
        compare(tiny(), tmp_path / "out", only=["ALiBi"], scheduler=cluster.scheduler_address, console=quiet)


def test_workers_must_see_the_output_folder(cluster, tmp_path):
    with (
        ClusterWorkers(cluster.scheduler_address, tmp_path, threads=1, at_a_time=1) as workers,
        pytest.raises(OSError, match=r"2 of 2 Dask workers, tcp://.* among them, do not see .*: expected an output"),
    ):
        workers.use(tmp_path / "nowhere")


def test_missing_schedulers_are_refused_before_any_work(tiny, tmp_path, quiet, monkeypatch):
    monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 1)
    recipe = tiny({"corpus.source": str(tmp_path / "nowhere")})  # would be the next error
    with pytest.raises(
        OSError, match=r"scheduler 'tcp://127\.0\.0\.1:9' cannot be reached: .* 'dask scheduler' prints"
    ):
        compare(recipe, tmp_path / "out", scheduler="tcp://127.0.0.1:9", console=quiet)


def test_without_dask_the_error_names_the_extra(tiny, tmp_path, quiet, monkeypatch):
    monkeypatch.delitem(sys.modules, "attention_priors.lab.study.cluster")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(
        ValueError, match=r"scheduler='tcp://x:1' needs Dask.*pip install 'attention-priors\[cluster\]'"
    ):
        compare(tiny(), tmp_path / "out", scheduler="tcp://x:1", console=quiet)


def test_the_recipe_limits_concurrent_runs(cluster, tiny, tmp_path, quiet, monkeypatch):
    found: list[int] = []
    monkeypatch.setattr(ClusterWorkers, "use", lambda self, file: (found.append(self.at_a_time), 1 / 0))
    for changes in ({}, {"processes": 1}):
        with pytest.raises(ZeroDivisionError):
            compare(tiny(changes), tmp_path / "out", scheduler=cluster.scheduler_address, console=quiet)
    assert found == [2, 1]
