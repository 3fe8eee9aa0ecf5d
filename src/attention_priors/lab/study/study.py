"""What a comparison needs to know of the runs that it carries out, whatever is trained in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, Field

Progress = Callable[[str, int, int], None]
"""Called with the stage, what is done of it and how much there is of it."""


def _distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be distinct, got {list(seeds)}")
    return seeds


Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...], Field(min_length=1), AfterValidator(_distinct)]
"""As a recipe holds them."""


class AnyRecipe(Protocol):
    """What all recipes of comparisons have: schemes and seeds, whose pairs are the runs."""

    @property
    def name(self) -> str:
        """What the comparison is called."""
        ...

    @property
    def seeds(self) -> Sequence[int]:
        """Distinct."""
        ...

    @property
    def schemes(self) -> Mapping[str, Any]:
        """By name, in the order in which they are shown."""
        ...

    @property
    def threads_per_run(self) -> int:
        """Of PyTorch."""
        ...

    @property
    def processes(self) -> int | None:
        """Runs at a time at most; None: as many as there are cores for."""
        ...

    def model_dump(self, *, mode: str = ..., exclude_defaults: bool = ...) -> dict[str, Any]:
        """As plain JSON."""
        ...


class Study(ABC):
    """A recipe, and all that its runs read, made ready."""

    @property
    @abstractmethod
    def recipe(self) -> AnyRecipe:
        """What is carried out."""

    @property
    def left_out(self) -> str | None:
        """What a user should know of files that are not used."""
        return None

    @abstractmethod
    def check(self) -> None:
        """Raise a RecipeError if something that the recipe asks for cannot be made."""

    @abstractmethod
    def identities(self, output: Path, scheme: str, seed: int) -> Mapping[Path, dict[str, Any]]:
        """What the files ``identity.json`` of a run must hold: everything that determines its results."""

    @abstractmethod
    def is_finished(self, output: Path, scheme: str, seed: int) -> bool:
        """Whether nothing of a run is left to do."""

    @abstractmethod
    def stages(self, scheme: str) -> dict[str, float]:
        """Roughly how much of a run's time each of its stages takes; the estimate of the time left depends on it."""

    @abstractmethod
    def execute(self, output: Path, scheme: str, seed: int, progress: Progress) -> None:
        """Carry out one run, going on from whatever there is, every step on disk when it is done."""

    @abstractmethod
    def collect(self, output: Path, runs: Sequence[tuple[str, int]], wall_seconds: float) -> list[dict[str, Any]]:
        """Return the rows of finished runs, which :mod:`attention_priors.lab.results` describes."""
