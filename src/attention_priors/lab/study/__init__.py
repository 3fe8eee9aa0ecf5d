"""Train short, test long: recipes, runs and comparisons."""

from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study.compare import RunFailedError, compare, load_recipe
from attention_priors.lab.study.images import ImageRecipe
from attention_priors.lab.study.recipe import Recipe

__all__ = ["ImageRecipe", "Recipe", "RecipeError", "RunFailedError", "compare", "load_recipe"]
