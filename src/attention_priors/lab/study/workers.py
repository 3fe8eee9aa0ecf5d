"""Worker processes on this machine: each carries out one run."""

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
"""Exit code of a worker that found its run in the hands of another call; EX_TEMPFAIL of sysexits.h."""
FINISHED = 76
"""Exit code of a worker that found its run finished."""
STARTING = "starting"
"""Stage of a run whose worker has not reported any progress."""
LOG_LINES = 15
"""Last lines of a log that an error shows."""


@dataclass(frozen=True)
class Ended:
    """The end of a run's worker."""

    code: int
    """Exit code."""
    log: str
    """Last lines of the run's log."""


Event = dict[str, Any] | Ended
"""Progress of a run, ``{"stage": ..., "done": ..., "total": ...}``, or its end."""
Events = queue.Queue[tuple[Run, Event]]


class Workers(ABC):
    """Where runs are carried out. A context that ends all of them when it ends.

    Args:
        output: the comparison's folder.
        threads: of PyTorch, in each run's process.
        at_a_time: number of runs to start before the first has ended.

    Attributes:
        events: Progress and end of every run that was started.
    """

    def __init__(self, output: Path, *, threads: int, at_a_time: int) -> None:
        self._output, self._threads, self.at_a_time = output, threads, at_a_time
        self._recipe_file = Path()
        self.events: Events = queue.Queue()

    def use(self, recipe_file: Path) -> None:
        """Let the workers read this recipe, a file in the comparison's folder; to be called before any is started.

        Raises:
            OSError: they cannot read it.
        """
        self._recipe_file = recipe_file

    @abstractmethod
    def start(self, run: Run) -> None:
        """Start a run's worker."""

    def __enter__(self) -> Workers:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...


class LocalWorkers(Workers):
    """Processes of this machine."""

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
        """Start a run's worker on the CUDA device with the fewest runs."""
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
        recipe_file: recipe that the worker reads.
        output: the comparison's folder.
        run: scheme and seed.
        threads: of PyTorch.
        device: the one CUDA device that the process sees; None for all.
        folder: that the process runs in, and that relative paths of the recipe start from; None for this process's.
        wait: seconds to wait for another process that carries out the run.
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
            # The parent alone hears Ctrl-C; it then ends its workers in order.
            start_new_session=True,
            env=os.environ
            | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
            | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device}),
        )


def follow(process: subprocess.Popen[str], log: Path, report: Callable[[dict[str, Any]], None]) -> Ended:
    """Report the progress of a worker until it ends.

    Args:
        process: of :func:`start_worker`.
        log: the run's log.
        report: called with every line that the worker writes.
    """
    assert process.stdout is not None
    assert process.stdin is not None
    for line in process.stdout:
        try:
            report(json.loads(line))
        except json.JSONDecodeError:
            # Something printed past the protocol; it belongs to the log.
            with log.open("a", encoding="utf-8") as file:
                file.write(line)
    code = process.wait()
    process.stdin.close()
    return Ended(code, tail_of(log))


def log_of(output: Path, run: Run) -> Path:
    """Return the log of a run's worker."""
    return run_folder(output, *run) / "log.txt"


def tail_of(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8").splitlines()[-LOG_LINES:])


def cuda_devices() -> list[str]:
    """Return the CUDA devices that this process sees, as ``CUDA_VISIBLE_DEVICES`` names them."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def least_taken(devices: Sequence[str], taken: Sequence[str | None]) -> str | None:
    """Return the device with the fewest runs; None if there are not several, and so no choice."""
    return min(devices, key=lambda device: taken.count(device)) if len(devices) > 1 else None


def usable_cores() -> int:
    """Return the number of cores that this process may run on: a scheduler may allot fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
