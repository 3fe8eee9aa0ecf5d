"""Other processes, which tests start and never wait for without end."""

import multiprocessing
import multiprocessing.connection
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch

FORKS = pytest.mark.skipif(
    sys.platform == "win32" or torch.cuda.is_available(), reason="a copy of a process that uses CUDA cannot compute"
)


def run_command(
    command: Sequence[str | Path],
    *,
    timeout: float = 300,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, which with ``check`` must be a good one; gives all that it printed.

    One that takes longer than ``timeout`` seconds is killed together with the processes that it started:
    :func:`subprocess.run` kills the first one only, and then waits until the others close what they print to.
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


def fork(function: Callable[[], object], printed: Path) -> BaseProcess:
    """Start a function in a copy of this process, which has imported what takes others seconds; ends with this one.

    Args:
        function: may compute on the CPU alone.
        printed: file for all that it prints.
    """

    def call() -> None:
        torch.set_num_threads(1)  # the threads of the first process are not there
        with printed.open("w", buffering=1, encoding="utf-8") as sys.stdout:
            sys.stderr = sys.stdout
            function()

    process = multiprocessing.get_context("fork").Process(target=call, daemon=True)
    process.start()
    return process


def run_ranks(function: Callable[[], object], folder: Path, processes: int, timeout: float = 300) -> None:
    """Run a function in several copies of this process that find each other, as those that ``torchrun`` starts do.

    If one fails, or not all end within ``timeout`` seconds, all of them are killed.

    Args:
        function: may compute on the CPU alone.
        folder: for what they print.
    """
    from accelerate.state import AcceleratorState

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    found |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}

    def call(rank: int) -> None:
        os.environ |= found | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        AcceleratorState._reset_state(reset_partial_state=True)  # that of the first process, alone
        function()

    printed = [folder / f"printed-{rank}.txt" for rank in range(processes)]
    members = [fork(lambda rank=rank: call(rank), path) for rank, path in enumerate(printed)]
    running = {member.sentinel: rank for rank, member in enumerate(members)}
    try:
        while running:
            ended = multiprocessing.connection.wait(list(running), timeout)
            assert ended, f"processes {[*running.values()]} did not end in {timeout} s"
            for rank in (running.pop(sentinel) for sentinel in ended):  # pyright: ignore[reportArgumentType]
                members[rank].join()
                assert members[rank].exitcode == 0, f"process {rank} failed; it printed\n{printed[rank].read_text()}"
    finally:
        for member in members:
            member.kill()
