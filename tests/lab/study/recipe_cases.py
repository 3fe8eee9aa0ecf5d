"""A recipe that trains in seconds, and its text."""

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attention_priors._io import write_json
from attention_priors.lab.results import Results
from attention_priors.lab.study import ImageRecipe, Recipe, compare, load_recipe
from attention_priors.lab.study.compare import load_study

RECIPE: dict[str, Any] = {
    "name": "Tiny",
    "corpus": {"source": "texts"},
    "tokenizer": 300,
    "model": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "training": {
        "context_length": 150,
        "steps": 120,
        "batch_size": 2,
        "learning_rate": 0.01,
        "passkey_ratio": 0.5,
        "checkpoint_steps": 40,
    },
    "evaluation": {
        "passkey": {"lengths": [150, 160, 170], "depths": 2},
        "perplexity": {"length": 100, "documents": 1},
        "chunk": 64,
    },
    "seeds": [3],
    "schemes": {
        "ALiBi": {"prior": "laplace"},
        "BAM + SSMax": {
            "prior": {"name": "generalized_gaussian", "init": "roles"},
            "logit_scale": "ssmax",
            "training": {"steps": 3},
            "evaluation": {"tolerance": 0.01},
        },
    },
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with changes such as ``{"training.steps": 5}``; ``...`` removes a key."""
    recipe = copy.deepcopy(RECIPE)
    for path, value in changes.items():
        place = recipe
        *parents, last = path.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return recipe


def write_texts(folder: Path) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(2, 8))) for _ in range(300)]
    folder.mkdir()
    for index in range(8):
        (folder / f"{index}.txt").write_text(" ".join(draw.choices(words, k=300)) + "\n")
    return folder


def write_genome(path: Path) -> Path:
    """Write a random genome of two records in which each unit of 20 bases occurs twice in a row."""
    draw = random.Random(0)
    with path.open("w", encoding="ascii") as file:
        for name, units in {"chr1": 150, "chr2": 50}.items():
            bases = "".join(2 * "".join(draw.choices("ACGT", k=20)) for _ in range(units))
            file.write(f">{name}\n{bases}\n")
    return path


def carry_out(recipe: Recipe | ImageRecipe, output: Path, only: Sequence[str] = ()) -> Results:
    """Compare as ``compare`` does, but run the schemes in this process, because new processes take long."""
    study, threads = load_study(recipe, output / "cache"), torch.get_num_threads()
    torch.set_num_threads(recipe.threads_per_run)
    study.check()
    for seed in recipe.seeds:
        for scheme in only or recipe.schemes:
            for path, content in study.identities(output, scheme, seed).items():
                write_json(path, content)
            study.execute(output, scheme, seed, lambda stage, done, total: None)
    torch.set_num_threads(threads)
    return compare(recipe, output, only=only, console=Console(quiet=True))


def decoder_recipe(path: Path) -> Recipe:
    """Return a recipe that trains decoders."""
    recipe = load_recipe(path)
    assert isinstance(recipe, Recipe)
    return recipe


def of_kind(rows: list[dict[str, Any]], kind: str, /, **values: Any) -> list[dict[str, Any]]:
    """Return the rows of results of a kind with these values."""
    return [row for row in rows if row["row"] == kind and values.items() <= row.items()]
