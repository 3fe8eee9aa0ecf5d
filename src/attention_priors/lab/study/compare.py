"""Comparison: all schemes of a recipe with all seeds, several runs at a time, interruptible.

Several calls, on one or many machines, may share a folder. The worker of a run holds a lock on the run's folder. A call
locks the whole folder only briefly: to record the identities of its runs, and to collect results.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from attention_priors._io import writable_folder, write_json
from attention_priors.lab.machine import WallClock
from attention_priors.lab.output_folder import sole_writer
from attention_priors.lab.progress import Bars
from attention_priors.lab.results import Results, write_rows
from attention_priors.lab.strict_yaml import RecipeError, check_same_recipe, read_yaml, validated
from attention_priors.lab.study.decoders import DecoderStudy
from attention_priors.lab.study.images import ImageRecipe, ImageStudy
from attention_priors.lab.study.recipe import Recipe
from attention_priors.lab.study.runs import run_folder
from attention_priors.lab.study.workers import (
    FINISHED,
    STARTING,
    TAKEN,
    Ended,
    LocalWorkers,
    Run,
    Workers,
    log_of,
    usable_cores,
)

Study = DecoderStudy | ImageStudy
"""Recipe with all data that its runs read."""


def load_recipe(path: Path) -> Recipe | ImageRecipe:
    """Read and validate a recipe: an image recipe if it has the key ``images``, else a decoder recipe.

    Raises:
        RecipeError: the file is not YAML, or a key or value is invalid. The message names the key, its value and the
            allowed values.
        FileNotFoundError: the file does not exist.
    """
    return recipe_of(read_yaml(path), str(path))


def recipe_of(content: dict[str, Any], place: str) -> Recipe | ImageRecipe:
    """Validate the content of a recipe file.

    Raises:
        RecipeError: a key or value is invalid; the message names the place.
    """
    return validated(content, ImageRecipe if "images" in content else Recipe, place)


def load_study(recipe: Recipe | ImageRecipe, cache: Path) -> Study:
    """Load all data that a recipe's runs read.

    Raises:
        ValueError: the data cannot be read.
        OSError: the data cannot be read.
    """
    return ImageStudy(recipe) if isinstance(recipe, ImageRecipe) else DecoderStudy(recipe, cache)


class RunFailedError(RuntimeError):
    """Error for failed runs; the message names them and quotes the end of their logs.

    Attributes:
        results: Results of the other runs.
    """

    def __init__(self, message: str, results: Results) -> None:
        super().__init__(message)
        self.results = results


def compare(
    recipe: Recipe | ImageRecipe,
    output: Path,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    processes: int | None = None,
    scheduler: str | None = None,
    console: Console,
) -> Results:
    """Train and test all unfinished runs, and write ``results.jsonl.gz``.

    After an interruption, the same call resumes trainings from their last checkpoint and evaluations from their last
    text.

    Several calls may share ``output`` at the same time, on machines with a common file system. A call skips runs that
    another call is executing. Results cover the runs that are finished when the call ends. The console names this
    call's unfinished runs.

    Args:
        recipe: recipe of the comparison.
        output: folder for all files of the comparison.
        only: Names of schemes to run, or patterns such as ``BAM*``. All by default.
        seeds: Seeds of the recipe to run. All by default.
        processes: Number of runs at a time. By default, the number of cores and the recipe decide.
        scheduler: Address of the scheduler of a Dask cluster, whose workers execute the runs and share the folder
            ``output``. None for processes on this machine.
        console: Console for progress.

    Returns:
        Results of all finished runs of the recipe.

    Raises:
        RecipeError: before any work, if a scheme or seed is unknown, a text cannot be made, or ``output`` holds runs of
            another recipe.
        ValueError: before any work, if ``processes`` is below 1, or ``scheduler`` is given and Dask is not installed.
        OSError: before any work, if ``output`` cannot be written, the scheduler cannot be reached, or a worker of the
            cluster does not see ``output``.
        RunFailedError: runs failed. All other runs were executed, and ``results.jsonl.gz`` was written.
    """
    chosen = _chosen(recipe, only, seeds)
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be a positive integer, got {processes}")
    at_a_time = processes_at_a_time(recipe, processes, None if scheduler is None else len(chosen))
    cache = writable_folder(writable_folder(output) / "cache")
    with _workers(scheduler, output, recipe.threads_per_run, at_a_time) as workers:
        with console.status("Loading the data"):
            study = load_study(recipe, cache)
            study.check()
        if study.left_out is not None:
            _say(console, f"corpus: {study.left_out}")
        with sole_writer(output, wait=math.inf):
            _claim(study, output, chosen)
        pending = [run for run in chosen if not study.is_finished(output, *run)]
        failures: dict[Run, str] = {}
        if pending:
            workers.use(_recipe_file(recipe, cache))
            with WallClock(output / "wall_seconds.json", shared=True) as clock:
                failures = _Display(study, output, len(pending), console).carry_out(pending, workers, clock.tick)
        with sole_writer(output, wait=math.inf):
            results = _gather(study, output, list(failures.values()))
        missing = [run for run in pending if run not in failures and not study.is_finished(output, *run)]
        if missing:
            _say(console, f"not finished yet, still running in other calls: {'; '.join(map(_name, missing))}")
            _say(console, "to collect their results, run the same command again once they have ended")
        if failures:
            raise RunFailedError("\n".join(failures.values()), results)
        return results


def _workers(scheduler: str | None, output: Path, threads: int, at_a_time: int) -> Workers:
    if scheduler is None:
        return LocalWorkers(output, threads=threads, at_a_time=at_a_time)
    try:
        from attention_priors.lab.study.cluster import ClusterWorkers
    except ModuleNotFoundError as error:
        raise ValueError(
            f"scheduler={scheduler!r} needs Dask, but {error.name} is missing: pip install 'attention-priors[cluster]'"
        ) from error
    return ClusterWorkers(scheduler, output, threads=threads, at_a_time=at_a_time)


def _chosen(recipe: Recipe | ImageRecipe, only: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Return the runs of a call in execution order."""
    for seed in seeds:
        if seed not in recipe.seeds:
            raise RecipeError(f"unknown seed {seed}; the recipe has {', '.join(map(str, recipe.seeds))}")
    schemes = set[str]()
    for pattern in only:
        found = {name for name in recipe.schemes if name == pattern or fnmatchcase(name, pattern)}
        if not found:
            raise RecipeError(f"unknown scheme {pattern!r}; the recipe has {', '.join(map(repr, recipe.schemes))}")
        schemes |= found
    return [run for run in _runs(recipe) if run[0] in (schemes or recipe.schemes) and run[1] in (seeds or recipe.seeds)]


