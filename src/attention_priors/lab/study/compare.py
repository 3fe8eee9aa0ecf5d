"""A comparison: every scheme of a recipe with every seed, several runs at a time, interruptible."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from attention_priors._io import writable_folder, write_json
from attention_priors.lab.output_folder import sole_writer
from attention_priors.lab.strict_yaml import RecipeError, check_same_recipe
from attention_priors.lab.study.folders import run_folder
from attention_priors.lab.study.images import ImageRecipe
from attention_priors.lab.study.recipe import Recipe
from attention_priors.lab.study.studies import load_study
from attention_priors.lab.study.study import AnyRecipe, Study
from attention_priors.lab.wall_clock import WallClock


class RunFailedError(RuntimeError):
    """Runs ended with an error; the message says which and shows the end of their logs.

    Attributes:
        results: what the others have found, as :func:`compare` would have returned it.
    """

    def __init__(self, message: str, results: dict[str, Any]) -> None:
        super().__init__(message)
        self.results = results


@dataclass
class _Worker:
    scheme: str
    seed: int
    process: subprocess.Popen[str]
    log: Path
    task: TaskID
    shares: dict[str, float]
    """How much of its time each stage takes."""
    device: str | None
    """The one CUDA device that it sees, where there are several."""
    done: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """How much of the run is done, 0 to 1."""
        return sum(self.shares[stage] * part for stage, part in self.done.items()) / sum(self.shares.values())


def compare(
    recipe: Recipe | ImageRecipe,
    output: Path,
    *,
    only: Sequence[str] = (),
    processes: int | None = None,
    console: Console,
) -> dict[str, Any]:
    """Train and test what is not finished yet, and write ``results.json``.

    Interrupted at any point, the same call goes on from there: trainings from their last checkpoint,
    evaluations from their last text.

    Args:
        recipe: what to compare.
        output: the folder that holds everything.
        only: names of schemes, or patterns such as ``BAM*``; the others are left as they are.
        processes: runs at a time; by default as many as there are cores for, and as the recipe allows.
        console: where progress is shown.

    Returns:
        The results, of every run of the recipe that is finished.

    Raises:
        RecipeError: before any work, if a scheme is unknown, a text cannot be made, or ``output`` holds runs of
            another recipe or is being written by another call.
        OSError: before any work, if ``output`` cannot be written.
        RunFailedError: runs failed, after all others were carried out and ``results.json`` was written of them.
    """
    chosen = {name for pattern in only for name in _matching(recipe, pattern)} or set(recipe.schemes)
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be a positive integer, got {processes}")
    at_a_time = processes_at_a_time(recipe, processes)
    with sole_writer(writable_folder(output)):
        return _compare(recipe, output, chosen, at_a_time, console)


def _matching(recipe: AnyRecipe, pattern: str) -> list[str]:
    found = [name for name in recipe.schemes if name == pattern or fnmatchcase(name, pattern)]
    if not found:
        raise RecipeError(f"unknown scheme {pattern!r}; the recipe has {', '.join(recipe.schemes)}")
    return found


def _compare(
    recipe: Recipe | ImageRecipe,
    output: Path,
    schemes: Collection[str],
    processes: int,
    console: Console,
) -> dict[str, Any]:
    with console.status("Making ready what is read"):
        study = load_study(recipe, writable_folder(output / "cache"))
        study.check()
    if study.left_out is not None:
        console.print(f"corpus: {escape(study.left_out)}", highlight=False, soft_wrap=True)
    runs = [(name, seed) for seed in recipe.seeds for name in recipe.schemes]
    chosen = [run for run in runs if run[0] in schemes]
    wanted = {run: study.identities(output, *run) for run in runs}
    for files in wanted.values():
        for begun, content in files.items():
            check_same_recipe(begun, content)
    for run in chosen:
        for begun, content in wanted[run].items():
            if not begun.exists():
                write_json(begun, content)
    recipe_file = output / "recipe.json"
    write_json(recipe_file, recipe.model_dump(mode="json"))

    pending = [run for run in chosen if not study.is_finished(output, *run)]
    clock, failures = WallClock(output / "wall_seconds.json"), list[str]()
    if pending:
        with clock:
            failures = _run_all(pending, study, recipe_file, output, processes, console, clock)
    finished = [run for run in runs if (run_folder(output, *run) / "done.json").exists()]
    try:
        results = study.collect(output, finished, clock.seconds)
    except RecipeError as error:
        raise RecipeError("\n".join([*failures, str(error)])) from error
    write_json(output / "results.json", results)
    if failures:
        raise RunFailedError("\n".join(failures), results)
    return results


def processes_at_a_time(recipe: AnyRecipe, wanted: int | None) -> int:
    """How many runs to carry out at a time.

    Args:
        recipe: what is carried out.
        wanted: how many were asked for; None: as many as there are cores for, and as the recipe allows.

    Raises:
        RecipeError: the recipe does not allow so many.
    """
    most = recipe.processes
    if wanted is not None and most is not None and wanted > most:
        raise RecipeError(f"processes must be {most} at most, as the recipe says, got {wanted}")
    if wanted is not None:
        return wanted
    cores = max(1, (os.cpu_count() or 1) // recipe.threads_per_run)
    return cores if most is None else min(most, cores)


def _run_all(
    pending: Sequence[tuple[str, int]],
    study: Study,
    recipe_file: Path,
    output: Path,
    processes: int,
    console: Console,
    clock: WallClock,
) -> list[str]:
    """Carry out runs; return what there is to say of each that failed."""
    failures: list[str] = []
    events: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
    waiting, running, finished = list(pending), list[_Worker](), 0
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[stage]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        overall = bars.add_task(
            f"[bold]{escape(study.recipe.name)}", total=len(pending), stage=f"0 of {len(pending)} runs"
        )
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    scheme, seed = waiting.pop(0)
                    device = least_taken(cuda_devices(), [worker.device for worker in running])
                    running.append(_start(scheme, seed, study, recipe_file, output, device, bars, events))
                worker, event = events.get()
                clock.tick()
                if event is None:
                    running.remove(worker)
                    if worker.process.returncode:
                        failures.append(_failure(worker))
                        bars.console.print(f"[bold red]failed:[/] {escape(failures[-1].splitlines()[0])}")
                    finished += 1
                    bars.remove_task(worker.task)
                    if not bars.console.is_terminal:  # bars are not drawn there
                        ended = f"{worker.scheme}, seed {worker.seed}, has ended: {finished} of {len(pending)} runs"
                        bars.console.print(escape(ended), highlight=False, soft_wrap=True)
                else:
                    worker.done[event["stage"]] = event["done"] / max(1, event["total"])
                    bars.update(worker.task, completed=worker.share, stage=escape(event["stage"]))
                shares = sum(worker.share for worker in running)
                bars.update(overall, completed=finished + shares, stage=f"{finished} of {len(pending)} runs")
        finally:
            for worker in running:
                worker.process.terminate()
            for worker in running:
                worker.process.wait()
    return failures


def cuda_devices() -> list[str]:
    """The CUDA devices that this process sees, as ``CUDA_VISIBLE_DEVICES`` names them."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def least_taken(devices: Sequence[str], taken: Sequence[str | None]) -> str | None:
    """The device that the fewest runs are on; None where there are not several, and no choice."""
    return min(devices, key=lambda device: taken.count(device)) if len(devices) > 1 else None


