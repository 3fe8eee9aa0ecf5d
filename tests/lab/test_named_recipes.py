"""Recipes in the package, and their names."""

import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

from attention_priors.lab.bench.run import BenchRecipe
from attention_priors.lab.cli import app
from attention_priors.lab.cli.recipes import NamedRecipe, find_recipe, recipe_paths
from attention_priors.lab.strict_yaml import read_yaml
from attention_priors.lab.study.images.recipe import ImageRecipe
from attention_priors.lab.study.recipe import Recipe
from attention_priors.lab.train.recipe import TrainRecipe
from processes import run_command

ROOT = Path(__file__).parents[2]
FILES = [*ROOT.glob("recipes/**/*.yaml"), *ROOT.glob("benchmarks/*.yaml")]
KINDS = {"compare": (Recipe, ImageRecipe), "train": (TrainRecipe,), "bench": (BenchRecipe,)}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.output


def test_recipes_have_unique_names():
    assert sorted(recipe_paths().values()) == sorted(FILES)
    assert len({path.stem for path in FILES}) == len(FILES)


def test_every_recipe_belongs_to_one_command():
    for name, path in recipe_paths().items():
        keys = set(read_yaml(path))
        fitting = [command for command, kinds in KINDS.items() if any(keys <= {*kind.model_fields} for kind in kinds)]
        assert fitting == [NamedRecipe.read(path).command], name
        assert find_recipe(Path(name), fitting[0]) == path


def test_the_list_has_one_line_per_recipe():
    lines = call("recipes").splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [f"For attention-priors {name}:" for name in KINDS]
    shown = dict(line.strip().split(": ", 1) for line in lines if line.startswith("  "))
    assert shown == {path.stem: NamedRecipe.read(path).description for path in FILES}


def test_copies_equal_the_recipe_and_replace_no_file(empty_folder):
    assert "Recipe: demo.yaml" in call("recipes", "copy", "demo")
    call("recipes", "copy", "cpu", "--output", "mine/bench.yaml")
    assert Path("demo.yaml").read_bytes() == (ROOT / "recipes/demo.yaml").read_bytes()
    assert Path("mine/bench.yaml").read_bytes() == (ROOT / "benchmarks/cpu.yaml").read_bytes()
    Path("demo.yaml").write_text("edited")
    assert "demo.yaml exists already" in call("recipes", "copy", "demo", code=1)
    assert Path("demo.yaml").read_text() == "edited"


def test_unknown_names_raise_an_error_that_lists_the_names():
    assert "unknown recipe 'dmo'; expected one of" in call("recipes", "copy", "dmo", code=1)
    for command, known, other in (("compare", "demo", "cpu"), ("train", "goat-125m", "demo"), ("bench", "cpu", "demo")):
        for unknown in ("dmo", other):
            with pytest.raises(FileNotFoundError, match=f"recipe '{unknown}' is neither a file nor") as error:
                find_recipe(Path(unknown), command)
            names = str(error.value).rpartition("one of ")[2].split(", ")
            assert known in names
            assert other not in names


def test_files_take_precedence_over_names_and_folders_do_not():
    Path("demo").mkdir()
    assert find_recipe(Path("demo"), "compare") == ROOT / "recipes/demo.yaml"
    Path("demo").rmdir()
    Path("demo").write_text("[]")
    assert "demo must hold keys and values" in call("compare", "demo", code=1)


@pytest.mark.parametrize(("command", "other"), [("compare", "cpu"), ("train", "cpu"), ("prepare", "demo")])
def test_commands_take_names(command, other, empty_folder):
    assert f"recipe '{other}' is neither a file nor the name" in " ".join(call(command, other, code=1).split())
    assert list(empty_folder.iterdir()) == []


def test_wheels_contain_the_recipes(empty_folder):
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(empty_folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall("installed")
    packaged = Path("installed/attention_priors/recipes")
    assert {path.name: path.read_bytes() for path in packaged.rglob("*") if path.is_file()} == {
        path.name: path.read_bytes() for path in FILES
    }
    assert {path.name for path in Path("installed").iterdir() if not path.name.endswith(".dist-info")} == {
        "attention_priors"
    }
    listed = run_command(
        [sys.executable, "-m", "attention_priors", "recipes"],
        environment={"PYTHONPATH": str(Path("installed").resolve())},
    )
    assert listed.stdout == call("recipes")
