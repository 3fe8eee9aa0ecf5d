"""What a benchmark runs, checked before any work is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError, field_validator

from attention_priors.lab.bench.case import DTYPES, PASSES, Case, Pass
from attention_priors.lab.bench.ways import LINE_WAYS, WAYS
from attention_priors.lab.strict_yaml import RecipeError, Strict, explain, read_strictly


class Part(Strict):
    """Ways, side by side, in every pass and at every length."""

    lengths: tuple[Annotated[int, Field(ge=16)], ...] = Field(min_length=1)
    """Tokens; cached keys in decoding."""
    passes: tuple[Pass, ...] = Field(default=PASSES, min_length=1)
    ways: tuple[str, ...] = Field(default=LINE_WAYS, min_length=1)

    @field_validator("ways")
    @classmethod
    def _known(cls, ways: tuple[str, ...]) -> tuple[str, ...]:
        for name in ways:
            if name not in WAYS:
                raise ValueError(f"unknown way {name!r}; known are {', '.join(WAYS)}")
        return ways


class BenchRecipe(Strict):
    """A benchmark: parts that share everything but lengths, passes and ways."""

    name: str = Field(default="bench", min_length=1)
    description: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = Field(default_factory=torch.get_num_threads, gt=0)
    batch: int = Field(default=1, gt=0)
    heads: int = Field(default=8, gt=0)
    head_dim: int = Field(default=64, gt=0)
    repetitions: int = Field(default=9, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**32)
    parts: tuple[Part, ...] = Field(min_length=1)

    @field_validator("device")
    @classmethod
    def _there(cls, device: str) -> str:
        try:
            kind = torch.device(device).type
        except RuntimeError as error:
            raise ValueError(f"device must be cpu, cuda or cuda:N, got {device!r}") from error
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu, cuda or cuda:N, got {device!r}")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r}, but PyTorch sees no CUDA device")
        return device

    @field_validator("dtype")
    @classmethod
    def _measured(cls, dtype: str) -> str:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        return dtype

    def plan(self) -> dict[tuple[Pass, int], list[str]]:
        """The ways of each pass and length, in the catalogue's order, with the baselines that they need."""
        chosen: dict[tuple[Pass, int], set[str]] = {}
        for part in self.parts:
            for passing in part.passes:
                for length in part.lengths:
                    ways = chosen.setdefault((passing, length), set())
                    ways |= {*part.ways, *(WAYS[name].baseline for name in part.ways)}
        order = sorted(chosen, key=lambda cell: (cell[1], PASSES.index(cell[0])))
        return {cell: [name for name in WAYS if name in chosen[cell]] for cell in order}

    def case(self, passing: Pass, length: int) -> Case:
        """The case of a pass and a length."""
        return Case(passing, length, self.batch, self.heads, self.head_dim, DTYPES[self.dtype], self.device, self.seed)


def load_bench_recipe(path: Path) -> BenchRecipe:
    """Read and check a recipe.

    Raises:
        RecipeError: if a key or value is impossible; it names the key, its value and what is allowed.
        FileNotFoundError: if there is no such file.
    """
    return read_strictly(path, BenchRecipe)


def make_bench_recipe(**settings: Any) -> BenchRecipe:
    """A recipe of one part from the options of a command line.

    Raises:
        RecipeError: as :func:`load_bench_recipe`.
    """
    part = {key: settings.pop(key) for key in Part.model_fields if key in settings}
    try:
        return BenchRecipe.model_validate(settings | {"parts": [part]})
    except ValidationError as error:
        raise RecipeError(explain(error, BenchRecipe).replace("parts.0.", "")) from error
