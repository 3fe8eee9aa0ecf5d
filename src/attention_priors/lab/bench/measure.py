"""Measurement of time and peak memory, with outputs checked against the reference."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import psutil
import torch
from torch import Tensor

from attention_priors.lab.bench.way import CannotRunError, Case, Prepared, Way, in_short, make_inputs
from attention_priors.lab.machine import PeakMemory

SHORTEST = 0.02
"""Minimum duration of a measurement in seconds. Shorter passes are repeated to fill it."""
MOST_CALLS = 200
SETTLING = 0.2
"""Seconds that a new process needs to become busy."""
ROWS_CHECKED = 16
"""Number of rows compared with the reference at each of the start, the middle and the end of the output."""
LARGEST_ERROR = 0.05
"""Largest accepted difference from the reference, relative to the largest output. A way above it is not timed."""
PRELOADED = ("x_transformers.x_transformers", "transformers.models.bloom.modeling_bloom", "goat.attention")
"""Modules of peers that take seconds to import. The fork server ignores modules that are not installed."""
SMALL = 64
"""Length of the warm-up pass that loads libraries, so that their memory is not counted."""


# ---- time


@dataclass
class Runner:
    """A way in a case, with its number of calls and its error once warmed up."""

    case: Case
    prepared: Prepared
    calls: int = 1
    """Passes per measurement."""
    error: float = math.nan
    """Largest difference from the reference, relative to the largest output."""
    in_graph: bool = False
    """Whether :meth:`warm_up` captures a pass as a CUDA graph, which is then measured."""
    _gradient: Tensor | None = field(default=None, repr=False)
    _graph: torch.cuda.CUDAGraph | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.case.backward:
            # A dense random gradient: the gradient of a sum is an expanded scalar, for which some code is slower.
            generator = torch.Generator().manual_seed(self.case.seed + 1)
            gradient = torch.randn(self.prepared.shape, generator=generator)
            self._gradient = gradient.to(self.case.device, self.case.dtype)

    def warm_up(self, *, compiled: bool = False) -> None:
        """Run until compilation and caches are warm, check the output, and choose the number of calls.

        Args:
            compiled: Whether the first run compiles, so that its time is not representative.

        Raises:
            CannotRunError: The output differs from the reference.
        """
        with torch.set_grad_enabled(self.case.backward):
            out = self.prepared.run()
        self.error = error_of(self.case, self.prepared, out.detach())
        del out
        if not self.error <= LARGEST_ERROR:
            raise CannotRunError(
                f"outputs differ from the reference by {self.error:.2g} of the largest; "
                f"expected at most {LARGEST_ERROR}"
            )
        if self.in_graph:
            self._capture()
        seconds = self.measure()
        if compiled or seconds < 50 * SHORTEST:
            # The first backward pass also loads libraries and compiles.
            seconds = self.measure()
        self.calls = min(MOST_CALLS, max(1, math.ceil(SHORTEST / seconds)))

    def _capture(self) -> None:
        """Capture a pass, after passes on another stream that fill all caches, as PyTorch requires."""
        others = torch.cuda.Stream()
        others.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(others):
            for _ in range(3):
                self.one_pass()
        torch.cuda.current_stream().wait_stream(others)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.one_pass()
        self._graph = graph

    def one_pass(self) -> None:
        """Run one pass, or replay it if it was captured."""
        if self._graph is not None:
            self._graph.replay()
            return
        with torch.set_grad_enabled(self.case.backward):
            out = self.prepared.run()
        if self.case.backward:
            torch.autograd.grad(out, self.prepared.leaves, self._gradient)

    def measure(self) -> float:
        """Return the seconds of a pass, averaged over :attr:`calls` consecutive passes."""
        if self.case.device.startswith("cuda"):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(self.calls):
                self.one_pass()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1000 / self.calls
        started = time.perf_counter()
        for _ in range(self.calls):
            self.one_pass()
        return (time.perf_counter() - started) / self.calls


def error_of(case: Case, prepared: Prepared, out: Tensor) -> float:
    """Return the largest difference of sampled rows from the reference, relative to their largest output."""
    count = min(ROWS_CHECKED, case.num_queries)
    # A flat output `(B, Lq, H Dv)` is split into heads.
    heads_first = out if out.dim() == 4 else out.unflatten(-1, (case.heads, -1)).transpose(1, 2)
    worst = 0.0
    for start in {0, (case.num_queries - count) // 2, case.num_queries - count}:
        rows = slice(start, start + count)
        expected = prepared.expected(rows)
        difference = float((heads_first[:, :, rows].double() - expected).abs().max() / expected.abs().max())
        worst = max(worst, difference) if not math.isnan(difference) else math.inf
    return worst


def repetitions(
    measure: Callable[[str], float], ways: Sequence[str], first: int, count: int, seed: int
) -> Iterator[dict[str, float]]:
    """Measure every way once per repetition.

    Each repetition draws a new order, so that no two ways always run one after the other.

    Args:
        measure: Function that measures a way once and returns seconds.
        ways: Names of the ways.
        first: Number of the first repetition.
        count: Number after the last repetition.
        seed: Seed of the orders. Each repetition has an order of its own.

    Yields:
        Seconds of each way, in the order of the repetition.
    """
    for number in range(first, count):
        names = list(ways)
        random.Random(f"{seed}-{number}").shuffle(names)
        # A garbage collection would count as the time of whichever way it interrupts.
        gc.disable()
        try:
            seconds = {name: measure(name) for name in names}
        finally:
            gc.enable()
        yield seconds


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Run ``number`` processes that each keep a core busy, while in this context or until this process ends."""
    busy = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    processes = [subprocess.Popen([sys.executable, "-I", "-S", "-c", busy]) for _ in range(number)]
    try:
        time.sleep(SETTLING)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# ---- memory


