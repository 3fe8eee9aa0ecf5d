"""Train short, test long: recipes, runs and comparisons."""

from attention_priors.experiments.compare import RunFailedError, compare
from attention_priors.experiments.recipe import Recipe, load_recipe
from attention_priors.strict_yaml import RecipeError

__all__ = ["Recipe", "RecipeError", "RunFailedError", "compare", "load_recipe"]
