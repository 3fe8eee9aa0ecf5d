"""Train short, test long: recipes, runs and comparisons."""

from attention_priors.experiments.compare import RunFailedError, compare
from attention_priors.experiments.images import ImageRecipe
from attention_priors.experiments.recipe import Recipe
from attention_priors.experiments.studies import load_recipe
from attention_priors.strict_yaml import RecipeError

__all__ = ["ImageRecipe", "Recipe", "RecipeError", "RunFailedError", "compare", "load_recipe"]
