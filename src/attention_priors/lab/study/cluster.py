"""Runs on a Dask cluster: each run is a task that starts the run's worker process on a machine of the cluster.

All machines share the comparison's folder. If a machine is lost, Dask repeats its task on another machine, where the
run resumes from its last checkpoint. Other runs are not affected.
"""

from __future__ import annotations

import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunningError
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client, Future, get_worker

from attention_priors.lab.study.workers import STARTING, Ended, Run, Workers, follow, log_of, start_worker, tail_of

LOST_SECONDS = 150.0
"""Seconds that a run waits for the lock of a lost machine; file servers release such locks after one or two minutes."""
CONNECT_SECONDS = 20
POLL_SECONDS = 0.5
"""Seconds between checks for cancellation, and between progress reports."""


class ClusterWorkers(Workers):
    """Workers of a Dask cluster.

    Args:
        scheduler: address, such as ``tcp://login1:8786``.
        output: folder of the comparison. All machines need it under the same path.
        threads: PyTorch threads per run.
        at_a_time: Number of runs submitted to Dask at a time. Dask queues runs that exceed its workers.

    Raises:
        OSError: no scheduler answers at the address.
    """

    def __init__(self, scheduler: str, output: Path, *, threads: int, at_a_time: int) -> None:
        super().__init__(output.resolve(), threads=threads, at_a_time=at_a_time)
        self._tasks: dict[Run, Future] = {}
        self._topic = f"attention-priors-{secrets.token_hex(8)}"
        try:
            self._client = Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            raise OSError(
                f"scheduler {scheduler!r} cannot be reached: {error}; expected the address that 'dask scheduler' "
                "prints, such as tcp://login1:8786"
            ) from error

    def __enter__(self) -> ClusterWorkers:
        self._client.subscribe_topic(self._topic, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        # Cancelled tasks end their processes. Tasks of a killed client notice that the client is gone.
        self._client.cancel(list(self._tasks.values()), force=True)
        self._client.close()

    def use(self, recipe_file: Path) -> None:
        """Set the recipe of all runs, a file in the comparison's folder.

        Raises:
            OSError: a worker does not see the file, or cannot import this package.
        """
        super().use(recipe_file.resolve())
        try:
            seen: Any = self._client.run(_sees, str(self._recipe_file))
        except Exception as error:  # the type depends on what the worker lacks
            raise OSError(f"Dask workers cannot run attention-priors; install it on all machines: {error}") from error
        blind = sorted(worker for worker, sees in seen.items() if not sees)
        if blind:
            raise OSError(
                f"{len(blind)} of {len(seen)} Dask workers, {blind[0]} among them, do not see {self._output}: expected "
                "an output folder that all machines share under the same path"
            )

    def start(self, run: Run) -> None:
        """Submit a run's task to the scheduler."""
        task = self._client.submit(
            _carry_out,
            str(self._recipe_file),
            str(self._output),
            run,
            self._threads,
            os.getcwd(),
            self._topic,
            key=f"{run[0]}-seed-{run[1]}-{self._topic}",
            pure=False,
        )
        self._tasks[run] = task
        task.add_done_callback(partial(self._end, run))

    def _end(self, run: Run, task: Future) -> None:
        if task.status == "finished":
            self.events.put((run, task.result()))
            return
        why = task.exception() if task.status == "error" else "the scheduler is gone"
        words = f"Dask task failed: {why}"
        self.events.put((run, Ended(1, f"{tail_of(log_of(self._output, run))}\n{words}".strip())))

    def _hear(self, message: tuple[float, dict[str, Any]]) -> None:
        told = message[1]
        self.events.put(((told["scheme"], told["seed"]), told["event"]))


def _sees(file: str) -> bool:
    return Path(file).is_file()


def _carry_out(recipe_file: str, output: str, run: Run, threads: int, folder: str, topic: str) -> Ended:
    """Start the process of a run on this machine, and terminate it if the task is cancelled."""
    worker, name = get_worker(), get_worker().get_current_task()
    said = {"stage": "", "at": 0.0}

    def report(event: dict[str, Any]) -> None:
        # Limit the rate: many runs, with hundreds of steps per second each, would overload the scheduler.
        if event["stage"] == said["stage"] and time.monotonic() - said["at"] < POLL_SECONDS:
            return
        said.update(stage=event["stage"], at=time.monotonic())
        worker.log_event(topic, {"scheme": run[0], "seed": run[1], "event": event})

    report({"stage": STARTING, "done": 0, "total": 1})
    process = start_worker(Path(recipe_file), Path(output), run, threads=threads, folder=folder, wait=LOST_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(follow, process, log_of(Path(output), run), report)
        while True:
            try:
                return ending.result(timeout=POLL_SECONDS)
            except StillRunningError:
                task = worker.state.tasks.get(name)
                if task is None or task.state == "cancelled":
                    process.terminate()
