"""One recipe on one process and on two gives equal losses and weights."""

from __future__ import annotations

import json
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from attention_priors.lab.cli import app
from attention_priors.lab.train import run_recipe
from attention_priors.lab.train.recipe import TrainRecipe
from processes import run_command, run_ranks
from thoroughness import every_other_deep

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
POSITIONS = {"prior": {"name": "generalized_gaussian", "init": "spread"}, "logit_scale": {"name": "ssmax", "init": 0.4}}
TRAINING = {
    "context_length": 24,
    "steps": 10,
    "batch_size": 4,
    "learning_rate": 0.02,
    "warmup_steps": 2,
    "prior_learning_rate_multiplier": 10.0,
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# Without --multi_gpu, and with --cpu, the launcher starts one process for any --num_processes.
ACCELERATE = (
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
)  # fmt: skip


def trained(launcher: tuple[str, ...] | None, recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train by a command that starts the processes, or in this process. Return the content of ``training.json``."""
    path = folder / f"{recipe['name']}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    output = folder / recipe["name"]
    arguments = ["train", str(path), "--output", str(output)]
    if launcher is None:
        run_ranks(partial(app, arguments), folder, processes=2)
    else:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        run_command([*launcher, "-m", "attention_priors", *arguments], environment=environment)
    return json.loads((output / "training.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> dict[str, Any]:
    """Return a recipe whose tokens the first training prepares."""
    generator = random.Random(0)
    words = ["".join(generator.choices("aeioustrnlm", k=generator.randint(1, 7))) for _ in range(200)]
    for number in range(30):
        text = folder / "text" / f"{number}.txt"
        text.parent.mkdir(exist_ok=True)
        text.write_text(" ".join(generator.choices(words, k=120)))
    return {
        "name": "alone",
        "model": {"decoder": SIZES | POSITIONS},
        "data": {"text": str(folder / "text")},
        "tokenizer": 300,
        "training": TRAINING,
        "running": {"log_every": 1},
    }


@pytest.fixture(scope="module")
def alone(recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    return run_recipe(TrainRecipe.model_validate(recipe), folder / "alone")


LAUNCHERS: list[tuple[str, tuple[str, ...] | None, dict[str, Any]]] = [
    ("copies", None, {"rows_at_a_time": 1}),
    ("torchrun", TORCHRUN, {"rows_at_a_time": 1}),
    ("accelerate", ACCELERATE, {}),
]


@pytest.mark.parametrize("how", every_other_deep(LAUNCHERS, quick=LAUNCHERS[:1]), ids=lambda how: how[0])
def test_two_processes_match_one(
    recipe: dict[str, Any],
    alone: dict[str, Any],
    folder: Path,
    how: tuple[str, tuple[str, ...] | None, dict[str, Any]],
) -> None:
    name, launcher, running = how
    together = {key: value for key, value in recipe.items() if key != "tokenizer"} | {
        "name": name,
        "data": {"shards": str(folder / "alone" / "data")},
        "running": recipe["running"] | running,
    }
    found = trained(launcher, together, folder)
    assert (alone["processes"], found["processes"]) == (1, 2)
    losses, expected = ([entry["loss"] for entry in result["history"]] for result in (found, alone))
    assert len(expected) == TRAINING["steps"]
    assert expected[-1] < expected[0] - 0.2
    assert losses == pytest.approx(expected, abs=1e-4)
    weights, of_one = (load_file(folder / run / "model" / "model.safetensors") for run in (name, "alone"))
    assert weights.keys() == of_one.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, of_one[key], rtol=1e-3, atol=1e-4, msg=key)
