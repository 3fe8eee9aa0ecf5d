"""A comparison: every scheme of a recipe with every seed, several runs at a time, interruptible.

Several calls may share a folder, on one machine or on many. The worker of a run holds a lock on the run's folder. A
call holds the lock on the whole folder for moments alone: to write what identifies its runs, and to gather results.
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
"""A recipe, and all that its runs read."""


def load_recipe(path: Path) -> Recipe | ImageRecipe:
    """Read and check a recipe: of classifiers of images where it says ``images``, else of decoders.

    Raises:
        RecipeError: The file is not YAML, or a key or value is impossible; the message names the key, its value and
            the values that are allowed.
        FileNotFoundError: There is no such file.
    """
    return recipe_of(read_yaml(path), str(path))


def recipe_of(content: dict[str, Any], place: str) -> Recipe | ImageRecipe:
    """Return the checked recipe that a file holds.

    Raises:
        RecipeError: As :func:`load_recipe`; the message names the place.
    """
    return validated(content, ImageRecipe if "images" in content else Recipe, place)


def load_study(recipe: Recipe | ImageRecipe, cache: Path) -> Study:
    """Load everything that a recipe's runs read.

    Raises:
        ValueError: Something cannot be read.
        OSError: Something cannot be read.
    """
    return ImageStudy(recipe) if isinstance(recipe, ImageRecipe) else DecoderStudy(recipe, cache)


class RunFailedError(RuntimeError):
    """Runs ended with an error; the message says which and shows the end of their logs.

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
    """Train and test what is not finished yet, and write ``results.jsonl.gz``.

    Interrupted at any point, the same call goes on from there: trainings from their last checkpoint,
    evaluations from their last text.

    Several calls may share ``output`` at the same time, on machines that share its file system. A run that another
    call is carrying out is left to that call. The results are those of the runs that are finished when a call ends; the
    runs of this call that are not are named on the console.

    Args:
        recipe: what to compare.
        output: the folder that holds everything.
        only: names of schemes, or patterns such as ``BAM*``; the others are left as they are. All by default.
        seeds: seeds of the recipe; the others are left as they are. All by default.
        processes: runs at a time; by default as many as there are cores for, and as the recipe allows.
        scheduler: address of the scheduler of a Dask cluster, whose workers carry out the runs; ``output`` must be a
            folder that they share. None for processes of this machine.
        console: where progress is shown.

    Returns:
        Results of every run of the recipe that is finished.

    Raises:
        RecipeError: before any work, if a scheme or a seed is unknown, a text cannot be made, or ``output`` holds runs
            of another recipe.
        ValueError: before any work, if ``processes`` is below 1, or ``scheduler`` is given and Dask is not installed.
        OSError: before any work, if ``output`` cannot be written, the scheduler cannot be reached, or a worker of the
            cluster does not see ``output``.
        RunFailedError: runs failed, after all others were carried out and ``results.jsonl.gz`` was written of them.
    """
    chosen = _chosen(recipe, only, seeds)
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be a positive integer, got {processes}")
    at_a_time = processes_at_a_time(recipe, processes, None if scheduler is None else len(chosen))
    cache = writable_folder(writable_folder(output) / "cache")
    with _workers(scheduler, output, recipe.threads_per_run, at_a_time) as workers:
        with console.status("Making ready what is read"):
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
            _say(console, f"not finished, as other calls carry them out: {'; '.join(map(_name, missing))}")
            _say(console, "to gather their results, run the same command once more when they have ended")
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
            f"scheduler={scheduler!r} needs Dask, and {error.name} is missing: pip install 'attention-priors[cluster]'"
        ) from error
    return ClusterWorkers(scheduler, output, threads=threads, at_a_time=at_a_time)


