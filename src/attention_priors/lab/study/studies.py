"""The kinds of comparisons there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attention_priors.lab.strict_yaml import read_yaml, validated
from attention_priors.lab.study.decoders import DecoderStudy
from attention_priors.lab.study.images import ImageRecipe, ImageStudy
from attention_priors.lab.study.recipe import Recipe
from attention_priors.lab.study.study import Study


def load_recipe(path: Path) -> Recipe | ImageRecipe:
    """Read and check a recipe: of classifiers of images where it says ``images``, else of decoders.

    Raises:
        RecipeError: if the file is not YAML, or a key or value is impossible; it names the key, its value and
            what is allowed.
        FileNotFoundError: if there is no such file.
    """
    return recipe_of(read_yaml(path), str(path))


def recipe_of(content: dict[str, Any], place: str) -> Recipe | ImageRecipe:
    """What a file holds, checked.

    Raises:
        RecipeError: as :func:`load_recipe`; it names the place.
    """
    return validated(content, ImageRecipe if "images" in content else Recipe, place)


def load_study(recipe: Recipe | ImageRecipe, cache: Path) -> Study:
    """Make ready what a recipe's runs read.

    Raises:
        ValueError: something cannot be read.
        OSError: likewise.
    """
    return ImageStudy(recipe) if isinstance(recipe, ImageRecipe) else DecoderStudy(recipe, cache)
