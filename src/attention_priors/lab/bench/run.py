"""Interruptible benchmarks: every way in every case, in interleaved repetitions; failures are recorded."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from rich.console import Console

import attention_priors
from attention_priors._io import read_json, writable_folder, write_json
from attention_priors.lab.bench import measure
from attention_priors.lab.bench.measure import Runner, repetitions
from attention_priors.lab.bench.results import IDENTITY, collect
from attention_priors.lab.bench.way import PASSES, CannotRunError, Case, Need, Pass, in_short, make_inputs
from attention_priors.lab.bench.ways import LINE_WAYS, WAYS
from attention_priors.lab.machine import device_named, memory_bytes, now, processor, versions
from attention_priors.lab.output_folder import sole_writer
from attention_priors.lab.progress import Bars
from attention_priors.lab.strict_yaml import RecipeError, Strict, differences, explain, read_strictly

GIB = 2**30
HEADROOM = 0.9
"""Share of the free memory that a case may use."""
SOFTWARE = ("attention-priors", "torch", "triton", "transformers", "x-transformers", "goat-attention")
CODE = ("attention/**/*.py", "priors/*.py", *(f"lab/bench/{name}.py" for name in ("way", "ways", "peers", "measure")))
"""Files of this package that affect the time or the memory of a pass."""

Record = dict[str, Any]
"""Measurements of one pass at one length: ``peaks``, ``failures`` and ``sittings``.

A sitting is a set of ways that are measured in turn; ratios are taken within a sitting. Its fields are:

- ``ways``: calls per measurement and error of each way.
- ``for``: ways without earlier measurements.
- ``rounds``: seconds of each way, one entry per repetition.
- ``beside_neighbours``: seconds of each way beside busy processes, if the recipe asks for neighbours.
"""


# ---- recipes


class Part(Strict):
    """Ways that are compared in every pass and at every length."""

    lengths: tuple[Annotated[int, Field(ge=16)], ...] = Field(min_length=1)
    """Lengths in tokens; cached keys in decoding."""
    passes: tuple[Pass, ...] = Field(default=PASSES, min_length=1)
    """Passes that are measured."""
    ways: tuple[str, ...] = Field(default=LINE_WAYS, min_length=1)
    """Names of the ways, as ``attention-priors bench --ways list`` shows them. Each way's baseline is added."""

    @field_validator("ways")
    @classmethod
    def _known(cls, ways: tuple[str, ...]) -> tuple[str, ...]:
        for name in ways:
            if name not in WAYS:
                raise ValueError(f"unknown way {name!r}; known are {', '.join(WAYS)}")
        return ways


class BenchRecipe(Strict):
    """A benchmark: parts with their own lengths, passes and ways, and shared settings."""

    name: str = Field(default="bench", min_length=1)
    """Title of the benchmark, and name of the output folder in ``runs``."""
    description: str = ""
    """Description of the benchmark."""
    device: Annotated[str, AfterValidator(lambda name: str(device_named(name)))] = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of queries, keys and values."""
    threads: int = Field(default_factory=torch.get_num_threads, gt=0)
    """Number of CPU threads; PyTorch's number by default."""
    batch: int = Field(default=1, gt=0)
    """Batch size."""
    heads: int = Field(default=8, gt=0)
    """Number of heads."""
    head_dim: int = Field(default=64, gt=0)
    """Dimension of a head."""
    repetitions: int = Field(default=9, gt=0)
    """Number of times that each way is measured, interleaved with the others."""
    cuda_graph: bool = False
    """Whether passes are captured as CUDA graphs and replayed, so that the time to start kernels does not count."""
    flush_denormal: bool = False
    """Whether denormal numbers count as 0 (:func:`torch.set_flush_denormal`). PyTorch's default is false."""
    neighbours: int = Field(default=0, ge=0)
    """Number of processes that each keep a core busy. Every repetition is measured without and then beside them."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the inputs and of the order of the ways."""
    parts: tuple[Part, ...] = Field(min_length=1)
    """Sets of lengths, passes and ways; all combinations within a part are measured."""

    @model_validator(mode="after")
    def _graph_on_cuda(self) -> BenchRecipe:
        if self.cuda_graph and torch.device(self.device).type != "cuda":
            raise ValueError(f"cuda_graph needs device: cuda; the device is {self.device!r}")
        return self

    def plan(self) -> dict[tuple[Pass, int], list[str]]:
        """Return the ways of each pass and length, with their baselines, in the order of the catalogue."""
        chosen: dict[tuple[Pass, int], set[str]] = {}
        for part in self.parts:
            for cell in product(part.passes, part.lengths):
                chosen.setdefault(cell, set()).update(part.ways, (WAYS[name].baseline for name in part.ways))
        order = sorted(chosen, key=lambda cell: (cell[1], PASSES.index(cell[0])))
        return {cell: [name for name in WAYS if name in chosen[cell]] for cell in order}

    def case(self, passing: Pass, length: int) -> Case:
        """Return the case of a pass and a length."""
        return Case(
            passing, length, self.batch, self.heads, self.head_dim, getattr(torch, self.dtype), self.device, self.seed
        )


