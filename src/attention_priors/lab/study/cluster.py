"""Workers of a Dask cluster: each run is a task that starts the run's worker process on one of its machines.

All machines see the comparison's folder. Dask repeats the task of a lost machine on another one, where the run goes on
from its last checkpoint; other runs do not notice.
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
"""Time that a run waits for the lock of a lost machine: file servers free such locks after a minute or two."""
CONNECT_SECONDS = 20
POLL_SECONDS = 0.5
"""Between two looks at whether a task was cancelled, and between two reports of progress."""


class ClusterWorkers(Workers):
    """Workers of a Dask cluster.

    Args:
        scheduler: address, such as ``tcp://login1:8786``.
        output: the comparison's folder, under the same path on all machines.
        threads: of PyTorch, in each run's process.
        at_a_time: number of runs given to Dask at a time; it queues those that its workers have no room for.

    Raises:
        OSError: there is no scheduler at the address.
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
        # The tasks notice it, and end their processes; those of a client that is killed notice its absence.
        self._client.cancel(list(self._tasks.values()), force=True)
        self._client.close()

    def use(self, recipe_file: Path) -> None:
        """Let the runs' processes read this recipe, a file in the comparison's folder.

        Raises:
            OSError: a worker does not see it, or cannot import this package.
        """
        super().use(recipe_file.resolve())
        try:
            seen: Any = self._client.run(_sees, str(self._recipe_file))
        except Exception as error:  # of any kind: it is raised there, and depends on what is missing
            raise OSError(
                f"Dask workers cannot run attention-priors, which must be installed there: {error}"
            ) from error
        blind = sorted(worker for worker, sees in seen.items() if not sees)
        if blind:
            raise OSError(
                f"{len(blind)} of {len(seen)} Dask workers, {blind[0]} among them, do not see {self._output}: expected "
                "an output folder that all machines share under the same path"
            )

    def start(self, run: Run) -> None:
        """Give a run's task to the scheduler."""
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
        words = f"the task of the Dask cluster failed: {why}"
        self.events.put((run, Ended(1, f"{tail_of(log_of(self._output, run))}\n{words}".strip())))

    def _hear(self, message: tuple[float, dict[str, Any]]) -> None:
        told = message[1]
        self.events.put(((told["scheme"], told["seed"]), told["event"]))


def _sees(file: str) -> bool:
    return Path(file).is_file()


def _carry_out(recipe_file: str, output: str, run: Run, threads: int, folder: str, topic: str) -> Ended:
    """Start the process of a run on this machine, and end it if the task is cancelled."""
    worker, name = get_worker(), get_worker().get_current_task()
    said = {"stage": "", "at": 0.0}

    def report(event: dict[str, Any]) -> None:
        # Hundreds of steps a second of each of many runs are more than a scheduler should pass on.
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
