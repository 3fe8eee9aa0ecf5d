"""Carries out one recipe in child processes: first one that lives, then some that it kills at random moments.

``python nursery.py RECIPE WHOLE KILLED KILLS SEED``; run apart, since it forks. It imports once, so that a child's
life is the run and nothing else. Writes one line for each child that was to be killed: the step that it went on from,
and how many it did.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from attention_priors.lab.train import Observer, load_train_recipe, run_recipe
from attention_priors.lab.train.checkpoints import checkpoint_steps, last_complete


def child(recipe: Path, output: Path, writing: int) -> None:
    """Carry the recipe out, telling the parent of every step."""

    def tell(step: int) -> None:
        os.write(writing, b"s")

    run_recipe(load_train_recipe(recipe), output, Observer(on_step=tell))


def start(recipe: Path, output: Path) -> tuple[int, int]:
    """Start a child; gives its id, and where it can be heard."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            child(recipe, output, writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return process, reading


def let_live(recipe: Path, output: Path) -> None:
    """Carry the recipe out in a child that nobody kills."""
    process, reading = start(recipe, output)
    while os.read(reading, 64):
        pass
    os.close(reading)
    _, status = os.waitpid(process, 0)
    if status:
        sys.exit(os.waitstatus_to_exitcode(status))


def main(recipe: str, whole: str, output: str, kills: str, seed: str) -> None:
    """Let one live; then kill, and kill again, and let the last one live."""
    let_live(Path(recipe), Path(whole))
    draw = random.Random(int(seed))
    folder = Path(output) / "checkpoints"
    staging = folder / ".unfinished"
    for kill in range(int(kills)):
        before = last_complete(folder) if folder.exists() else None
        process, reading = start(Path(recipe), Path(output))
        heard, wanted = 0, draw.randint(0, 5)
        while heard < wanted and (word := os.read(reading, 1)):
            heard += len(word)
        if kill % 2:
            # Every other one while a checkpoint is written.
            deadline = time.monotonic() + 5
            while not staging.exists() and time.monotonic() < deadline:
                time.sleep(0.0005)
            time.sleep(draw.uniform(0, 0.015))
        else:
            time.sleep(draw.uniform(0, 0.1))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        while word := os.read(reading, 64):
            heard += len(word)
        os.close(reading)
        print(
            json.dumps(
                {
                    "from": 0 if before is None else int(before.name.split("-")[1]),
                    "steps": heard,
                    "killed": os.WIFSIGNALED(status),
                    "half_written": staging.exists(),
                    "checkpoints": checkpoint_steps(folder),
                }
            ),
            flush=True,
        )
    let_live(Path(recipe), Path(output))


if __name__ == "__main__":
    main(*sys.argv[1:])
