"""Comparisons of decoders: schemes are trained on the same rows and tested on the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention_priors.lab.study.folders import run_folder
from attention_priors.lab.study.materials import Materials
from attention_priors.lab.study.recipe import Recipe
from attention_priors.lab.study.results import collect
from attention_priors.lab.study.run import execute, identities, is_finished
from attention_priors.lab.study.study import Progress, Study

STAGES = {"train": 0.7, "passkey": 0.22, "perplexity": 0.03, "copying": 0.05, "plans": 0.05}
EXTENSION_STAGES = STAGES | {"train": 0.25}


class DecoderStudy(Study):
    """A :class:`Recipe` with its corpus and tokenizer."""

    def __init__(self, recipe: Recipe, cache: Path) -> None:
        self._recipe = recipe
        self.materials = Materials.load(recipe, cache)

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self._recipe

    @property
    def left_out(self) -> str | None:
        """Of the corpus' files."""
        return self.materials.left_out

    def check(self) -> None:
        """Make a text, a row and a model without weights of each kind."""
        self.materials.check()

    def identities(self, output: Path, scheme: str, seed: int) -> dict[Path, dict[str, Any]]:
        """Of the run, and of each extension of its context."""
        return identities(self.materials, output, scheme, seed)

    def is_finished(self, output: Path, scheme: str, seed: int) -> bool:
        """Whether it is trained, tested, extended and tested again."""
        return is_finished(self._recipe, output, scheme, seed)

    def stages(self, scheme: str) -> dict[str, float]:
        """Its own, and those of each extension."""
        shares = dict(STAGES)
        for way in self._recipe.extensions_of(scheme):
            shares |= {f"{way}: {stage}": share for stage, share in EXTENSION_STAGES.items()}
        return shares

    def execute(self, output: Path, scheme: str, seed: int, progress: Progress) -> None:
        """Train and test, extend and test again."""
        execute(self.materials, scheme, seed, run_folder(output, scheme, seed), progress)

    def collect(self, output: Path, runs: Sequence[tuple[str, int]], wall_seconds: float) -> list[dict[str, Any]]:
        """Return the rows that :mod:`attention_priors.lab.results` describes."""
        return collect(self._recipe, output, runs, wall_seconds=wall_seconds, corpus=dict(self.materials.description))
