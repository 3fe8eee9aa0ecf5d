"""Process that executes one run and reports its progress to its parent.

``python -m attention_priors.lab.study.worker RECIPE.json OUTPUT SCHEME SEED WAIT`` writes one line of JSON per step to
standard output: ``{"stage": ..., "done": ..., "total": ...}``. Standard input must be a pipe; the process ends when the
pipe closes. The exit code is :data:`~attention_priors.lab.study.workers.TAKEN` if another process still executes the
run after WAIT seconds. It is :data:`~attention_priors.lab.study.workers.FINISHED` if the run is already finished.
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
from attention_priors.lab.process import set_up_process
from attention_priors.lab.study.compare import load_study, recipe_of
from attention_priors.lab.study.runs import run_folder
from attention_priors.lab.study.workers import FINISHED, TAKEN


def main(recipe_file: str, output: str, scheme: str, seed: str, wait: str) -> None:
    """Execute one run."""
    recipe = recipe_of(read_json(Path(recipe_file)), recipe_file)
    torch.set_num_threads(recipe.threads_per_run)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Standard output is reserved for progress lines; output of libraries goes to the log.
    channel, sys.stdout = sys.stdout, sys.stderr

    def progress(stage: str, done: int, total: int) -> None:
        try:
            print(json.dumps({"stage": stage, "done": done, "total": total}), file=channel, flush=True)
        except BrokenPipeError:
            # The parent is gone, and the thread that watches standard input has not noticed yet.
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
    """End this process when standard input closes, which means that the parent has ended in some way.

    The process may end at any moment, because files are replaced as a whole or extended line by line.
    """

    def wait() -> None:
        # Read without a buffer: its lock would block the normal exit of this process.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    set_up_process()
    main(*sys.argv[1:])
