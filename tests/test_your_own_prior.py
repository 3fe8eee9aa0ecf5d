"""The page on custom priors, followed from top to bottom in this process and in new ones, and as a package."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import attention_priors
from attention_priors._io import read_json
from attention_priors.hf import detach, load_adapter, load_attached
from attention_priors.lab.cli import app
from attention_priors.lab.study import workers
from attention_priors.lab.study.compare import recipe_of
from attention_priors.priors import CATALOGUE
from processes import run_command
from written_pages import ROOT, python_of, run_page

PAGE = "docs/your-own-prior.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
MODULE, *PROGRAM, OTHER = python_of(PAGE)
(RECIPE,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
COMPARE, INSPECT, EVALUATE = map(shlex.split, re.findall(r"^\$ attention-priors (.*)", TEXT, re.MULTILINE))


def forget() -> None:
    """Reset this process to one that has not imported the page's module."""
    sys.modules.pop("bump", None)
    CATALOGUE.registered.pop("bump", None)


def run(words: Sequence[str], *, code: int = 0) -> Result:
    """Run the command as in a new process. Only the workers of a comparison are real processes."""
    forget()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    return result


def without_plugin(words: Sequence[str]) -> list[str]:
    return [word for word in words if word not in ("--plugin", "bump")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the page's files into a folder from which this process and its children import."""
    (tmp_path / "bump.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "bump.yaml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = Path(attention_priors.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(source)]))
    monkeypatch.setattr(CATALOGUE, "registered", dict(CATALOGUE.registered))
    yield tmp_path
    sys.modules.pop("bump", None)


@pytest.fixture
def package(folder: Path) -> Path:
    """Install the page's files as a package, as pip does."""
    installed = folder / "bump-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: bump\nVersion: 1.0\n")
    (toml,) = re.findall(r"```toml\n.*\n(.*)\n```", TEXT)
    (installed / "entry_points.txt").write_text(f"[attention_priors.priors]\n{toml.replace(chr(34), '')}\n")
    return folder


def test_examples_run_and_another_process_loads_the_saved_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = run_page(PAGE, PROGRAM)["model"]
    assert run_command([sys.executable, "-c", OTHER]).stdout == capsys.readouterr().out
    ways = r"register_prior .*--plugin MODULE.*plugins: \[MODULE\].*entry point 'attention_priors.priors'"
    del CATALOGUE.registered["bump"]
    with pytest.raises(ValueError, match=f"unknown prior 'bump'; .*{ways}"):
        load_attached("llama-with-bumps")
    with pytest.raises(ValueError, match=f"unknown prior 'bump'; .*{ways}"):
        load_adapter(detach(model), "bumps")


def test_commands_of_the_page_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A million tokens would take half of an inspection.
    monkeypatch.setattr("attention_priors.lab.inspect.inspection.REACH_LENGTHS", (1024, 4096))
    for command in ([*COMPARE, "--only", "Bump"], INSPECT, EVALUATE):
        run(command)
    assert (folder / "runs" / "bump" / "report.html").is_file()
    assert '"centre"' in (folder / "runs" / "inspect" / "inspection.json").read_text(encoding="utf-8")
    assert list((folder / "runs" / "evaluate").rglob("results.jsonl"))
    assert "unknown prior 'bump'" in run(without_plugin(INSPECT), code=1).output


@pytest.fixture
def read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Remove the plugins from the page's recipe, and return the plugins that workers read. Workers do nothing else."""
    (folder / "bump.yaml").write_text(RECIPE.replace("plugins: [bump]\n", ""), encoding="utf-8")
    read = []

    def start(recipe_file: Path, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
        forget()
        read.append(recipe_of(read_json(recipe_file), "the recipe that a process reads").plugins)
        return subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(workers, "start_worker", start)
    monkeypatch.setattr(workers, "tail_of", lambda log: "")
    return read


def test_workers_of_a_comparison_import_the_plugins(read: list[Sequence[str]]) -> None:
    run(["--plugin", "bump", *COMPARE, "--only", "Bump"])
    assert read == [("bump",)]


@pytest.mark.usefixtures("package")
def test_installed_packages_need_no_plugins(read: list[Sequence[str]], capsys: pytest.CaptureFixture[str]) -> None:
    run_page(PAGE, PROGRAM)
    forget()
    head, importing, tail = OTHER.partition("import bump  # registers the prior\n")
    load, model, rest = tail.partition('model = load_attached("llama-with-bumps")\n')
    run_page(PAGE, [head + load + model + importing + rest])
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    run([*COMPARE, "--only", "Bump"])
    assert read == [()]
