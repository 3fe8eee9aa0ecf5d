import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_priors.lab.train import run_recipe
from attention_priors.lab.train.recipe import TrainRecipe

DECODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
    "prior": {"name": "generalized_gaussian", "init": "spread"},
    "logit_scale": {"name": "ssmax", "init": 0.2},
}


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of text files."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(2, 8))) for _ in range(300)]
    folder = tmp_path_factory.mktemp("texts")
    for index in range(12):
        (folder / f"{index}.txt").write_text(" ".join(draw.choices(words, k=150)) + "\n")
    return folder


@pytest.fixture(scope="session")
def recipe_of(texts: Path) -> Callable[..., dict[str, Any]]:
    """Return a recipe that trains in a second, with changes to its sections."""

    def make(**changes: Any) -> dict[str, Any]:
        recipe: dict[str, Any] = {
            "name": "Tiny",
            "model": {"decoder": DECODER},
            "tokenizer": 300,
            "data": {"text": str(texts), "shard_tokens": 3000},
            "training": {
                "context_length": 24,
                "steps": 12,
                "tokens_per_step": 96,
                "learning_rate": 0.01,
                "checkpoint_steps": 4,
            },
            "running": {"rows_at_a_time": 2},
        }
        for key, value in changes.items():
            # With prepared tokens, a recipe must not say how text becomes tokens.
            sections = isinstance(value, dict) and key != "model" and "shards" not in value
            recipe[key] = recipe.get(key, {}) | value if sections else value
        return recipe

    return make


@pytest.fixture
def make_recipe(recipe_of: Callable[..., dict[str, Any]]) -> Callable[..., TrainRecipe]:
    return lambda **changes: TrainRecipe.model_validate(recipe_of(**changes))


@pytest.fixture
def write_recipe(recipe_of: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        path = tmp_path / "tiny.yaml"
        path.write_text(json.dumps(recipe_of(**changes)))  # JSON is YAML
        return path

    return write


@pytest.fixture(scope="session")
def finished(recipe_of: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished training, which tests must not change."""
    output = tmp_path_factory.mktemp("runs") / "tiny"
    run_recipe(TrainRecipe.model_validate(recipe_of(validation={"every": 5, "tokens": 200})), output)
    return output
