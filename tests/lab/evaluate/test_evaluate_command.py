"""The command ``attention-priors evaluate``."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attention_priors.lab.cli import app
from attention_priors.lab.examples import example_folder
from attention_priors.lab.tasks.plan import TASKS


@pytest.fixture
def run(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Run the command in an empty folder. Return its exit code and its output, in one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")

    def command(kind: str, *arguments: str) -> tuple[int, str]:
        model = str(folders[kind]) if kind in folders else kind
        result = CliRunner().invoke(app, ["evaluate", model, *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result.exit_code, " ".join(result.output.split())

    return command


def test_results_tables_and_figures_are_written(run, folders, tmp_path, drawn):
    tasks = "passkey,niah_single_2,niah_multivalue,variable_tracking_2_hops,perplexity,perplexity_short"
    tasks += ",perplexity_windows,timing"
    options = ["--lengths", "600", "--corpus", str(folders["texts"]), "--depths", "2"]
    code, said = run("llama", "--task", tasks, *options, "--passes", "2", "--documents", "2", "--output", "out")
    assert code == 0, said
    for words in ("Mean score, %", "Loss in nats per token", "Time and memory of one pass", "results.jsonl"):
        assert words in said
    files = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*"))
    assert [file for file in files if not file.startswith(".")] == [
        "figures/accuracy_by_length.png",
        "figures/heatmap_niah_single_2.png",
        "figures/heatmap_passkey.png",
        "figures/perplexity_by_position.png",
        "log.jsonl",
        "results.jsonl",
        "summary.json",
        "table.md",
    ]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {row["model"] for row in summary} == {str(folders["llama"])}
    assert [row["task"] for row in summary if row["row"] != "timing"] == tasks.split(",")[:-1]
    passkey = summary[0]
    assert (passkey["length"], passkey["trials"], passkey["mean"], passkey["low"]) == (600, 2, 0.0, 0.0)
    assert passkey["high"] == pytest.approx(0.66, abs=0.01)  # as in the table
    assert [row["pass"] for row in summary if row["row"] == "timing"] == ["forward", "forward+backward", "decode"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| passkey | 2 | 0 [0, 66] |" in table
    assert all(name.replace("_", "\\_") in table for name in tasks.split(",")[:-1])


def test_variable_tracking_is_evaluated_with_its_example(run, tmp_path):
    options = ["--task", "variable_tracking", "--lengths", "1024", "--depths", "2", "--output", "out"]
    assert run(str(example_folder("alibi")), *options)[0] == 0
    run_line, *texts = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert run_line["identity"]["answer_tokens"] == 30
    assert [(len(text["expected"]), text["depth"]) for text in texts] == [(5, None)] * 2
    assert all(918 - 30 <= text["tokens"] <= 1024 - 30 for text in texts)


def test_lengths_may_be_short_and_in_any_order(run, tmp_path):
    code, _ = run("ours", "--lengths", "0k,1K", "--output", "out")
    assert code == 1
    code, _ = run("ours", "--lengths", "1K", "--depths", "2", "--output", "out", "--lengths", "200")
    assert code == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [line["length"] for line in lines if "score" in line] == [200, 200, 1024, 1024]
    code, said = run("ours", "--task", "passkey", "--lengths", "200", "--task", "none such", "--output", "out")
    assert code == 1
    assert "none such" in said


def test_results_of_a_trained_model_have_the_name_of_its_training(run, folders, tmp_path):
    shutil.copytree(folders["ours"], tmp_path / "first" / "model")
    assert run(str(tmp_path / "first" / "model"), "--lengths", "200", "--depths", "2")[0] == 0
    assert (tmp_path / "runs" / "evaluate" / "first" / "results.jsonl").exists()
    assert run("gpt2", "--lengths", "200", "--depths", "2")[0] == 0
    assert (tmp_path / "runs" / "evaluate" / "gpt2" / "results.jsonl").exists()


def test_the_tasks_are_listed(run):
    for model in (["anything"], []):
        code, said = run(*model, "--task", "list")
        assert code == 0
        assert all(f"{name}: {what}" in said for name, what in TASKS.items())


def test_the_model_argument_is_required(run):
    code, said = run("--lengths", "200")
    assert code == 2
    assert "name of a saved model" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--task", "passkeys"],
            "tasks: unknown task 'passkeys'; expected one of passkey, passkey_8, passkey_corpus, passkey_sentence, ",
        ),
        (["--task", ""], "tasks: at least one task must be given, out of passkey, passkey_8"),
        (["--task", "timing,timing"], "tasks: tasks must be distinct, got timing, timing"),
        (["--lengths", "0"], "lengths.0: Input should be greater than 1, got 0"),
        (["--lengths", "abc"], "lengths: 'abc' is not a number of tokens; expected a number such as 4096, 64k or 1m"),
        (["--lengths", "1q"], "lengths: '1q' is not a number of tokens"),
        (["--lengths", "-5"], "lengths: '-5' is not a number of tokens"),
        (["--lengths", ","], "lengths: at least one length must be given"),
        (
            ["--lengths", "20"],
            "lengths: 20 tokens for the task 'passkey'; with this tokenizer its texts have",
        ),
        (
            ["--task", "niah_single_1", "--lengths", "128"],
            "lengths: for the task 'niah_single_1', length must be above",
        ),
        (["--task", "variable_tracking"], "few-shot example: length 500 is too short"),
        (["--task", "passkey_corpus", "--corpus", "nowhere"], "corpus: source 'nowhere' does not exist"),
        (["--task", "niah_single_2", "--corpus", "nowhere"], "corpus: source 'nowhere' does not exist"),
        (["--task", "perplexity", "--corpus", "nowhere"], "corpus: source 'nowhere' does not exist"),
        (["--task", "perplexity_short", "--corpus", "."], "corpus: source '.' holds no text file"),
        (["--task", "perplexity", "--lengths", "90k", "--corpus", "TEXTS"], "has at least 92160 tokens, for the task"),
        (["--task", "perplexity_short", "--lengths", "5", "--corpus", "TEXTS"], "has between 2 and 5 tokens, for the"),
        (["--sentences", "words"], "sentences: Input should be 'regex' or 'punkt', got 'words'"),
        (["--seed", "4294967296"], "seed: Input should be less than 4294967296"),
        (["--dtype", "int8"], "dtype must be one of float32, bfloat16, float16; got 'int8'"),
        (["--device", "cuda:77"], "device is 'cuda:77', but PyTorch finds"),
        (["--device", "tpu"], "device must be cpu, cuda or cuda:N; got 'tpu'"),
    ],
)
def test_errors_are_one_message_and_write_nothing(run, folders, tmp_path, arguments, complaint):
    arguments = [str(folders["texts"]) if argument == "TEXTS" else argument for argument in arguments]
    code, said = run("llama", *arguments)
    assert code == 1
    assert said.count("error:") == 1
    assert complaint in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--chunk", "--batch", "--trials", "--documents", "--passes"])
def test_numbers_must_be_positive(run, tmp_path, option):
    code, said = run("llama", option, "0")
    assert code == 2
    assert option in said
    assert list(tmp_path.iterdir()) == []


def test_missing_punkt_data_is_named(run, folders, monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    options = ["--lengths", "600", "--sentences", "punkt", "--corpus", str(folders["texts"])]
    code, said = run("llama", "--task", "niah_single_2", *options)
    assert code == 1
    assert "error: sentences: punkt needs nltk and its data: pip install nltk" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lacking", ["everything", "model", "tokenizer"])
def test_folders_without_a_model_are_refused(run, folders, tmp_path, lacking):
    folder = tmp_path / "thing"
    if lacking == "everything":
        folder.mkdir()
        (folder / "notes.txt").write_text("notes")
    else:
        left_out = {"model": "*.safetensors", "tokenizer": "tokenizer*"}[lacking]
        shutil.copytree(folders["gpt2"], folder, ignore=shutil.ignore_patterns(left_out))
    code, said = run(str(folder), "--lengths", "200")
    assert code == 1
    assert said.count("error:") == 1
    assert "thing" in said
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_files_as_output_are_refused(run, tmp_path):
    (tmp_path / "mine").write_text("a file in the way")
    code, said = run("llama", "--lengths", "200", "--output", "mine")
    assert code == 1
    assert "cannot write to the output folder mine" in said
    assert (tmp_path / "mine").read_text() == "a file in the way"
