"""Run one evaluation in child processes: one that finishes, and several that are killed at random moments."""

import random
import signal
import time
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Import what the command imports, so that a child spends its life on the command.
import attention_priors.lab.evaluate
import attention_priors.lab.report  # noqa: F401
from attention_priors.lab.cli import app
from processes import COMPUTING, fork, join


def start(output: Path, arguments: list[str]) -> BaseProcess:
    """Start a child that runs the command."""
    words = ["evaluate", *arguments, "--output", str(output)]
    return fork(partial(app, words), output.with_name("printed.txt"), COMPUTING)


def let_live(output: Path, arguments: list[str]) -> None:
    """Run the command in a child that is not killed."""
    join(start(output, arguments), output.with_name("printed.txt"))


def size(path: Path) -> int:
    """Return a file's size in bytes, or 0 if the file is missing."""
    return path.stat().st_size if path.exists() else 0


def kill_at_random(output: Path, arguments: list[str], complete: int, kills: int, seed: int) -> list[dict[str, Any]]:
    """Kill several children, then let one finish. ``complete`` is the size of all results.

    Return for each child that should be killed whether it was killed, and the size of the results before and after.
    """
    draw = random.Random(seed)
    results = output / "results.jsonl"
    lives = []
    for _ in range(kills):
        before = size(results)
        process = start(output, arguments)
        # A moment within the next part of the work, on a machine of any speed.
        wanted = before + draw.uniform(0, 0.15) * complete
        deadline = time.monotonic() + 20
        while size(results) < wanted and time.monotonic() < deadline and process.is_alive():
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.02))
        process.kill()
        process.join()
        # A crash of the machine may also leave half a line.
        content = results.read_bytes() if results.exists() else b""
        if content and draw.random() < 0.3:
            results.write_bytes(content[: -draw.randint(1, min(len(content), 60))])
        lives.append({"killed": process.exitcode == -signal.SIGKILL, "before": before, "after": size(results)})
    let_live(output, arguments)
    return lives
