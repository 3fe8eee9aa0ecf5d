"""The recipes of docs/results: each runs, small, from its file to its report."""

from pathlib import Path
from typing import Any

import pytest
from recipe_cases import decoder_recipe, write_genome

from attention_priors.lab.report import write_report
from attention_priors.lab.results import Results
from attention_priors.lab.study import Recipe
from attention_priors.lab.study.materials import Materials
from attention_priors.lab.study.results import collect
from attention_priors.lab.study.run import execute, is_finished, run_folder

PROJECT = Path(__file__).parents[3]
RECIPES = sorted((PROJECT / "recipes" / "results").glob("*.yaml"))

pytestmark = pytest.mark.skipif(not RECIPES, reason="not a checkout of the project")

MOST = 3
"""Schemes of a recipe, and ways to extend one; they are spread over all it has."""


def small(recipe: Recipe, folder: Path) -> Recipe:
    """The same recipe with little to train, little to read and little to do."""
    content = recipe.model_dump(mode="json")
    content["seeds"] = [0]
    if content["corpus"]["source"] is not None:
        content["corpus"]["max_characters"] = 100_000
    # A small text in place of a package's; a genome is drawn, as packages that have one need not be there.
    package = str(write_genome(folder / "genome.fa")) if recipe.tokenizer == "nucleotides" else "package:jinja2"
    if (content["corpus"]["source"] or "").startswith("package:"):
        content["corpus"]["source"] = package
    for section in _everywhere(content, "model"):
        section |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    for section in _everywhere(content, "training"):
        for key in ("steps", "tokens"):
            if section.get(key) is not None:
                section[key] = 1
    for ways in _everywhere(content, "extensions"):
        for name in {*ways}.difference(spread([*ways])):
            del ways[name]
            content["panels"] = {}  # which name them
        for way in ways.values():
            way["steps"] = min(1, way.get("steps", 1))
    for section in _everywhere(content, "evaluation"):
        if section.get("passkey"):
            section["passkey"] |= {"lengths": sorted(section["passkey"]["lengths"])[:2], "depths": 2, "trials": 1}
        if section.get("perplexity"):
            section["perplexity"] |= {"length": 256, "documents": 1}
        if section.get("copying"):
            section["copying"] |= {"lengths": sorted(section["copying"]["lengths"])[:2], "tokens": 512}
        for plan in section.get("plans", {}).values():
            plan |= {"lengths": [min(plan["lengths"])], "depths": 2, "trials": 1, "documents": 1, "passes": 1}
            if plan.get("corpus", "").startswith("package:"):
                plan["corpus"] = package
    return Recipe.model_validate(content)


def spread(names: list[str]) -> list[str]:
    """A few of them, from the first on."""
    return names[:: max(1, len(names) // MOST)][:MOST]


def _everywhere(recipe: dict[str, Any], section: str) -> list[dict[str, Any]]:
    """A section of the recipe and of its schemes."""
    return [place[section] for place in (recipe, *recipe["schemes"].values()) if place.get(section)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_small_form_runs_from_the_recipe_to_the_report(path: Path, tmp_path: Path):
    recipe = small(decoder_recipe(path), tmp_path)
    materials = Materials.load(recipe, tmp_path / "cache")
    materials.check()
    chosen = spread([*recipe.schemes])
    for scheme in chosen:
        folder = run_folder(tmp_path, scheme, 0)
        folder.mkdir(parents=True)
        execute(materials, scheme, 0, folder, lambda stage, done, total: None)
        assert is_finished(recipe, tmp_path, scheme, 0)
    runs = [(scheme, 0) for scheme in chosen]
    results = Results.of(collect(recipe, tmp_path, runs, wall_seconds=1.0, corpus={"name": "small"}))
    assert {*results["run"].scheme} >= set(chosen)
    write_report(results, tmp_path)
    assert [*(tmp_path / "tables").iterdir()]
    assert [*(tmp_path / "figures").iterdir()]
