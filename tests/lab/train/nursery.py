"""Run one recipe in child processes: first one that finishes, then several that are killed at random moments."""

import multiprocessing
import random
import signal
import time
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from attention_priors.lab.train import Observer, load_train_recipe, run_recipe
from attention_priors.lab.train.checkpoints import checkpoint_steps, last_complete
from processes import COMPUTING, fork, join


def start(recipe: Path, output: Path) -> tuple[BaseProcess, Connection]:
    """Start a child that runs the recipe. Return the process, and the stream in which it reports every step."""
    hearing, telling = multiprocessing.Pipe(duplex=False)
    process = fork(partial(_carry_out, recipe, output, telling), recipe.with_name("printed.txt"), COMPUTING)
    telling.close()
    return process, hearing


def _carry_out(recipe: Path, output: Path, telling: Connection) -> None:
    run_recipe(load_train_recipe(recipe), output, Observer(on_step=lambda step: telling.send_bytes(b"s")))


def hear(hearing: Connection, most: int | None = None) -> int:
    """Count the steps that a child reports until it ends, or up to ``most``."""
    heard = 0
    try:
        while heard != most:
            hearing.recv_bytes()
            heard += 1
    except EOFError:
        pass
    return heard


def let_live(recipe: Path, output: Path) -> None:
    """Run the recipe in a child that is not killed."""
    process, hearing = start(recipe, output)
    hear(hearing)
    join(process, recipe.with_name("printed.txt"))


def kill_at_random(recipe: Path, output: Path, kills: int, seed: int) -> list[dict[str, Any]]:
    """Kill several children, then let one finish.

    Return for each child that should be killed the step from which it resumed, and its number of steps.
    """
    draw = random.Random(seed)
    folder = output / "checkpoints"
    staging = folder / ".unfinished"
    lives = []
    for kill in range(kills):
        before = last_complete(folder) if folder.exists() else None
        process, hearing = start(recipe, output)
        heard = hear(hearing, draw.randint(0, 5))
        if kill % 2:
            # Every second child is killed while it writes a checkpoint.
            deadline = time.monotonic() + 5
            while not staging.exists() and time.monotonic() < deadline:
                time.sleep(0.0005)
            time.sleep(draw.uniform(0, 0.015))
        else:
            time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        lives.append(
            {
                "from": 0 if before is None else int(before.name.split("-")[1]),
                "steps": heard + hear(hearing),
                "killed": process.exitcode == -signal.SIGKILL,
                "half_written": staging.exists(),
                "checkpoints": checkpoint_steps(folder),
            }
        )
        hearing.close()
    let_live(recipe, output)
    return lives