def _runs(recipe: Recipe | ImageRecipe) -> list[Run]:
    return [(name, seed) for seed in recipe.seeds for name in recipe.schemes]


def _claim(study: Study, output: Path, chosen: Sequence[Run]) -> None:
    """Check that the folder holds no runs of another recipe, and record the identities of this call's runs."""
    wanted = {run: study.identities(output, *run) for run in _runs(study.recipe)}
    for files in wanted.values():
        for begun, content in files.items():
            check_same_recipe(begun, content)
    for run in chosen:
        for begun, content in wanted[run].items():
            if not begun.exists():
                write_json(begun, content)
    write_json(output / "recipe.json", study.recipe.model_dump(mode="json"))


def _recipe_file(recipe: Recipe | ImageRecipe, cache: Path) -> Path:
    """Write the recipe for this call's workers; another call may replace ``recipe.json`` in the meantime."""
    content = recipe.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    path = cache / f"recipe-{digest}.json"
    if not path.exists():
        write_json(path, content)
    return path


def _gather(study: Study, output: Path, failures: Sequence[str]) -> Results:
    """Write ``results.jsonl.gz`` with all finished runs."""
    finished = [run for run in _runs(study.recipe) if (run_folder(output, *run) / "done.json").exists()]
    try:
        rows = study.collect(output, finished, WallClock(output / "wall_seconds.json").seconds)
    except RecipeError as error:
        raise RecipeError("\n".join([*failures, str(error)])) from error
    write_rows(output, rows)
    return Results.of(rows)


