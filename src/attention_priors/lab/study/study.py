"""A comparison as its runs and their parent see it, whatever is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, Field

if TYPE_CHECKING:
    from attention_priors.lab.study.images.recipe import ImageRecipe
    from attention_priors.lab.study.recipe import Recipe

Progress = Callable[[str, int, int], None]
"""Called with the stage, its finished work and its total work."""


def _distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be distinct, got {list(seeds)}")
    return seeds


Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...], Field(min_length=1), AfterValidator(_distinct)]
"""Seeds of a recipe."""

R = TypeVar("R", bound="Recipe | ImageRecipe")


class Study(ABC, Generic[R]):
    """A recipe, and all that its runs read.

    Attributes:
        recipe: Names the schemes and seeds, whose pairs are the runs.
        left_out: Files of the corpus that are not used, for the user; None if all are used.
    """

    recipe: R
    left_out: str | None = None

    @abstractmethod
    def check(self) -> None:
        """Raise a RecipeError if something that the recipe asks for cannot be made."""

    @abstractmethod
    def identities(self, output: Path, scheme: str, seed: int) -> Mapping[Path, dict[str, Any]]:
        """Return the content of each ``identity.json`` of a run: everything that determines its results."""

    @abstractmethod
    def is_finished(self, output: Path, scheme: str, seed: int) -> bool:
        """Return whether nothing of a run is left to do."""

    @abstractmethod
    def stages(self, scheme: str) -> dict[str, float]:
        """Return the stages of a run, and roughly the share of its time that each takes."""

    @abstractmethod
    def execute(self, output: Path, scheme: str, seed: int, progress: Progress) -> None:
        """Carry out one run from where it stopped. Every finished step is on disk."""

    @abstractmethod
    def collect(self, output: Path, runs: Sequence[tuple[str, int]], wall_seconds: float) -> list[dict[str, Any]]:
        """Return the rows of finished runs, which :mod:`attention_priors.lab.results` describes."""
