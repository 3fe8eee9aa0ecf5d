import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import carry_out, changed, write_texts
from rich.console import Console

from attention_priors.lab.study import Recipe


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """The recipe, with changes."""
    texts = write_texts(tmp_path_factory.mktemp("corpus") / "texts")

    def make(changes: dict[str, Any] | None = None) -> Recipe:
        return Recipe.model_validate(changed({"corpus.source": str(texts)} | (changes or {})))

    return make


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO())


@dataclass
class Finished:
    """A comparison that was carried out: first with one scheme only, then whole."""

    folder: Path
    only: dict[str, Any]
    files_after_only: set[str]
    results: dict[str, Any]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Recipe]) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    only = carry_out(tiny(), folder, ["BAM + SSMax"])
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return Finished(folder, only, files, carry_out(tiny(), folder))
