"""Train short, test long: recipes, runs and comparisons."""

from attention_priors.experiments.compare import RunFailedError, compare
from attention_priors.experiments.recipe import Recipe, RecipeError, load_recipe

__all__ = ["Recipe", "RecipeError", "RunFailedError", "compare", "load_recipe"]
