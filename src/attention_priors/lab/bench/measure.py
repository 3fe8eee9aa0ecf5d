"""Time and peak memory of ways in a case, with their outputs checked against the reference."""

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
"""Seconds that a measurement lasts at least: as many passes in a row as that takes."""
MOST_CALLS = 200
SETTLING = 0.2
"""Seconds until a process that was started is busy."""
ROWS_CHECKED = 16
"""Number of rows compared with the reference at the start, in the middle and at the end of the output."""
LARGEST_ERROR = 0.05
"""Beyond this difference, relative to the largest output, a way computes something else and is not timed."""
PRELOADED = ("x_transformers.x_transformers", "transformers.models.bloom.modeling_bloom", "goat.attention")
"""Modules of peers that take seconds to import. The fork server passes over modules that are not installed."""
SMALL = 64
"""Length of the pass that loads libraries, so that they are not counted."""


# ---- time


@dataclass
class Runner:
    """One way in one case, warmed up and checked."""

    case: Case
    prepared: Prepared
    calls: int = 1
    """Passes per measurement."""
    error: float = math.nan
    """Largest difference from the reference, relative to the largest output."""
    _gradient: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.case.backward:
            # A given gradient: that of a sum is a single number, expanded, which some code takes a slow path for.
            generator = torch.Generator().manual_seed(self.case.seed + 1)
            gradient = torch.randn(self.prepared.shape, generator=generator)
            self._gradient = gradient.to(self.case.device, self.case.dtype)

    def warm_up(self, *, compiled: bool = False) -> None:
        """Run until nothing is made for the first time, check the output, and choose the number of calls.

        Args:
            compiled: whether the first run compiles, so that its time says nothing.

        Raises:
            CannotRunError: the output differs from the reference.
        """
        with torch.set_grad_enabled(self.case.backward):
            out = self.prepared.run()
        self.error = error_of(self.case, self.prepared, out.detach())
        del out
        if not self.error <= LARGEST_ERROR:
            raise CannotRunError(f"computes something else: its outputs are off by {self.error:.2g} of the largest")
        seconds = self.measure()
        if compiled or seconds < 50 * SHORTEST:
            # The first backward pass loads and compiles too.
            seconds = self.measure()
        self.calls = min(MOST_CALLS, max(1, math.ceil(SHORTEST / seconds)))

    def one_pass(self) -> None:
        """Run the pass that is timed."""
        with torch.set_grad_enabled(self.case.backward):
            out = self.prepared.run()
        if self.case.backward:
            torch.autograd.grad(out, self.prepared.leaves, self._gradient)

    def measure(self) -> float:
        """Return the seconds of a pass, the mean of :attr:`calls` in a row."""
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
    """Return the largest difference of some rows from the reference, relative to the largest output among them."""
    count = min(ROWS_CHECKED, case.num_queries)
    # Heads that lie side by side are taken apart.
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

    The order is drawn anew each time, so that no way always runs in the wake of the same other.

    Args:
        measure: measures a way once, in seconds.
        ways: their names.
        first: the number of the first repetition; the order depends on it.
        count: the number after the last one.
        seed: of the order.

    Yields:
        Seconds of each way, in the order of the repetition.
    """
    for number in range(first, count):
        names = list(ways)
        random.Random(f"{seed}-{number}").shuffle(names)
        # A collection in the middle would be counted as one way's time.
        gc.disable()
        try:
            seconds = {name: measure(name) for name in names}
        finally:
            gc.enable()
        yield seconds


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Within this block, ``number`` other processes keep a core busy each. They end with this one, however it ends."""
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
    """Return the bytes that are free now, on the device or, for the CPU, in the machine."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return psutil.virtual_memory().available


def can_measure(device: str) -> bool:
    """Whether peak memory can be known: on CUDA, and on Linux."""
    return PeakMemory.can_measure(torch.device(device))


def peak(way: Way, case: Case, threads: int) -> int:
    """Return the bytes that the first pass takes above its inputs, at its peak, with what is made then and kept.

    On the CPU: the resident memory of a process of its own, with all that its libraries keep. On CUDA: what PyTorch
    allocates.

    Raises:
        CannotRunError: the way cannot run the case, or its process is ended for lack of memory.
    """
    # The server has PyTorch loaded and nothing else done; each measurement is a fork of it.
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
        # Alive only where the wait was interrupted.
        process.terminate()
        process.join()
        ours.close()
    if isinstance(found, str):
        raise CannotRunError(found)
    return found


def _measure(connection: Connection, name: str, case: Case, threads: int) -> None:
    # Ctrl-C is the parent's; it ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The compiler's helpers would outlive this process.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(threads)
    try:
        connection.send(_peak_here(name, case))
    except Exception as error:
        connection.send(in_short(error))


def _peak_here(name: str, case: Case) -> int:
    from attention_priors.lab.bench.ways import WAYS

    way = WAYS[name]
    # What is compiled is compiled for each length by itself, and compiling takes memory of its own.
    first = case if way.compiled else replace(case, length=min(SMALL, case.length))
    Runner(first, way.prepare(first, make_inputs(first))).one_pass()
    runner = Runner(case, way.prepare(case, make_inputs(case)))
    with PeakMemory(torch.device(case.device)) as memory:
        runner.one_pass()
    assert memory.bytes is not None
    return memory.bytes
