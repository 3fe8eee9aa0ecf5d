"""The recipes of docs/results: each of them runs, small, from its file to its report."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import decoder_recipe, write_genome

from attention_priors._io import read_json
from attention_priors.lab.report import illustrations, refresh_page, write_figures, write_report, write_tables
from attention_priors.lab.study import Recipe, materials
from attention_priors.lab.study.decoders import DecoderStudy
from attention_priors.lab.study.run_files import run_folder
from thoroughness import DEEP

PROJECT = Path(__file__).parents[3]
RECIPES = sorted((PROJECT / "recipes" / "results").glob("*.yaml"))
RESULTS = PROJECT / "docs" / "results"

pytestmark = pytest.mark.skipif(not RECIPES, reason="not a checkout of the project")

MOST = 3 if DEEP else 2
"""Schemes of a recipe, and ways to extend one; they are spread over all that it has."""


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
            plan |= {"lengths": [min(*plan["lengths"], 4096)], "depths": 2, "trials": 1, "documents": 1, "passes": 1}
            if plan.get("corpus", "").startswith("package:"):
                plan["corpus"] = package
    return Recipe.model_validate(content)


def spread(names: list[str]) -> list[str]:
    """A few of them, from the first on."""
    return names[:: max(1, len(names) // MOST)][:MOST]


def _everywhere(recipe: dict[str, Any], section: str) -> list[dict[str, Any]]:
    """A section of the recipe and of its schemes."""
    return [place[section] for place in (recipe, *recipe["schemes"].values()) if place.get(section)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers that several recipes share."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_small_form_runs_from_the_recipe_to_the_report(path: Path, tmp_path: Path, cache: Path, monkeypatch):
    monkeypatch.setattr(materials, "HELD_OUT_TOKENS", 2048)
    recipe = small(decoder_recipe(path), tmp_path)
    study = DecoderStudy(recipe, cache)
    study.check()
    chosen = spread([*recipe.schemes])
    for scheme in chosen:
        run_folder(tmp_path, scheme, 0).mkdir(parents=True)
        study.execute(tmp_path, scheme, 0, lambda stage, done, total: None)
        assert study.is_finished(tmp_path, scheme, 0)
    results = study.collect(tmp_path, [(scheme, 0) for scheme in chosen], 1.0)
    assert {row["scheme"] for row in results["runs"]} >= set(chosen)
    assert write_tables(results, tmp_path / "tables")
    if DEEP:
        drawn = [*illustrations(results)]
        assert len(write_figures(results, tmp_path / "figures", drawn)) == len(drawn) > 0
        write_report(results, tmp_path / "report.html", drawn)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_is_shown_was_made_by_the_recipe(path: Path):
    made = RESULTS / path.stem / "recipe.json"
    if not made.exists():
        pytest.skip("nothing has been made of it yet")
    recipe = decoder_recipe(path)
    assert Recipe.model_validate(read_json(made)) == recipe
    for scheme in recipe.schemes:
        for seed in recipe.seeds:
            described = run_folder(RESULTS / path.stem, scheme, seed) / "identity.json"
            if described.exists():
                found = read_json(described)
                assert found["seed"] == seed
                assert found["training"]["steps"] == recipe.training_of(scheme).steps
                assert found["evaluation"]["passkey"] == recipe.evaluation_of(scheme).model_dump(mode="json")["passkey"]


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*/README.md")), ids=lambda page: page.parent.name)
def test_pages_hold_the_tables_as_they_are(page: Path, tmp_path: Path):
    shutil.copy(page, tmp_path)
    shutil.copytree(page.parent / "tables", tmp_path / "tables")
    refresh_page(tmp_path)
    assert (tmp_path / page.name).read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted(RESULTS.rglob("README.md")), ids=lambda page: page.parent.name)
def test_pages_show_what_is_there(page: Path):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    gone = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not gone
