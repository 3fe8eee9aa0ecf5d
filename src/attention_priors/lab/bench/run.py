"""A benchmark: every way in every case, interleaved, interruptible, with nothing dropped without a word."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from attention_priors._io import read_json, writable_folder, write_json
from attention_priors.lab.bench import memory
from attention_priors.lab.bench.case import Case, make_inputs
from attention_priors.lab.bench.errors import in_short
from attention_priors.lab.bench.recipe import BenchRecipe
from attention_priors.lab.bench.results import check_identity, collect, identity
from attention_priors.lab.bench.timing import Runner, repetitions
from attention_priors.lab.bench.way import Need
from attention_priors.lab.bench.ways import WAYS
from attention_priors.lab.output_folder import sole_writer

HEADROOM = 0.9
"""Share of the free memory that may be asked for."""

Record = dict[str, Any]
"""What is known of one pass at one length: ``peaks``, ``failures`` and ``sittings``.

A sitting is a set of ways that were run in turn: ``ways`` (calls per measurement and error of each), ``for`` (those
for whose sake it was held) and ``rounds`` (seconds of each, one entry per repetition). Ratios are taken inside a
sitting.
"""


def bench(recipe: BenchRecipe, output: Path, *, memory_limit: float | None = None, console: Console) -> dict[str, Any]:
    """Measure what is not measured yet, and write ``results.json``.

    Interrupted at any point, the same call goes on from there, from the last repetition. Ways that could not run
    are tried again.

    Args:
        recipe: what to measure.
        output: the folder that holds everything.
        memory_limit: GiB that a case may take; by default nine tenths of what is free.
        console: where progress is shown.

    Returns:
        The results of everything in the folder.

    Raises:
        RecipeError: before any work, if ``output`` holds measurements that were made in another way or is being
            written by another call.
        OSError: before any work, if ``output`` cannot be written.
    """
    with sole_writer(writable_folder(output)):
        who = identity(recipe)
        check_identity(output, who)
        threads = torch.get_num_threads()
        torch.set_num_threads(recipe.threads)
        try:
            _Bench(recipe, output, memory_limit, console).run()
        finally:
            torch.set_num_threads(threads)
        results = collect(output)
        write_json(output / "results.json", results)
        return results


class _Bench:
    def __init__(self, recipe: BenchRecipe, output: Path, memory_limit: float | None, console: Console) -> None:
        self.recipe = recipe
        self.output = output
        self.memory_limit = memory_limit
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
        )
        self.bars = Progress(*columns, console=console)
        self.task = TaskID(0)

    def run(self) -> None:
        plan = self.recipe.plan()
        # A way in a case: one step for its memory, one to warm it up, one for each repetition.
        steps = sum(len(names) * (2 + self.recipe.repetitions) for names in plan.values())
        with self.bars:
            self.task = self.bars.add_task("starting", total=steps)
            for (passing, length), names in plan.items():
                case = self.recipe.case(passing, length)
                path = self.output / "measurements" / f"{passing}-{length}.json"
                record = read_json(path) if path.exists() else _new_record(case)
                self._measure(case, names, record, lambda path=path, record=record: write_json(path, record))

    def _measure(self, case: Case, names: list[str], record: Record, save: Callable[[], None]) -> None:
        before = self._completed()
        record["failures"] = {name: why for name, why in record["failures"].items() if name not in names}
        for sitting in record["sittings"]:
            if len(sitting["rounds"]) < self.recipe.repetitions:
                self._sit(case, sitting, record, save)
        missing = [name for name in names if not _finished(record, name) and name not in record["failures"]]
        possible = [name for name in missing if self._has_memory(case, name, record, save)]
        needs = {name: WAYS[name].need(case) for name in names}
        for chosen in sittings(possible, names, needs, self._limit(case)):
            wanted = [name for name in chosen if name in missing]
            sitting = {"for": wanted, "ways": {name: {} for name in chosen}, "rounds": []}
            record["sittings"].append(sitting)
            self._sit(case, sitting, record, save)
        # Steps that were not needed are done too.
        self.bars.update(self.task, completed=before + len(names) * (2 + self.recipe.repetitions))
        save()

    def _completed(self) -> float:
        return self.bars.tasks[0].completed

    def _limit(self, case: Case) -> float:
        if self.memory_limit is not None:
            return self.memory_limit * memory.GIB
        return HEADROOM * memory.available(case.device)

    def _say(self, case: Case, what: str) -> None:
        self.bars.update(self.task, description=f"{case.passing}, {case.length} tokens: {what}")

    def _has_memory(self, case: Case, name: str, record: Record, save: Callable[[], None]) -> bool:
        """Estimate, then measure, what a way takes; False, and a reason on record, if it is too much or fails."""
        way = WAYS[name]
        need, limit = sum(way.need(case)), self._limit(case)
        if need > limit:
            reason = f"needs {need / memory.GIB:.1f} GiB; {limit / memory.GIB:.1f} GiB may be used"
            record["failures"][name] = {"status": "not run", "reason": reason}
            return False
        self._say(case, f"memory of {way.label}")
        if name not in record["peaks"] and memory.can_measure(case.device):
            try:
                record["peaks"][name] = memory.peak(way, case, self.recipe.threads)
            except memory.CannotRunError as error:
                record["failures"][name] = {"status": "cannot run", "reason": in_short(error)}
                return False
            save()
        self.bars.advance(self.task)
        return True

    def _sit(self, case: Case, sitting: Record, record: Record, save: Callable[[], None]) -> None:
        """Warm up the ways of a sitting and run what is left of its repetitions."""
        runners: dict[str, Runner] = {}
        inputs = make_inputs(case)
        # PyTorch keeps so many compiled versions of a function and no more.
        torch.compiler.reset()
        for name in list(sitting["ways"]):
            way = WAYS[name]
            self._say(case, f"warming up {way.label}")
            try:
                runner = Runner(case, way.prepare(case, inputs))
                runner.warm_up(compiled=way.compiled)
            # Whatever a contender raises is its result.
            except Exception as error:
                record["failures"][name] = {"status": "cannot run", "reason": in_short(error)}
                del sitting["ways"][name]
                continue
            runners[name] = runner
            sitting["ways"][name] = {"calls": runner.calls, "error": runner.error}
            self.bars.advance(self.task)

        def measured(name: str) -> Callable[[], float]:
            def measure() -> float:
                self._say(case, f"{WAYS[name].label}, repetition {len(sitting['rounds']) + 1} of {count}")
                seconds = runners[name].measure()
                self.bars.advance(self.task)
                return seconds

            return measure

        count = self.recipe.repetitions
        measures = {name: measured(name) for name in runners}
        if any(name in runners for name in sitting["for"]):
            for seconds in repetitions(measures, len(sitting["rounds"]), count, self.recipe.seed):
                sitting["rounds"].append(seconds)
                save()
        else:
            record["sittings"].remove(sitting)
        runners.clear()
        gc.collect()
        if case.device.startswith("cuda"):
            # The next measurement of memory is another process's.
            torch.cuda.empty_cache()
        save()


def _new_record(case: Case) -> Record:
    return {"pass": case.passing, "length": case.length, "peaks": {}, "failures": {}, "sittings": []}


def _finished(record: Record, name: str) -> bool:
    """Whether a way has all its repetitions; unfinished sittings are completed before this is asked."""
    return any(name in sitting["ways"] for sitting in record["sittings"])


def sittings(missing: Sequence[str], available: Iterable[str], needs: dict[str, Need], limit: float) -> list[list[str]]:
    """Divide ways among as few sittings as their memory allows, in order.

    Every sitting has the baselines of its ways, and their counterparts in this library where ``available`` has
    them, so that both are compared in the same repetitions.

    Args:
        missing: the ways to measure.
        available: all ways of the case.
        needs: the memory of each.
        limit: bytes that one sitting may take.
    """
    available = list(available)
    divided: list[list[str]] = []
    for name in missing:
        way = WAYS[name]
        together = {name, way.baseline} | ({way.counterpart} & set(available) if way.counterpart else set())
        if divided:
            wider = {*divided[-1], *together}
            kept = sum(needs[other].kept for other in wider)
            if kept + max(needs[other].working for other in wider) <= limit:
                divided[-1] = [other for other in available if other in wider]
                continue
        if any(name in sitting for sitting in divided):
            continue
        divided.append([other for other in available if other in together])
    return divided
