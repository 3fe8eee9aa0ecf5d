"""Worker processes on this machine, one for each run."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention_priors.lab.study.runs import run_folder

Run = tuple[str, int]
"""Scheme and seed."""

TAKEN = 75
"""Exit code of a worker whose run is being executed by another call; EX_TEMPFAIL of sysexits.h."""
FINISHED = 76
"""Exit code of a worker whose run is already finished."""
STARTING = "starting"
"""Stage of a run whose worker has not reported progress yet."""
LOG_LINES = 15
"""Number of last log lines in an error message."""


@dataclass(frozen=True)
class Ended:
    """End of a run's worker."""

    code: int
    """Exit code."""
    log: str
    """Last lines of the run's log."""


Event = dict[str, Any] | Ended
"""Progress of a run, ``{"stage": ..., "done": ..., "total": ...}``, or the end of its worker."""
Events = queue.Queue[tuple[Run, Event]]


class Workers(ABC):
    """Executor of runs. Leaving its context ends all runs.

    Args:
        output: folder of the comparison.
        threads: PyTorch threads per run.
        at_a_time: number of simultaneous runs.

    Attributes:
        events: Progress and end of every started run.
    """

    def __init__(self, output: Path, *, threads: int, at_a_time: int) -> None:
        self._output, self._threads, self.at_a_time = output, threads, at_a_time
        self._recipe_file = Path()
        self.events: Events = queue.Queue()

    def use(self, recipe_file: Path) -> None:
        """Set the recipe of all runs, a file in the comparison's folder, before starting a run.

        Raises:
            OSError: the workers cannot read the file.
        """
        self._recipe_file = recipe_file

    @abstractmethod
    def start(self, run: Run) -> None:
        """Start the worker of a run."""

    def __enter__(self) -> Workers:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...


class LocalWorkers(Workers):
    """Worker processes on this machine."""

    def __init__(self, output: Path, *, threads: int, at_a_time: int) -> None:
        super().__init__(output, threads=threads, at_a_time=at_a_time)
        self._running: dict[Run, tuple[subprocess.Popen[str], str | None]] = {}

    def __exit__(self, *error: object) -> None:
        running = [process for process, _ in self._running.values()]
        for process in running:
            process.terminate()
        for process in running:
            process.wait()

    def start(self, run: Run) -> None:
        """Start the worker of a run on the CUDA device with the fewest runs."""
        self._running = {other: one for other, one in self._running.items() if one[0].poll() is None}
        device = least_taken(cuda_devices(), [taken for _, taken in self._running.values()])
        process = start_worker(self._recipe_file, self._output, run, threads=self._threads, device=device)
        self._running[run] = process, device
        self.events.put((run, {"stage": STARTING, "done": 0, "total": 1}))

        def listen() -> None:
            ended = follow(process, log_of(self._output, run), lambda event: self.events.put((run, event)))
            self.events.put((run, ended))

        threading.Thread(target=listen, daemon=True).start()


def start_worker(
    recipe_file: Path,
    output: Path,
    run: Run,
    *,
    threads: int,
    device: str | None = None,
    folder: str | None = None,
    wait: float = 0.0,
) -> subprocess.Popen[str]:
    """Start the process of one run (:mod:`attention_priors.lab.study.worker`).

    Args:
        recipe_file: recipe of the run.
        output: folder of the comparison.
        run: Scheme and seed.
        threads: number of PyTorch threads.
        device: The only CUDA device visible to the process. None for all devices.
        folder: Working directory, to which relative paths of the recipe refer. None for the current directory.
        wait: seconds to wait for another process that executes the run.
    """
    scheme, seed = run
    worker = (sys.executable, "-m", "attention_priors.lab.study.worker")
    with log_of(output, run).open("a", encoding="utf-8") as stderr:
        return subprocess.Popen(
            [*worker, str(recipe_file), str(output), scheme, str(seed), str(wait)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=folder,
            # Only the parent receives Ctrl-C; it then terminates its workers.
            start_new_session=True,
            env=os.environ
            | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
            | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device}),
        )


def follow(process: subprocess.Popen[str], log: Path, report: Callable[[dict[str, Any]], None]) -> Ended:
    """Report the progress of a worker until it ends.

    Args:
        process: process from :func:`start_worker`.
        log: log of the run.
        report: callback for every progress line of the worker.
    """
    assert process.stdout is not None
    assert process.stdin is not None
    for line in process.stdout:
        try:
            report(json.loads(line))
        except json.JSONDecodeError:
            # Other output belongs to the log.
            with log.open("a", encoding="utf-8") as file:
                file.write(line)
    code = process.wait()
    process.stdin.close()
    return Ended(code, tail_of(log))


def log_of(output: Path, run: Run) -> Path:
    """Return the path of a run's log."""
    return run_folder(output, *run) / "log.txt"


def tail_of(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8").splitlines()[-LOG_LINES:])


def cuda_devices() -> list[str]:
    """Return the CUDA devices visible to this process, named as in ``CUDA_VISIBLE_DEVICES``."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def least_taken(devices: Sequence[str], taken: Sequence[str | None]) -> str | None:
    """Return the device with the fewest runs, or None if there are fewer than two devices."""
    return min(devices, key=lambda device: taken.count(device)) if len(devices) > 1 else None


def usable_cores() -> int:
    """Return the number of cores available to this process, which a scheduler may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