def load_bench_recipe(path: Path) -> BenchRecipe:
    """Read and check a recipe.

    Raises:
        RecipeError: A key or value is invalid; the message names the key, its value and the allowed values.
        FileNotFoundError: The file does not exist.
    """
    return read_strictly(path, BenchRecipe)


def make_bench_recipe(**settings: Any) -> BenchRecipe:
    """Return a recipe of one part from command-line options.

    Raises:
        RecipeError: An option is invalid; the message names the option, its value and the allowed values.
    """
    part = {key: settings.pop(key) for key in Part.model_fields if key in settings}
    try:
        return BenchRecipe.model_validate(settings | {"parts": [part]})
    except ValidationError as error:
        raise RecipeError(explain(error, BenchRecipe).replace("parts.0.", "")) from error


# ---- runs


def bench(recipe: BenchRecipe, output: Path, *, memory_limit: float | None = None, console: Console) -> dict[str, Any]:
    """Measure the ways that have no finished measurements, and write ``results.json``.

    An interrupted benchmark resumes after its last finished repetition when called again. Ways that could not run are
    tried again.

    Args:
        recipe: Ways, lengths and passes.
        output: Folder of measurements and results.
        memory_limit: GiB that a case may use; nine tenths of the free memory by default.
        console: Console that shows progress.

    Returns:
        The results of all measurements in the folder.

    Raises:
        RecipeError: Before any work, if ``output`` holds measurements with other settings, versions, machine or code,
            or if another call is writing to it.
        OSError: Before any work, if ``output`` cannot be written.
    """
    with sole_writer(writable_folder(output)):
        _check_identity(output, recipe)
        threads = torch.get_num_threads()
        torch.set_num_threads(recipe.threads)
        torch.set_flush_denormal(recipe.flush_denormal)
        try:
            _Bench(recipe, output, memory_limit, console).run()
        finally:
            torch.set_num_threads(threads)
        results = collect(output)
        write_json(output / "results.json", results)
        return results


