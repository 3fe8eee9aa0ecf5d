"""Messages of the command before any model is trained."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from attention_priors import __version__
from attention_priors.attention.selftest import VARIANTS
from attention_priors.lab.cli import app
from attention_priors.lab.cli.terminal import errors, name_of_model
from processes import run_command

RECIPE: dict[str, Any] = {
    "name": "Small",
    "tokenizer": 300,
    "model": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "training": {"context_length": 8, "steps": 2, "batch_size": 1, "learning_rate": 0.01},
    "evaluation": {},
    "schemes": {"ALiBi": {"prior": "laplace"}},
}


@pytest.fixture
def fail(tmp_path, monkeypatch) -> Callable[..., str]:
    """Run ``compare``, which must fail, in an empty folder. Return its one message."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **changes: Any) -> str:
        if changes:
            # JSON is YAML.
            Path("small.yaml").write_text(json.dumps(RECIPE | changes))
        result = CliRunner().invoke(app, ["compare", *arguments])
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == 1
        output = " ".join(result.output.split())
        assert output.count("error:") == 1
        assert "Traceback" not in output
        return output[output.index("error:") :]

    return run


def _trained_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "runs" in path.relative_to(folder).parts[1:]]


def test_help_works_without_the_laboratory():
    code = (
        "import sys\n"
        "from attention_priors.lab.cli import main\n"
        "sys.argv = ['attention-priors', 'compare', '--help']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    slow = [name for name in ('transformers', 'matplotlib', 'yaml') if name in sys.modules]\n"
        "    print('imported:', slow)\n"
    )
    result = run_command([sys.executable, "-c", code])
    assert "imported: []" in result.stdout
    for word in ("recipe", "--output", "--only", "--processes"):
        assert word in result.stdout


def test_version_matches_the_package():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"attention-priors {__version__}\n")
    # pip reads the version from pyproject.toml.
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'\nversion = "{__version__}"\n' in project


def test_broken_plugins_are_named(fail):
    told = fail("small.yaml", plugins=["json", "no_such_module"])
    assert "plugins: the plugin 'no_such_module' cannot be imported (ModuleNotFoundError: No module named" in told
    assert "on PYTHONPATH" in told
    result = CliRunner().invoke(app, ["--plugin", "json", "--plugin", "no_such_module", "explore"])
    assert result.exit_code == 1
    assert "the plugin 'no_such_module' cannot be imported" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        ("runs/BAM/seed-0/model", "BAM/seed-0"),
        ("runs/ALiBi/seed-1/model", "ALiBi/seed-1"),
        ("runs/tiny/model", "tiny"),
        ("runs/tiny/extended-2x/model", "tiny/extended-2x"),
        ("runs/tiny/extended-2x/extended-4x/model", "tiny/extended-2x/extended-4x"),
        ("runs/RoPE/seed-1/extended/YaRN/model", "RoPE/seed-1/YaRN"),
        ("gpt2-mine", "gpt2-mine"),
    ],
)
def test_models_have_separate_output_folders(model, stem, tmp_path):
    (tmp_path / model).mkdir(parents=True)
    assert name_of_model(str(tmp_path / model)).as_posix() == stem


@pytest.mark.parametrize(
    ("model", "stem"), [("user/name", "user/name"), ("/nowhere/typo", "typo"), ("../typo", "typo")]
)
def test_missing_models_have_an_output_folder_below_runs(model, stem):
    assert name_of_model(model).as_posix() == stem


def test_missing_recipes_are_named(fail, tmp_path):
    assert "missing.yaml" in fail("missing.yaml")
    assert list(tmp_path.iterdir()) == []


def test_invalid_recipes_are_named_before_anything_is_written(fail, tmp_path):
    message = fail("small.yaml", schemes={"ALiBi": {"prior": "laplac"}})
    assert "small.yaml: schemes.ALiBi: unknown prior 'laplac'; expected one of uniform, laplace" in message
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


def test_brackets_in_errors_are_shown_literally(fail):
    assert "foo: unknown key (value '[/x]')" in fail("small.yaml", foo="[/x]")