def available(device: str) -> int:
    """Return the free bytes of a CUDA device or, for the CPU, of the machine."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return psutil.virtual_memory().available


def can_measure(device: str) -> bool:
    """Return whether peak memory can be measured: on CUDA, and on Linux."""
    return PeakMemory.can_measure(torch.device(device))


def peak(way: Way, case: Case, threads: int) -> int:
    """Return the peak memory of the first pass above its inputs, in bytes, including caches that the pass fills.

    On the CPU, this is the resident memory of a separate process, including memory that its libraries keep. On CUDA,
    this is the memory that PyTorch allocates.

    Raises:
        CannotRunError: The way cannot run the case, or its process was killed for lack of memory.
    """
    if case.device.startswith("cuda"):
        try:
            return _peak_here(way.name, case)
        # Any error of a contender is recorded as its result.
        except Exception as error:
            raise CannotRunError(in_short(error)) from error
    # The fork server has imported PyTorch and done no other work. Each measurement runs in a fork of the server.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, way.name, case, threads), daemon=True)
    process.start()
    theirs.close()
    try:
        found = ours.recv()
        process.join()
    except EOFError:
        process.join()
        raise CannotRunError(
            f"its process ended with exit code {process.exitcode}" + (" (out of memory?)" * (process.exitcode == -9))
        ) from None
    finally:
        # The process is still alive only if the wait was interrupted.
        process.terminate()
        process.join()
        ours.close()
    if isinstance(found, str):
        raise CannotRunError(found)
    return found


def _measure(connection: Connection, name: str, case: Case, threads: int) -> None:
    # The parent handles Ctrl-C and terminates this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The compiler's worker processes would outlive this process.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(threads)
    try:
        connection.send(_peak_here(name, case))
    except Exception as error:
        connection.send(in_short(error))


def _peak_here(name: str, case: Case) -> int:
    from attention_priors.lab.bench.ways import WAYS

    way = WAYS[name]
    # Compiled ways compile for each length, and compilation takes memory.
    first = case if way.compiled else replace(case, length=min(SMALL, case.length))
    Runner(first, way.prepare(first, make_inputs(first))).one_pass()
    runner = Runner(case, way.prepare(case, make_inputs(case)))
    with PeakMemory(torch.device(case.device)) as memory:
        runner.one_pass()
    assert memory.bytes is not None
    return memory.bytes
