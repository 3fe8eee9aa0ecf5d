"""Other processes, which tests start and never wait for without end."""

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import torch


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


def torchrun(program: Path, *arguments: str | Path, processes: int) -> None:
    """Run a program in several processes that find each other."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    run_command([*command, program, *arguments])


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
