"""Recipes that come with the package, found by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import attention_priors
from attention_priors.lab.strict_yaml import read_yaml

COMMANDS = {"schemes": "compare", "parts": "bench"}
"""Command of a recipe by a key that only its recipes have; all other recipes are for ``train``."""


@dataclass(frozen=True)
class NamedRecipe:
    """Recipe that comes with the package."""

    path: Path
    description: str
    command: str
    """Command that takes the recipe: ``compare``, ``train`` or ``bench``."""

    @staticmethod
    def read(path: Path) -> NamedRecipe:
        """Read the description of a recipe, and find its command."""
        content = read_yaml(path)
        command = next((command for key, command in COMMANDS.items() if key in content), "train")
        return NamedRecipe(path, content["description"], command)


def recipe_paths() -> dict[str, Path]:
    """Return the recipes that come with the package: paths of their files by name, which is the file's stem."""
    package = Path(attention_priors.__file__).parent
    folders = [package / "recipes"]
    if not folders[0].is_dir():  # an editable installation, which leaves recipes where they are in the repository
        folders = [package.parents[1] / "recipes", package.parents[1] / "benchmarks"]
    return {path.stem: path for folder in folders for path in sorted(folder.rglob("*.yaml"))}


def recipe_path(name: str) -> Path:
    """Return the path of a recipe that comes with the package.

    Raises:
        ValueError: the name is unknown; the message lists the names.
    """
    paths = recipe_paths()
    if name not in paths:
        raise ValueError(f"unknown recipe {name!r}; expected one of {', '.join(paths)}")
    return paths[name]


def find_recipe(given: Path, command: str) -> Path:
    """Return the path of a recipe that is given by its path or by its name. Paths win over names.

    Args:
        given: path or name.
        command: command that takes the recipe.

    Raises:
        FileNotFoundError: there is neither such a file nor such a recipe of this command; the message lists the names.
    """
    if given.exists() and not given.is_dir():
        return given
    paths = recipe_paths()
    path = paths.get(str(given))
    if path is not None and NamedRecipe.read(path).command == command:
        return path
    names = [name for name, path in paths.items() if NamedRecipe.read(path).command == command]
    raise FileNotFoundError(
        f"recipe {str(given)!r} is neither a file nor the name of a recipe; expected the path of a YAML file, or one "
        f"of {', '.join(names)}"
    )
