"""Messages of the command ``attention-priors bench``, and errors before any work."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from attention_priors.lab.cli import app

SMALL = ["--heads", "2", "--head-dim", "24", "--repetitions", "1", "--threads", "1"]


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_benchmark_writes_results_tables_and_figures(no_memory, drawn):
    ways = ["--ways", "attend-alibi", "--ways", "bloom"]
    code, output = invoke("--lengths", "16,32", "--passes", "decode", *ways, *SMALL, "--output", "out")
    assert code == 0, output
    assert "Time: decode" in output
    assert "attend, ALiBi" in output
    for path in ("results.json", "table.md", "figures/time_decode.png"):
        assert (Path("out") / path).stat().st_size > 100
    assert "attend, ALiBi" in Path("out/table.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--ways", "attend-alibi,flesh"],
            "ways: unknown way 'flesh'; known are plain, cuda-flash, cuda-cudnn, attend-alibi",
        ),
        (
            ["--passes", "sideways"],
            "passes.0: Input should be 'forward', 'forward+backward' or 'decode', got 'sideways'",
        ),
        (["--lengths", "many"], "lengths: 'many' is not a number of tokens"),
        (["--lengths", "8"], "lengths.0: Input should be greater than or equal to 16, got 8"),
        (["--lengths", ","], "lengths: "),
        (["--dtype", "int8"], "dtype: Input should be 'float32', 'bfloat16' or 'float16', got 'int8'"),
        (["--device", "abacus"], "device must be cpu, cuda or cuda:N; got 'abacus'"),
        (["--device", "mps"], "device must be cpu, cuda or cuda:N; got 'mps'"),
        (["--threads", "0"], "threads: Input should be greater than 0"),
        (["--repetitions", "0"], "repetitions: Input should be greater than 0"),
        (["missing.yaml"], "missing.yaml"),
        (["missing.yaml", "--heads", "3"], "--heads: not allowed with a recipe; set these values in the recipe"),
    ],
)
def test_invalid_options_raise_one_line_before_any_work(arguments, complaint):
    code, output = invoke(*arguments)
    assert code == 1
    assert output.count("error:") == 1
    assert complaint in output
    assert list(Path().iterdir()) == []


def test_invalid_recipes_are_named():
    Path("wrong.yaml").write_text("parts: [{lengths: [64], way: [plain]}]\nrepetition: 3\n")
    code, output = invoke("wrong.yaml")
    assert code == 1
    assert "repetition: unknown key (value 3); allowed here are name, description, device" in output
    assert "parts.0.way: unknown key (value ['plain']); allowed here are lengths, passes, ways" in output


def test_a_cuda_graph_needs_a_gpu():
    Path("wrong.yaml").write_text("cuda_graph: true\nparts: [{lengths: [64], ways: [plain]}]\n")
    code, output = invoke("wrong.yaml")
    assert code == 1
    assert "cuda_graph needs device: cuda; the device is 'cpu'" in output


def test_unwritable_outputs_raise_one_line():
    Path("mine").write_text("a file in the way")
    code, output = invoke(*SMALL, "--lengths", "16", "--output", "mine")
    assert code == 1
    assert "cannot write to the output folder mine" in output


def test_the_ways_are_listed():
    code, output = invoke("--ways", "list")
    assert code == 0
    assert "x-transformers-flash: x-transformers, ALiBi, flash." in output