def _check_identity(output: Path, recipe: BenchRecipe) -> None:
    """Record the settings, versions, machine and code of a folder's measurements, or check that they are unchanged.

    Packages that were not installed before may be installed now.
    """
    device = torch.device(recipe.device)
    who: dict[str, Any] = {
        "settings": recipe.model_dump(mode="json", exclude={"name", "description", "parts"}),
        "versions": versions(SOFTWARE),
        "machine": {
            "platform": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_bytes": memory_bytes(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
        "code": _code_fingerprint(),
        "begun": now(),
    }
    path = output / IDENTITY
    if path.exists():
        old = read_json(path)
        who["begun"] = old["begun"]
        new = {name: version for name, version in who["versions"].items() if old["versions"].get(name) is None}
        differing = differences(old | {"versions": old["versions"] | new}, who)
        if differing:
            raise RecipeError(
                f"{output} holds measurements of other settings, versions, machine or code; they differ in "
                f"{'; '.join(differing)}. Use another folder"
            )
    write_json(path, who)


def _code_fingerprint() -> str:
    """Return a hash of the measured and the measuring code, so that measurements of two versions are not mixed."""
    root = Path(attention_priors.__file__).parent
    digest = hashlib.sha256()
    for path in sorted({path for pattern in CODE for path in root.glob(pattern)}):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class _Bench:
    def __init__(self, recipe: BenchRecipe, output: Path, memory_limit: float | None, console: Console) -> None:
        self.recipe = recipe
        self.output = output
        self.memory_limit = memory_limit
        self.bars = Bars(console, "{task.percentage:>3.0f} %")
        self.task = self.bars.add_task("starting")

    def run(self) -> None:
        plan = self.recipe.plan()
        # Progress steps of a way in a case: one for memory, one for the warm-up, one for each repetition.
        each = 2 + self.recipe.repetitions * (2 if self.recipe.neighbours else 1)
        done = 0
        with self.bars:
            self.bars.update(self.task, total=sum(len(names) * each for names in plan.values()))
            for (passing, length), names in plan.items():
                path = self.output / "measurements" / f"{passing}-{length}.json"
                new = {"pass": passing, "length": length, "peaks": {}, "failures": {}, "sittings": []}
                record = read_json(path) if path.exists() else new
                self._measure(
                    self.recipe.case(passing, length), names, record, lambda p=path, r=record: write_json(p, r)
                )
                # Skipped steps count as done.
                done += len(names) * each
                self.bars.update(self.task, completed=done)

    def _measure(self, case: Case, names: list[str], record: Record, save: Callable[[], None]) -> None:
        record["failures"] = {name: why for name, why in record["failures"].items() if name not in names}
        for sitting in list(record["sittings"]):
            if len(sitting["rounds"]) < self.recipe.repetitions:
                self._sit(case, sitting, record, save)
        finished = {name for sitting in record["sittings"] for name in sitting["ways"]}
        missing = [name for name in names if name not in finished and name not in record["failures"]]
        possible = [name for name in missing if self._has_memory(case, name, record, save)]
        needs = {name: WAYS[name].need(case) for name in names}
        for chosen in sittings(possible, names, needs, self._limit(case)):
            wanted = [name for name in chosen if name in missing]
            sitting = {"for": wanted, "ways": {name: {} for name in chosen}, "rounds": []}
            record["sittings"].append(sitting)
            self._sit(case, sitting, record, save)
        save()

    def _limit(self, case: Case) -> float:
        return HEADROOM * measure.available(case.device) if self.memory_limit is None else self.memory_limit * GIB

    def _say(self, case: Case, what: str) -> None:
        self.bars.update(self.task, description=f"{case.passing}, {case.length} tokens: {what}")

    def _has_memory(self, case: Case, name: str, record: Record, save: Callable[[], None]) -> bool:
        """Estimate, then measure, the memory of a way. Return False and record the reason if the way cannot run."""
        way = WAYS[name]
        need, limit = sum(way.need(case)), self._limit(case)
        if need > limit:
            reason = f"needs {need / GIB:.1f} GiB; {limit / GIB:.1f} GiB may be used"
            record["failures"][name] = {"status": "not run", "reason": reason}
            return False
        self._say(case, f"memory of {way.label}")
        if name not in record["peaks"] and measure.can_measure(case.device):
            try:
                record["peaks"][name] = measure.peak(way, case, self.recipe.threads)
            except CannotRunError as error:
                record["failures"][name] = {"status": "cannot run", "reason": in_short(error)}
                return False
            save()
        self.bars.advance(self.task)
        return True

    def _sit(self, case: Case, sitting: Record, record: Record, save: Callable[[], None]) -> None:
        """Warm up the ways of a sitting and run the missing repetitions."""
        runners: dict[str, Runner] = {}
        inputs = make_inputs(case)
        # PyTorch limits the number of compiled versions of a function.
        torch.compiler.reset()
        for name in list(sitting["ways"]):
            way = WAYS[name]
            self._say(case, f"warming up {way.label}")
            try:
                runner = Runner(case, way.prepare(case, inputs), in_graph=self.recipe.cuda_graph)
                runner.warm_up(compiled=way.compiled)
            # Any error of a contender is recorded as its result.
            except Exception as error:
                record["failures"][name] = {"status": "cannot run", "reason": in_short(error)}
                del sitting["ways"][name]
                continue
            runners[name] = runner
            sitting["ways"][name] = {"calls": runner.calls, "error": runner.error}
            self.bars.advance(self.task)
        count = self.recipe.repetitions

        def seconds_of(name: str) -> float:
            self._say(case, f"{WAYS[name].label}, repetition {len(sitting['rounds']) + 1} of {count}")
            if self.recipe.neighbours:
                # A way may adapt to a busy machine, which takes effect in its second pass.
                runners[name].one_pass()
            seconds = runners[name].measure()
            self.bars.advance(self.task)
            return seconds

        if any(name in runners for name in sitting["for"]):
            for seconds in repetitions(seconds_of, list(runners), len(sitting["rounds"]), count, self.recipe.seed):
                if self.recipe.neighbours:
                    with measure.neighbours(self.recipe.neighbours):
                        busy = {name: seconds_of(name) for name in seconds}
                    sitting.setdefault("beside_neighbours", []).append(busy)
                sitting["rounds"].append(seconds)
                save()
        else:
            record["sittings"].remove(sitting)
        runners.clear()
        gc.collect()
        if case.device.startswith("cuda"):
            # Another process makes the next measurement of memory.
            torch.cuda.empty_cache()
        save()


def sittings(missing: Sequence[str], available: Iterable[str], needs: dict[str, Need], limit: float) -> list[list[str]]:
    """Divide ways among as few sittings as their memory allows, in order.

    Every sitting includes the baselines of its ways, and their counterparts in this library if ``available`` has
    them. Each way is therefore compared within repetitions.

    Args:
        missing: Ways to measure.
        available: All ways of the case.
        needs: Memory of each way.
        limit: Bytes that one sitting may use.
    """
    available = list(available)
    divided: list[list[str]] = []
    for name in missing:
        way = WAYS[name]
        together = {name, way.baseline} | ({way.counterpart} & set(available) if way.counterpart else set())
        wider = {*divided[-1], *together} if divided else set()
        if wider and sum(needs[n].kept for n in wider) + max(needs[n].working for n in wider) <= limit:
            divided[-1] = [other for other in available if other in wider]
        elif not any(name in sitting for sitting in divided):
            divided.append([other for other in available if other in together])
    return divided
