"""Export of a demo's models as the examples of the package.

``python -m attention_priors.lab.examples.export runs/demo --seed 3`` rounds the weights of one seed to bfloat16, and
checks that each model then still retrieves 19 of 20 pass keys at its training length. Nothing is written if a model
retrieves fewer. The tutorials ``inside-a-head`` and ``long-context`` describe the models. After an export, build
the site and read both.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from attention_priors._io import remove, replacing
from attention_priors.hf.loading import load_model
from attention_priors.lab.evaluate import evaluate
from attention_priors.lab.examples import EXAMPLES, TRAINED, example_folder
from attention_priors.lab.study.runs import run_folder
from attention_priors.lab.tasks import EvaluationPlan, Subject
from attention_priors.lab.tasks.passkey import ANSWER_LENGTH

ENOUGH = 0.95
"""Share of pass keys that each example must retrieve."""


def main() -> None:
    """Check the models of one seed, and replace the examples by them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, help="output folder of attention-priors compare demo")
    parser.add_argument("--seed", type=int, required=True, help="seed of the runs")
    asked = parser.parse_args()
    plan = EvaluationPlan(tasks=("passkey_corpus",), lengths=(TRAINED - ANSWER_LENGTH,), depths=20)
    with tempfile.TemporaryDirectory() as scratch:
        for name, scheme in EXAMPLES.items():
            source, rounded = run_folder(asked.comparison, scheme, asked.seed) / "model", Path(scratch) / name
            load_model(source, torch.bfloat16).save_pretrained(rounded)
            AutoTokenizer.from_pretrained(source).save_pretrained(rounded)
            subject = Subject.load(rounded, dtype="bfloat16", device="cpu")
            share = evaluate(subject, plan, Path(scratch) / "records").totals[0]["mean"]
            print(f"{name}: {share:.0%} of pass keys at {TRAINED} tokens, in bfloat16")
            if share < ENOUGH:
                raise SystemExit(f"{source} retrieves {share:.0%}, expected {ENOUGH:.0%} or more: try another seed")
        for name in EXAMPLES:
            remove(example_folder(name))
            with replacing(example_folder(name)) as unfinished:
                shutil.copytree(Path(scratch) / name, unfinished)


if __name__ == "__main__":
    main()
