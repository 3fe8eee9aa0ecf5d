"""The referee's recipe: its settings are those of the best trials, and a quick form of it measures everything."""

from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import carry_out, decoder_recipe, write_texts

from attention_priors.lab.report.tables import best_trials
from attention_priors.lab.results import Results, read_rows
from attention_priors.lab.strict_yaml import read_yaml
from attention_priors.lab.study import Recipe
from attention_priors.lab.study.recipe import POSITION_FIELDS

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes/results/referee.yaml"

OF_PAPERS = {"FoX": 2, "SWAN": 2, "iRoPE": 2}
"""Number of starts of a scheme that come from its literature, which are its first; 1 for schemes not listed."""


def _described(recipe: Recipe, scheme: str) -> tuple[Any, ...]:
    return recipe.schemes[scheme].model_dump(include=POSITION_FIELDS), recipe.training_of(scheme)


def test_schemes_are_those_of_the_best_trials():
    """Each scheme has the best of its literature's starts and the best of its other starts."""
    results = Results.read(ROOT / "docs/results/referee-tuning")
    lines = [[*map(str, line)] for line in best_trials(results).lines]
    for before, line in pairwise(lines):
        line[0] = line[0] or before[0]
    farthest = results["retrieval"].query("length == 8192").groupby("scheme", observed=True)
    shares = farthest.correct.sum() / farthest.trials.sum()
    trials, wanted, far = decoder_recipe(ROOT / "recipes/results/referee-tuning.yaml"), {}, set[str]()
    for kind, end in (("without", ""), ("with", "+SSMax")):
        of_kind = [line for line in lines if line[1] == kind]
        for scheme, starts in groupby(of_kind, lambda line: line[0].partition(",")[0]):
            found, number = [*starts], OF_PAPERS.get(scheme, 1)
            for part in filter(None, (found[:number], found[number:])):
                name, _, setting, *_ = min(part, key=lambda line: (-float(line[4]), float(line[5])))
                trial = f"{name} · {setting.replace(', ', ' · ')}"
                wanted[name + end] = _described(trials, trial)
                far |= {name + end} if shares.get(trial, 0) >= 0.95 else set()
    recipe = decoder_recipe(RECIPE)
    assert {name: _described(recipe, name) for name in recipe.schemes} == wanted
    assert {name for name in recipe.schemes if "256 times" in dict(recipe.plans_of(name))} == far


@pytest.fixture
def quick(tmp_path: Path) -> Recipe:
    """Return the recipe with all schemes, plans and extensions, but small models, two steps and few short texts."""
    content, texts = read_yaml(RECIPE), str(write_texts(tmp_path / "texts"))
    content |= {"corpus": {"source": texts}, "tokenizer": 300, "seeds": content["seeds"][:1]}
    content["model"] |= {"hidden_size": 16, "intermediate_size": 16}
    content["training"] |= {"steps": 2, "batch_size": 1, "passkey_minimum_length": None}
    content["evaluation"]["passkey"] |= {"lengths": [123], "depths": 2}
    content["evaluation"]["perplexity"] |= {"length": 128, "documents": 1}
    schemes = content["schemes"].values()
    for plans in (part.get("evaluation", {}).get("plans", {}) for part in (content, *schemes)):
        for plan in plans.values():
            plan |= {"lengths": [1024]} | ({"corpus": texts, "documents": 1} if "corpus" in plan else {"depths": 2})
    for way in (way for scheme in schemes for way in scheme.get("extensions", {}).values() if way):
        way |= {"context_length": 1024} | ({"steps": 1, "batch_size": 1} if way["steps"] else {})
    return Recipe.model_validate(content)


def test_the_quick_form_measures_everything(quick: Recipe, tmp_path: Path):
    shown = ["RoPE", "Shaw's bias, local layers first+SSMax"]  # with all kinds of extensions
    results = carry_out(quick, tmp_path / "out", only=shown)
    rows = read_rows(tmp_path / "out")
    for scheme in shown:
        for name in (model.name for model in quick.models_of(scheme)):
            plans = {row["plan"] for row in rows if row.get("scheme") == name and "plan" in row}
            assert plans == {plan for plan, _ in quick.plans_of(scheme)}
    assert results.names == [model.name for scheme in shown for model in quick.models_of(scheme)]
