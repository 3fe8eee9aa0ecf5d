"""Child processes of tests, with timeouts."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import torch

from attention_priors.lab.bench.measure import PRELOADED

COMPUTING = "spawn" if sys.platform == "win32" else "forkserver"
"""Start method of processes that compute. A copy of a process with threads or CUDA may crash."""

# The fork server imports once what takes long. Benchmarks share it, and measure the memory of later imports.
multiprocessing.set_forkserver_preload(
    [*PRELOADED, *(f"attention_priors.lab.{part}" for part in ("bench", "cli", "evaluate", "report", "train"))]
)


def run_command(
    command: Sequence[str | Path],
    *,
    timeout: float = 300,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its output. With ``check``, the exit code must be 0.

    A command that exceeds ``timeout`` seconds is killed with its child processes. :func:`subprocess.run` would kill
    only the first process, and then wait until its children close their output.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException as error:
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            member.kill()
        out, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(f"{command} did not end in {timeout} s; it printed\n{out}\n{err}") from None
        raise
    if check:
        assert process.returncode == 0, f"{command} ended with {process.returncode}; it printed\n{out}\n{err[-5000:]}"
    return subprocess.CompletedProcess(list(map(str, command)), process.returncode, out, err)


def fork(function: Callable[[], object], printed: Path, method: str = "fork") -> BaseProcess:
    """Start a function in a process that has imported slow packages. The process ends with this one.

    Args:
        function: Function to run. In a forked copy of this process, it must not compute on a machine with CUDA.
        printed: File for all output.
        method: :data:`COMPUTING` for a function that computes and can be pickled.
    """
    printed.write_text("")  # exists even if the process ends before it opens the file
    process: BaseProcess = multiprocessing.get_context(method).Process(  # pyright: ignore[reportAttributeAccessIssue]
        target=_call, args=(function, printed), daemon=True
    )
    process.start()
    return process


def _call(function: Callable[[], object], printed: Path) -> None:
    # The copy must not destroy objects of the first process: an ONNX session would wait for its threads.
    gc.freeze()
    torch.set_num_threads(1)  # threads of the first process do not exist in the copy
    # The file stays open, because multiprocessing prints an exception after this function ends.
    sys.stdout = sys.stderr = printed.open("w", buffering=1, encoding="utf-8")
    function()


def join(process: BaseProcess, printed: Path) -> str:
    """Wait for a process of :func:`fork` and return its output. It must end in 300 s, with exit code 0."""
    process.join(300)
    output = printed.read_text(encoding="utf-8")
    # An exit code below 0 is the negative number of a signal; None means that the process still runs.
    assert process.exitcode == 0, f"the exit code is {process.exitcode}; {printed.name} contains\n{output}"
    return output


def run_ranks(function: Callable[[], object], folder: Path, processes: int, timeout: float = 300) -> None:
    """Run a function in several processes that form a group, like processes of ``torchrun``.

    If one process fails, or not all end within ``timeout`` seconds, all are killed.

    Args:
        function: Function to run. It must be picklable.
        folder: Folder for the output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    found |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}

    printed = [folder / f"printed-{rank}.txt" for rank in range(processes)]
    of_rank = [found | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    calls = [partial(_call_as_rank, function, own) for own in of_rank]
    members = [fork(call, path, COMPUTING) for call, path in zip(calls, printed, strict=True)]
    running = {member.sentinel: rank for rank, member in enumerate(members)}
    try:
        while running:
            ended = multiprocessing.connection.wait(list(running), timeout)
            assert ended, f"processes {[*running.values()]} did not end in {timeout} s"
            for rank in (running.pop(sentinel) for sentinel in ended):  # pyright: ignore[reportArgumentType]
                join(members[rank], printed[rank])
    finally:
        for member in members:
            member.kill()


def _call_as_rank(function: Callable[[], object], environment: Mapping[str, str]) -> None:
    os.environ |= environment
    function()