def _chosen(recipe: Recipe | ImageRecipe, only: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Return the runs of a call, in the order in which they are carried out."""
    for seed in seeds:
        if seed not in recipe.seeds:
            raise RecipeError(f"unknown seed {seed}; the recipe has {', '.join(map(str, recipe.seeds))}")
    schemes = set[str]()
    for pattern in only:
        found = {name for name in recipe.schemes if name == pattern or fnmatchcase(name, pattern)}
        if not found:
            raise RecipeError(f"unknown scheme {pattern!r}; the recipe has {', '.join(recipe.schemes)}")
        schemes |= found
    return [run for run in _runs(recipe) if run[0] in (schemes or recipe.schemes) and run[1] in (seeds or recipe.seeds)]


def _runs(recipe: Recipe | ImageRecipe) -> list[Run]:
    return [(name, seed) for seed in recipe.seeds for name in recipe.schemes]


def _claim(study: Study, output: Path, chosen: Sequence[Run]) -> None:
    """Check that the folder holds no other recipe's runs, and write what identifies those of this call."""
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
    """Write the recipe for the workers of this call: another call may write another ``recipe.json`` meanwhile."""
    content = recipe.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    path = cache / f"recipe-{digest}.json"
    if not path.exists():
        write_json(path, content)
    return path


def _gather(study: Study, output: Path, failures: Sequence[str]) -> Results:
    """Write ``results.jsonl.gz`` of all runs that are finished."""
    finished = [run for run in _runs(study.recipe) if (run_folder(output, *run) / "done.json").exists()]
    try:
        rows = study.collect(output, finished, WallClock(output / "wall_seconds.json").seconds)
    except RecipeError as error:
        raise RecipeError("\n".join([*failures, str(error)])) from error
    write_rows(output, rows)
    return Results.of(rows)


def processes_at_a_time(recipe: Recipe | ImageRecipe, wanted: int | None, usual: int | None = None) -> int:
    """Return the number of runs to carry out at a time.

    Args:
        recipe: what is carried out.
        wanted: number asked for; None for the usual one, and as the recipe allows.
        usual: None for as many as there are cores for.

    Raises:
        RecipeError: the recipe allows fewer.
    """
    most = recipe.processes
    if wanted is not None and most is not None and wanted > most:
        raise RecipeError(f"processes must be {most} at most, as the recipe says, got {wanted}")
    if wanted is not None:
        return wanted
    usual = usual or max(1, usable_cores() // recipe.threads_per_run)
    return usual if most is None else min(most, usual)


_BY_ANOTHER_CALL = {
    TAKEN: "is left to another call, which is carrying it out",
    FINISHED: "was finished by another call",
}
"""What there is to say of a run that another call carries out, by the exit code of its worker."""


class _Display:
    """Shows the progress of runs while it carries them out."""

    def __init__(self, study: Study, output: Path, total: int, console: Console) -> None:
        self._study, self._output, self._total = study, output, total
        self._bars = Bars(console, "{task.percentage:>3.0f} %", "{task.fields[stage]}")
        self._running: dict[Run, TaskID] = {}
        self._shares: dict[Run, dict[str, float]] = {}
        """Part of the run's time that each stage takes."""
        self._done: dict[Run, dict[str, float]] = {}
        """Part of each stage that is done, 0 to 1."""
        self._ended = 0
        self._failures: dict[Run, str] = {}

    def carry_out(self, pending: Sequence[Run], workers: Workers, tick: Callable[[], None]) -> dict[Run, str]:
        """Carry out runs.

        Args:
            pending: the runs.
            workers: where they are carried out.
            tick: called at every step of progress.

        Returns:
            What there is to say of each run that failed.
        """
        waiting, started = list(pending), set[Run]()
        title = f"[bold]{escape(self._study.recipe.name)}"
        with self._bars:
            overall = self._bars.add_task(title, total=self._total, stage="")
            while waiting or started:
                while waiting and len(started) < workers.at_a_time:
                    run = waiting.pop(0)
                    if self._study.is_finished(self._output, *run):  # by another call, meanwhile
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
                elif run in started:  # messages may overtake each other
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
        """Return the part of a run that is done, 0 to 1."""
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
