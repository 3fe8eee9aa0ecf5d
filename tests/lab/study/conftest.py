import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import carry_out, changed, of_kind, write_texts
from rich.console import Console

from attention_priors.lab.results import Results, read_rows
from attention_priors.lab.study import Recipe


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """Return the recipe with changes."""
    texts = write_texts(tmp_path_factory.mktemp("corpus") / "texts")

    def make(changes: dict[str, Any] | None = None) -> Recipe:
        return Recipe.model_validate(changed({"corpus.source": str(texts)} | (changes or {})))

    return make


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO())


@dataclass
class Finished:
    """Run a comparison, first with one scheme only, then in full."""

    folder: Path
    only: list[dict[str, Any]]
    files_after_only: set[str]
    results: Results

    @property
    def study(self) -> dict[str, Any]:
        return read_rows(self.folder)[0]

    def rows(self, kind: str, /, **values: Any) -> list[dict[str, Any]]:
        return of_kind(read_rows(self.folder), kind, **values)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Recipe]) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    carry_out(tiny(), folder, ["BAM + SSMax"])
    only = read_rows(folder)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return Finished(folder, only, files, carry_out(tiny(), folder))


@pytest.fixture
def stub_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace workers by a script. Its arguments 3 to 7 are recipe, output, scheme, seed and seconds to wait."""

    def use(script: str) -> None:
        python = tmp_path / "python"
        python.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(python))

    return use
