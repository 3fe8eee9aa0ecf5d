"""Carries out one evaluation in child processes: one that lives, then some that it kills at random moments.

``python evaluation_nursery.py WHOLE KILLED KILLS SEED ARGUMENTS...``; run apart, since it forks. It imports once, so
that a child's life is the command and nothing else. Writes a line for each child that was to be killed: whether it was,
and how large the results were before and after.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

# What the command imports when it runs.
import attention_priors.lab.evaluate
import attention_priors.lab.report  # noqa: F401
from attention_priors.lab.cli import app


def start(output: Path, arguments: list[str]) -> int:
    """Run the command in a child; gives its id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = app(["evaluate", *arguments, "--output", str(output)], standalone_mode=False) or 0
        finally:
            os._exit(code)
    return process


def let_live(output: Path, arguments: list[str]) -> None:
    """Run the command in a child that nobody kills."""
    _, status = os.waitpid(start(output, arguments), 0)
    if status:
        sys.exit(f"the command failed: {os.waitstatus_to_exitcode(status)}")


def size(path: Path) -> int:
    """In bytes; 0 for a file that is not there."""
    return path.stat().st_size if path.exists() else 0


def main(whole: str, killed: str, kills: str, seed: str, *arguments: str) -> None:
    """Let one live; then kill, and kill again, and let the last one live."""
    let_live(Path(whole), list(arguments))
    draw = random.Random(int(seed))
    results = Path(killed) / "results.jsonl"
    complete = size(Path(whole) / "results.jsonl")
    for _ in range(int(kills)):
        before = size(results)
        process = start(Path(killed), list(arguments))
        # Some moment within the next part of the work, however fast the machine is.
        wanted = before + draw.uniform(0, 0.15) * complete
        deadline = time.monotonic() + 20
        while (
            size(results) < wanted
            and time.monotonic() < deadline
            and not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ):
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.02))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        # A crash of the machine may also leave half a line.
        content = results.read_bytes() if results.exists() else b""
        if content and draw.random() < 0.3:
            results.write_bytes(content[: -draw.randint(1, min(len(content), 60))])
        print(json.dumps({"killed": os.WIFSIGNALED(status), "before": before, "after": size(results)}), flush=True)
    let_live(Path(killed), list(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