def processes_at_a_time(recipe: Recipe | ImageRecipe, wanted: int | None, usual: int | None = None) -> int:
    """Return the number of runs to execute at a time.

    Args:
        recipe: recipe of the runs.
        wanted: requested number; None for the default, within the recipe's limit.
        usual: default number; None for the number of cores divided by the threads per run.

    Raises:
        RecipeError: the recipe allows fewer.
    """
    most = recipe.processes
    if wanted is not None and most is not None and wanted > most:
        raise RecipeError(f"processes must be at most {most}, the limit of the recipe; got {wanted}")
    if wanted is not None:
        return wanted
    usual = usual or max(1, usable_cores() // recipe.threads_per_run)
    return usual if most is None else min(most, usual)


_BY_ANOTHER_CALL = {
    TAKEN: "is running in another call",
    FINISHED: "was finished by another call",
}
"""Messages about runs of other calls, by the exit code of their worker."""


class _Display:
    """Execution of runs with a progress display."""

    def __init__(self, study: Study, output: Path, total: int, console: Console) -> None:
        self._study, self._output, self._total = study, output, total
        self._bars = Bars(console, "{task.percentage:>3.0f} %", "{task.fields[stage]}")
        self._running: dict[Run, TaskID] = {}
        self._shares: dict[Run, dict[str, float]] = {}
        """Share of a run's time in each stage."""
        self._done: dict[Run, dict[str, float]] = {}
        """Finished share of each stage, 0 to 1."""
        self._ended = 0
        self._failures: dict[Run, str] = {}

    def carry_out(self, pending: Sequence[Run], workers: Workers, tick: Callable[[], None]) -> dict[Run, str]:
        """Execute runs.

        Args:
            pending: runs to execute.
            workers: workers that execute the runs.
            tick: callback for every progress event.

        Returns:
            Error messages of the failed runs.
        """
        waiting, started = list(pending), set[Run]()
        title = f"[bold]{escape(self._study.recipe.name)}"
        with self._bars:
            overall = self._bars.add_task(title, total=self._total, stage="")
            while waiting or started:
                while waiting and len(started) < workers.at_a_time:
                    run = waiting.pop(0)
                    if self._study.is_finished(self._output, *run):  # another call finished it in the meantime
                        self._end(run, _BY_ANOTHER_CALL[FINISHED])
                        continue
                    workers.start(run)
                    started.add(run)
                self._show_all(overall)
                if not started:
                    continue
                run, event = workers.events.get()
                tick()
                if isinstance(event, Ended):
                    started.remove(run)
                    self._take_end(run, event)
                elif run in started:  # progress may arrive after the end of a run
                    self._show(run, event)
            self._show_all(overall)
        return self._failures

    def _show(self, run: Run, event: dict[str, Any]) -> None:
        if run not in self._running:
            self._running[run] = self._bars.add_task(escape(_name(run)), total=1.0, stage="")
            self._shares[run], self._done[run] = self._study.stages(run[0]), {}
        if event["stage"] != STARTING:
            self._done[run][event["stage"]] = event["done"] / max(1, event["total"])
        self._bars.update(self._running[run], completed=self._share(run), stage=escape(event["stage"]))

    def _share(self, run: Run) -> float:
        """Return the finished share of a run, 0 to 1."""
        shares = self._shares[run]
        return sum(shares[stage] * part for stage, part in self._done[run].items()) / sum(shares.values())

    def _show_all(self, overall: TaskID) -> None:
        completed = self._ended + sum(map(self._share, self._running))
        self._bars.update(overall, completed=completed, stage=f"{self._ended} of {self._total} runs")

    def _take_end(self, run: Run, event: Ended) -> None:
        if run in self._running:
            self._bars.remove_task(self._running.pop(run))
        if event.code in _BY_ANOTHER_CALL:
            self._end(run, _BY_ANOTHER_CALL[event.code])
            return
        if event.code:
            self._failures[run] = (
                f"{_name(run)}, ended with exit code {event.code}; the end of {log_of(self._output, run)}:\n{event.log}"
            )
            first = self._failures[run].splitlines()[0]
            self._bars.console.print(f"[bold red]failed:[/] {escape(first)}")
        self._end(run, "has ended", is_drawn=self._bars.console.is_terminal)

    def _end(self, run: Run, what: str, *, is_drawn: bool = False) -> None:
        self._ended += 1
        if not is_drawn:
            _say(self._bars.console, f"{_name(run)}, {what}: {self._ended} of {self._total} runs")


def _name(run: Run) -> str:
    scheme, seed = run
    return f"{scheme}, seed {seed}"


def _say(console: Console, line: str) -> None:
    console.print(escape(line), highlight=False, soft_wrap=True)
