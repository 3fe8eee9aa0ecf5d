"""The process that carries out one run and tells its parent how far it is.

``python -m attention_priors.experiments.worker RECIPE.json OUTPUT SCHEME SEED`` writes a line of JSON per step
to standard output: ``{"stage": ..., "done": ..., "total": ...}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from attention_priors.experiments.studies import load_study, recipe_of
from attention_priors.files import read_json


def main(recipe_file: str, output: str, scheme: str, seed: str) -> None:
    """Carry out one run."""
    recipe = recipe_of(read_json(Path(recipe_file)), recipe_file)
    torch.set_num_threads(recipe.threads_per_run)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Standard output belongs to the protocol; whatever a library prints goes to the log.
    channel, sys.stdout = sys.stdout, sys.stderr

    def progress(stage: str, done: int, total: int) -> None:
        print(json.dumps({"stage": stage, "done": done, "total": total}), file=channel, flush=True)

    load_study(recipe, Path(output) / "cache").execute(Path(output), scheme, int(seed), progress)


if __name__ == "__main__":
    main(*sys.argv[1:])
