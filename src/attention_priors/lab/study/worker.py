"""The process that carries out one run and reports its progress to its parent.

``python -m attention_priors.lab.study.worker RECIPE.json OUTPUT SCHEME SEED WAIT`` writes a line of JSON per step
to standard output: ``{"stage": ..., "done": ..., "total": ...}``. Its standard input must be a pipe that stays open:
when it ends, so does the process. If another process is still carrying out the run after WAIT seconds, the exit code is
:data:`~attention_priors.lab.study.workers.TAKEN`; if the run is finished already,
:data:`~attention_priors.lab.study.workers.FINISHED`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers.utils import logging

from attention_priors._io import read_json
from attention_priors.lab.output_folder import FolderInUseError, sole_writer
from attention_priors.lab.study.compare import load_study, recipe_of
from attention_priors.lab.study.runs import run_folder
from attention_priors.lab.study.workers import FINISHED, TAKEN


def main(recipe_file: str, output: str, scheme: str, seed: str, wait: str) -> None:
    """Carry out one run."""
    recipe = recipe_of(read_json(Path(recipe_file)), recipe_file)
    torch.set_num_threads(recipe.threads_per_run)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Standard output belongs to the protocol; whatever a library prints goes to the log.
    channel, sys.stdout = sys.stdout, sys.stderr

    def progress(stage: str, done: int, total: int) -> None:
        try:
            print(json.dumps({"stage": stage, "done": done, "total": total}), file=channel, flush=True)
        except BrokenPipeError:
            # The parent is gone, and the thread that waits for its end has not noticed yet.
            os._exit(1)

    _end_with_the_parent()
    with ExitStack() as held:
        try:
            held.enter_context(sole_writer(run_folder(Path(output), scheme, int(seed)), wait=float(wait)))
        except FolderInUseError:
            sys.exit(TAKEN)
        study = load_study(recipe, Path(output) / "cache")
        if study.is_finished(Path(output), scheme, int(seed)):
            sys.exit(FINISHED)
        study.execute(Path(output), scheme, int(seed), progress)


def _end_with_the_parent() -> None:
    """End this process when standard input ends: the parent holds its other end, and is gone, however it died.

    What is written is whole or appended line by line, so any moment will do.
    """

    def wait() -> None:
        # Not through a buffer, whose lock would be in the way when this process ends by itself.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