def test_unknown_schemes_are_named(fail, tmp_path):
    message = fail("small.yaml", "--only", "RoPE", corpus={"source": "nowhere"})
    assert "unknown scheme 'RoPE'; the recipe has 'ALiBi'" in message
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


def test_processes_must_be_positive(tmp_path):
    result = CliRunner().invoke(app, ["compare", "x.yaml", "--processes", "0"])
    assert result.exit_code == 2


@pytest.mark.parametrize("made", ["file", "folder of files"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "it is empty or blank"), (b"ELF\0\1\2", "it is binary"), (b"\xff\xfe", "it is not UTF-8")],
    ids=["empty", "binary", "another encoding"],
)
def test_a_corpus_without_text_raises_one_message(fail, tmp_path, made, content, complaint):
    path = tmp_path / "texts"
    if made == "file":
        path.write_bytes(content)
    else:
        path.mkdir()
        (path / "a.txt").write_bytes(content)
    message = fail("small.yaml", corpus={"source": "texts"})
    assert "source 'texts'" in message
    assert complaint in message
    assert _trained_files(tmp_path) == []


def test_an_empty_folder_raises_one_message(fail, tmp_path):
    (tmp_path / "texts").mkdir()
    assert "source 'texts' holds no text file (it has no files)" in fail("small.yaml", corpus={"source": "texts"})
    assert _trained_files(tmp_path) == []


def test_a_missing_corpus_raises_one_message(fail, tmp_path):
    message = fail("small.yaml", corpus={"source": "nowhere"})
    assert "source 'nowhere' does not exist" in message
    assert _trained_files(tmp_path) == []


def test_a_corpus_too_small_for_the_tokenizer_raises_one_message(fail, tmp_path):
    (tmp_path / "texts").mkdir()
    for index in range(2):
        (tmp_path / "texts" / f"{index}.txt").write_text(f"A short text, number {index}.\n")
    message = fail("small.yaml", corpus={"source": "texts"})
    assert "vocab_size is 300, but the documents repeat too few pairs" in message
    assert _trained_files(tmp_path) == []


def test_an_unwritable_output_folder_raises_one_message(fail, tmp_path):
    (tmp_path / "mine").write_text("a file in the way")
    message = fail("small.yaml", "--output", "mine", corpus={"source": "nowhere"})
    assert "cannot write to the output folder mine" in message
    assert (tmp_path / "mine").read_text() == "a file in the way"


def _allocate() -> None:
    torch.empty(2**50)


def _accelerator() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.parametrize("use_up", [_allocate, _accelerator])
def test_missing_memory_raises_one_message(use_up, capsys):
    with pytest.raises(typer.Exit) as ended, errors():
        use_up()
    assert ended.value.exit_code == 1
    assert "error: out of memory; use a smaller chunk or batch" in " ".join(capsys.readouterr().err.split())


def test_other_errors_in_our_code_keep_their_traceback():
    with pytest.raises(RuntimeError, match="shapes"), errors():
        raise RuntimeError("shapes do not fit")


def test_selftest_prints_a_table_for_an_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = CliRunner().invoke(app, ["selftest", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    head, _, *rows = result.output.splitlines()
    assert f"torch {torch.__version__}" in head
    assert rows[0].startswith("| engine | dtype |")
    assert sum("| not here |" in row for row in rows) == 1, "why there are no kernels, once"
    of_tiles = [row for row in rows if row.startswith("| toeplitz | float32 |")]
    assert len(of_tiles) == len(VARIANTS)
    assert all(row.endswith("| right |") for row in of_tiles)


@pytest.mark.parametrize("error", [0.5, math.nan])
def test_selftest_names_failures(error: float) -> None:
    with mock.patch("attention_priors.lab.selftest.errors", return_value={"output": 1e-7, "key": error, "value": 0.0}):
        result = CliRunner().invoke(app, ["selftest", "--device", "cpu"])
    assert result.exit_code == 1
    assert f"| {error:.1e} | key | 1e-04 | WRONG |" in result.output


def test_selftest_names_devices() -> None:
    result = CliRunner().invoke(app, ["selftest", "--device", "moon"])
    assert result.exit_code == 1
    assert "device must be cpu, cuda or cuda:N; got 'moon'" in result.output
