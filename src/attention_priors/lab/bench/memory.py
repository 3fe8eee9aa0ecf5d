"""Peak memory of one pass, in a process of its own, and how much there is."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from attention_priors.lab.bench.case import Case, make_inputs
from attention_priors.lab.bench.errors import in_short
from attention_priors.lab.bench.timing import Runner
from attention_priors.lab.bench.way import CannotRunError, Way
from attention_priors.lab.machine import PeakMemory

GIB = 2**30
PRELOADED = ("x_transformers.x_transformers", "transformers.models.bloom.modeling_bloom", "goat.attention")
"""What peers take seconds to import; what is not installed is passed over here, and reported where it is used."""
SMALL = 64
"""The length of the pass that loads libraries, so that they are not counted."""


def available(device: str) -> int:
    """Bytes that are free now, on the device or, for the CPU, in the machine (Linux); elsewhere no limit is known."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[0]
    info = Path("/proc/meminfo")
    if not info.exists():
        return 2**62
    line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def can_measure(device: str) -> bool:
    """Whether peak memory can be known: on CUDA, and on Linux."""
    return PeakMemory.can_measure(torch.device(device))


def peak(way: Way, case: Case, threads: int) -> int:
    """Bytes that the first pass takes above its inputs, at its peak, with what is made then and kept.

    On the CPU: the process's resident memory, with all that its libraries keep. On CUDA: what PyTorch allocates.

    Raises:
        CannotRunError: if the way cannot run the case, or its process is ended for lack of memory.
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
    _runner(way, first).one_pass()
    runner = _runner(way, case)
    with PeakMemory(torch.device(case.device)) as memory:
        runner.one_pass()
    assert memory.bytes is not None
    return memory.bytes


def _runner(way: Way, case: Case) -> Runner:
    return Runner(case, way.prepare(case, make_inputs(case)))