def _start(
    scheme: str,
    seed: int,
    study: Study,
    recipe_file: Path,
    output: Path,
    device: str | None,
    bars: Progress,
    events: queue.Queue[tuple[_Worker, dict[str, Any] | None]],
) -> _Worker:
    log = run_folder(output, scheme, seed) / "log.txt"
    threads = str(study.recipe.threads_per_run)
    with log.open("a", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "attention_priors.lab.study.worker",
                str(recipe_file),
                str(output),
                scheme,
                str(seed),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            # The parent alone hears Ctrl-C; it then ends its workers in order.
            start_new_session=True,
            env=os.environ
            | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
            | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device}),
        )
    task = bars.add_task(escape(f"{scheme}, seed {seed}"), total=1.0, stage="starting")
    worker = _Worker(scheme, seed, process, log, task, study.stages(scheme), device)
    assert process.stdout is not None
    threading.Thread(target=_listen, args=(worker, process.stdout, events), daemon=True).start()
    return worker


def _listen(worker: _Worker, lines: IO[str], events: queue.Queue[tuple[_Worker, dict[str, Any] | None]]) -> None:
    for line in lines:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            # Something printed past the protocol; it belongs to the log.
            with worker.log.open("a", encoding="utf-8") as log:
                log.write(line)
            continue
        events.put((worker, event))
    worker.process.wait()
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    events.put((worker, None))


def _failure(worker: _Worker) -> str:
    tail = "\n".join(worker.log.read_text(encoding="utf-8").splitlines()[-15:])
    return (
        f"{worker.scheme}, seed {worker.seed}, ended with exit code {worker.process.returncode}; the end of "
        f"{worker.log}:\n{tail}"
    )
