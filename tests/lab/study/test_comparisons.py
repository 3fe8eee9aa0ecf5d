"""Whole comparisons, their results, and errors before any work."""

import hashlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import changed, of_kind
from rich.console import Console
from typer.testing import CliRunner

from attention_priors.lab import study
from attention_priors.lab.cli import app
from attention_priors.lab.data import load_corpus
from attention_priors.lab.results import FILE, Results, read_rows, recipe_sha256, write_rows
from attention_priors.lab.study import Recipe, RecipeError, RunFailedError, compare
from attention_priors.lab.study.compare import load_study, processes_at_a_time
from attention_priors.lab.tasks.perplexity import position_bins

SCHEMES = ["ALiBi", "BAM + SSMax"]


def _snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Return time and content of every file."""
    return {
        path.relative_to(folder).as_posix(): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished.folder, tmp_path / "copy"))


@pytest.fixture
def no_workers(monkeypatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


# ---- results of a comparison


def test_versions_and_machines_describe_the_runs(finished, tiny, copy, quiet, no_workers):
    """The machine that collects the runs may differ."""
    path = copy / "runs" / "ALiBi" / "seed-3" / "training.json"
    training = json.loads(path.read_text())
    training["versions"]["torch"], training["machine"]["processor"] = "2.9.1", "Abacus"
    path.write_text(json.dumps(training))
    results = compare(tiny(), copy, console=quiet)
    assert results.study["versions"]["torch"] == f"2.9.1, {finished.study['versions']['torch']}"
    assert results.study["machine"]["processor"].startswith("Abacus, ")
    assert results.study["versions"]["transformers"] == finished.study["versions"]["transformers"]


def test_results_are_rows_of_every_kind(finished):
    rows = read_rows(finished.folder)
    kinds = ["study", "scheme", "run", "retrieval", "perplexity", "prior", "prior_mass", "prior_reach", "logit_scale"]
    assert list(dict.fromkeys(row["row"] for row in rows)) == kinds
    study = finished.study
    assert study["recipe"]["name"] == "Tiny"
    assert study["recipe_sha256"] == recipe_sha256(study["recipe"])
    assert study["seeds"] == [3]
    assert finished.results.study == study
    assert finished.results.names == ["ALiBi", "BAM + SSMax"]


def test_the_corpus_is_described(finished, tiny):
    corpus = load_corpus(Path(tiny().corpus.source))
    assert finished.study["corpus"] == {
        "name": "texts",
        "fingerprint": corpus.fingerprint,
        "train_characters": sum(len(document.text) for document in corpus.train),
        "held_out_characters": sum(len(document.text) for document in corpus.held_out),
    }


def test_schemes_are_described(finished):
    alibi, bam = finished.rows("scheme")
    # Embeddings; per layer four projections, three matrices of the MLP and two norms; the last norm.
    weights = 300 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 16 + 2 * 16) + 16
    assert alibi == {
        "row": "scheme",
        "scheme": "ALiBi",
        "description": "laplace",
        "context_length": 150,
        "parameters": weights + 2 * 2,
        "prior_parameters": 0,
    }
    # θα and β of BAM train, and θμ does not. s trains.
    assert bam == {
        "row": "scheme",
        "scheme": "BAM + SSMax",
        "description": "generalized_gaussian(init='roles') · ssmax · tolerance=0.01 at evaluation · training(steps=3)",
        "context_length": 150,
        "parameters": weights + 2 * (3 * 2 + 2),
        "prior_parameters": 2 * (2 * 2 + 2),
    }


def test_every_run_has_its_history(finished):
    assert [(run["scheme"], run["seed"], run["steps"]) for run in finished.rows("run")] == [
        ("ALiBi", 3, 120),
        ("BAM + SSMax", 3, 3),
    ]
    for run in finished.rows("run"):
        assert run["history"][-1]["step"] == run["steps"]
        assert run["final_loss"] == run["history"][-1]["loss"]
        assert run["train_seconds"] >= 0  # rounded
        assert run["evaluate_seconds"] >= 0
    history = finished.rows("run")[0]["history"]
    assert history[-1]["loss"] < history[0]["loss"] - 0.5  # it has learned


def test_passkey_rows_end_where_a_scheme_stopped(finished):
    grid = [(length, depth) for length in (150, 160, 170) for depth in (0.0, 1.0)]
    for run in finished.rows("run"):
        rows: list[Any] = finished.rows("retrieval", scheme=run["scheme"], plan=None)
        assert rows
        assert [(row["length"], row["depth"]) for row in rows] == grid[: len(rows)]
        assert all(row["seed"] == 3 and row["trials"] == 1 and row["correct"] in (0, 1) for row in rows)
        if run["stopped"] is None:
            assert len(rows) == 6
        else:
            last = [row["length"] for row in rows[-4::2]]
            assert not any(row["correct"] for row in rows[-4:])
            assert run["stopped"] == f"nothing right at 2 lengths running ({last[0]}, {last[1]} tokens)"


def test_perplexity_rows_cover_every_range_of_positions(finished):
    for scheme in SCHEMES:
        rows = finished.rows("perplexity", scheme=scheme, plan=None, task="perplexity", length=100)
        expected = [(first * last) ** 0.5 for first, last in position_bins(100)]
        whole, *rows = rows
        assert (whole["position"], whole["documents"]) == (None, rows[0]["documents"])
        assert [row["position"] for row in rows] == pytest.approx(expected)
        assert all(row["documents"] >= 1 for row in rows)
        texts = {
            row["tokens"] / (last - first + 1) for row, (first, last) in zip(rows, position_bins(100), strict=True)
        }
        assert len(texts) == 1
        assert texts <= {1.0, 2.0}
        assert all(0 < row["nll"] < 20 for row in rows)


def test_priors_and_scales_have_a_row_per_layer_and_head(finished):
    heads = [(layer, head) for layer in range(2) for head in range(2)]
    for scheme, prior in zip(SCHEMES, ("laplace", "generalized_gaussian"), strict=True):
        rows = finished.rows("prior", scheme=scheme)
        assert [(row["layer"], row["head"]) for row in rows] == heads
        assert all(row["prior"] == prior and row["distance"][-1] == 174 for row in rows)
        # The window is added for the tests only and was not learned.
        assert all(value is not None for row in rows for value in row["log_prior"])
    scales = [(row["scheme"], row["layer"], row["head"]) for row in finished.rows("logit_scale")]
    assert scales == [("BAM + SSMax", *head) for head in heads]


def test_only_selects_schemes(finished):
    assert {row["scheme"] for row in finished.only[1:]} == {"BAM + SSMax"}
    assert any(name.startswith("runs/BAM_+_SSMax/seed-3/") for name in finished.files_after_only)
    assert not any("ALiBi" in name for name in finished.files_after_only)
    # The other schemes were added later and changed no earlier result.
    later = [row for row in read_rows(finished.folder) if row.get("scheme") == "BAM + SSMax"]
    assert later == finished.only[1:]


def test_a_finished_run_keeps_its_model_and_no_checkpoints(finished):
    for name in ("ALiBi", "BAM_+_SSMax"):
        folder = finished.folder / "runs" / name / "seed-3"
        assert {path.name for path in folder.iterdir()} == {
            ".lock",
            "identity.json",
            "model",
            "training.json",
            "priors.json",
            "results.jsonl",
            "log.jsonl",
            "measured.json",
            "done.json",
        }
        scheme = name.replace("_", " ")
        assert f"- recipe: Tiny, {scheme}\n" in (folder / "model" / "README.md").read_text()


# ---- repeated calls


def test_a_second_call_does_nothing(finished, copy, tiny, quiet, no_workers):
    before = _snapshot(copy)
    compare(tiny(), copy, console=quiet)
    after = _snapshot(copy)
    rewritten = {"recipe.json", FILE}
    assert {name: state for name, state in before.items() if name not in rewritten} == {
        name: state for name, state in after.items() if name not in rewritten
    }
    study, *rows = read_rows(copy)
    assert rows == read_rows(finished.folder)[1:]
    assert study | {"created": None} == finished.study | {"created": None}


def test_skipped_files_are_reported(copy, tiny, no_workers, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(tiny().corpus.source, tmp_path / "texts"))
    (folder / "nul.bin").write_bytes(b"a\0b")
    words = load_study(tiny({"corpus.source": str(folder)}), tmp_path / "cache").left_out
    assert words == "left out: nul.bin: it is binary (it holds a NUL byte)"
    loaded = load_study(tiny(), copy / "cache")
    # The package has a function with the module's name.
    monkeypatch.setattr(sys.modules["attention_priors.lab.study.compare"], "load_study", lambda *_: loaded)
    for loaded.left_out in (None, words):
        printed = io.StringIO()
        compare(tiny(), copy, console=Console(file=printed, width=40))
        assert ("corpus: left out: nul.bin: it is binary (it holds a NUL byte)\n" in printed.getvalue()) == bool(
            loaded.left_out
        )


def test_a_new_name_is_the_same_recipe(copy, tiny, quiet, no_workers):
    results = compare(tiny({"name": "Other", "description": "new"}), copy, console=quiet)
    assert results.study["recipe"]["name"] == "Other"
    assert len(results["run"]) == 2


def test_removed_schemes_are_omitted(copy, tiny, quiet, no_workers):
    results = compare(tiny({"schemes.ALiBi": ...}), copy, console=quiet)
    assert [*results["run"].scheme] == ["BAM + SSMax"]


def test_the_command_writes_the_report_of_a_finished_comparison(copy, tiny, tmp_path, no_workers):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(changed({"corpus.source": tiny().corpus.source})))
    result = CliRunner().invoke(app, ["compare", str(recipe), "--output", str(copy)])
    assert result.exit_code == 0, result.output
    assert f"Report: {copy / 'report.html'}" in result.output
    assert "ALiBi" in result.output
    assert "<html" in (copy / "report.html").read_text(encoding="utf-8")
    assert any((copy / "figures").iterdir())
    assert {path.name for path in (copy / "tables").iterdir()} >= {"passkey.md", "passkey.tex", "perplexity.md"}


# ---- errors before any work


def test_an_unknown_scheme_changes_nothing(copy, tiny, quiet):
    before = _snapshot(copy)
    with pytest.raises(RecipeError, match=r"unknown scheme 'RoPE'; the recipe has 'ALiBi', 'BAM \+ SSMax'"):
        compare(tiny(), copy, only=["ALiBi", "RoPE"], console=quiet)
    assert _snapshot(copy) == before


def test_an_unknown_seed_changes_nothing(copy, tiny, quiet, tmp_path):
    before = _snapshot(copy)
    with pytest.raises(RecipeError, match=r"unknown seed 4; the recipe has 3"):
        compare(tiny(), copy, seeds=[3, 4], console=quiet)
    assert _snapshot(copy) == before
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(changed({"corpus.source": tiny().corpus.source})))
    for seeds, complaint in (("4", "unknown seed 4; the recipe has 3"), ("x", "seeds: 'x' is not a seed")):
        result = CliRunner().invoke(app, ["compare", str(recipe), "--output", str(copy), "--seeds", seeds])
        assert result.exit_code == 1
        assert complaint in " ".join(result.output.split())
    assert _snapshot(copy) == before


def test_processes_must_be_a_positive_number(tiny, tmp_path, quiet):
    with pytest.raises(ValueError, match="processes must be a positive integer, got 0"):
        compare(tiny(), tmp_path / "out", processes=0, console=quiet)
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_limits_processes(tiny, tmp_path, quiet):
    with pytest.raises(RecipeError, match="processes must be at most 1, the limit of the recipe; got 2"):
        compare(Recipe.model_validate(changed({"processes": 1})), tmp_path / "out", processes=2, console=quiet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("allowed", "expected"), [(None, 8), (1, 1), (3, 3), (20, 8)])
def test_default_processes_depend_on_cores_and_recipe(allowed, expected, monkeypatch):
    # A scheduler such as SLURM allocates some of the machine's cores.
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)), raising=False)
    recipe = Recipe.model_validate(changed({"processes": allowed, "threads_per_run": 2}))
    assert processes_at_a_time(recipe, None) == expected


@pytest.mark.parametrize("below", ["", "out"])
def test_unwritable_outputs_are_refused_before_any_work(tiny, tmp_path, quiet, below):
    (tmp_path / "file").write_text("in the way")
    # The corpus is also missing, which would be the next error.
    recipe = tiny({"corpus.source": str(tmp_path / "nowhere")})
    with pytest.raises(OSError, match="cannot write to the output folder") as caught:
        compare(recipe, tmp_path / "file" / below, console=quiet)
    assert f"output folder {tmp_path / 'file' / below}: " in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"training.steps": 121}, "training.steps (there 120, here 121)"),
        ({"model.hidden_size": 32}, "model.hidden_size (there 16, here 32)"),
        ({"tokenizer": 301}, "tokenizer (there 300, here 301)"),
        ({"schemes.ALiBi.prior": "uniform"}, "scheme.prior (there 'laplace', here 'uniform')"),
        (
            {"evaluation.passkey.lengths": [150]},
            "evaluation.passkey.lengths (there [150, 160, 170], here [150])",
        ),
        ({"evaluation.perplexity": ...}, "evaluation.perplexity (there {'length': 100, 'documents': 1}, here None)"),
        ({"corpus.max_characters": 10_000}, "corpus.max_characters (there None, here 10000)"),
    ],
)
def test_another_recipe_in_the_same_folder_changes_nothing(copy, tiny, quiet, no_workers, changes, difference):
    before = _snapshot(copy / "runs")
    with pytest.raises(RecipeError, match="holds a run of another recipe") as caught:
        compare(tiny(changes), copy, console=quiet)
    assert difference in str(caught.value)
    assert "runs/ALiBi/seed-3" in str(caught.value)
    assert _snapshot(copy / "runs") == before
    # The folder's own recipe still works.
    assert len(compare(tiny(), copy, console=quiet)["run"]) == 2


def test_a_refused_recipe_claims_no_folder(copy, tiny, quiet, no_workers):
    new = {"schemes.New": {"prior": "uniform"}}
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        compare(tiny(new | {"training.steps": 121}), copy, console=quiet)
    assert not (copy / "runs" / "New").exists()


def test_another_corpus_in_the_same_folder_is_another_recipe(copy, tiny, quiet, tmp_path, no_workers):
    texts = Path(tiny().corpus.source)
    other = tmp_path / "other" / "texts"
    shutil.copytree(texts, other)
    (other / "9.txt").write_text("Something new.\n")
    before = _snapshot(copy / "runs")
    with pytest.raises(RecipeError, match=r"corpus\.source .*corpus_fingerprint"):
        compare(tiny({"corpus.source": str(other)}), copy, console=quiet)
    assert _snapshot(copy / "runs") == before


def test_another_tokenizer_under_the_same_path_is_another_recipe(finished, tiny, quiet, tmp_path, no_workers):
    saved = tmp_path / "tokenizer"
    shutil.copytree(next((finished.folder / "cache").glob("tokenizer-300-*")), saved)
    output = tmp_path / "out"
    recipe = tiny({"tokenizer": str(saved)})
    with pytest.raises(AssertionError, match="a worker was started"):
        compare(recipe, output, console=quiet)
    content = json.loads((saved / "tokenizer.json").read_text())
    content["model"]["merges"][-1] = content["model"]["merges"][0]
    (saved / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(RecipeError, match="holds a run of another recipe; it differs in tokenizer_fingerprint"):
        compare(recipe, output, console=quiet)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"evaluation.passkey.lengths": [20, 150]},
            r"evaluation\.passkey: lengths: 20 tokens for the task 'passkey_corpus'; .* at least \d+",
        ),
        (
            {"evaluation.perplexity.length": 10**6},
            r"evaluation\.perplexity: lengths: no document of '.*texts' \(held out\) has at least 1000000 tokens",
        ),
        ({"training.context_length": 10**6}, r"schemes\.ALiBi: .*1000000"),
        (
            {"training.passkey_ratio": 0, "training.context_length": 10**6},
            r"schemes\.ALiBi: stream has \d+ tokens: expected at least 1000000",
        ),
        (
            {"schemes.BAM + SSMax.training": {"passkey_minimum_length": 151}},
            r"schemes\.BAM \+ SSMax: minimum_length of passkey must be from \d+ .* to 150 .*; it is 151",
        ),
        (
            {"schemes.BAM + SSMax.training": {"context_length": 30}},
            r"schemes\.BAM \+ SSMax: context_length must be at least \d+, .* shortest passkey text .*; it is 30",
        ),
        (
            {"schemes.BAM + SSMax.training": {"needle_ratio": 0.5, "needle_tasks": ["niah_single_1", "niah_single_2"]}},
            r"schemes\.BAM \+ SSMax: context_length must be at least \d+, .* shortest niah_single_1 text .* 150",
        ),
        (
            {
                "schemes.ALiBi.extensions.longer": {
                    "context_length": 1500,
                    "tokens_per_step": 1500,
                    "needle_ratio": 0.5,
                    "needle_tasks": ["niah_single_1"],
                    "needle_minimum_length": 1501,
                }
            },
            r"ALiBi\.extensions\.longer: minimum_length of niah_single_1 must be from \d+ .* to 1500 .*; it is 1501",
        ),
    ],
)
def test_impossible_texts_are_refused_before_any_work(tiny, tmp_path, quiet, no_workers, changes, complaint):
    with pytest.raises(RecipeError, match=complaint):
        compare(tiny(changes), tmp_path / "out", console=quiet)
    assert not (tmp_path / "out" / "runs").exists()


# ---- a run that fails


def test_a_failed_run_is_named_after_the_others_finish(copy, tiny, quiet, finished, stub_worker):
    run, other = (copy / "runs" / name / "seed-3" for name in ("ALiBi", "BAM_+_SSMax"))
    done = (other / "done.json").rename(copy / "kept.json")
    for path in (run / "done.json", copy / FILE):
        path.unlink()
    (run / "log.txt").write_text("".join(f"line {index}\n" for index in range(40)))
    stub_worker(
        f"""[ "$5" = ALiBi ] && {{ echo "SafetensorError: no weights" >&2; exit 1; }}; cp {done} '{other}/done.json'"""
    )
    with pytest.raises(RunFailedError) as caught:
        compare(tiny(), copy, processes=1, console=quiet)
    message = str(caught.value)
    assert message.startswith("ALiBi, seed 3, ended with exit code 1; the end of ")
    assert str(run / "log.txt") in message
    assert message.splitlines()[-1] == "SafetensorError: no weights"
    assert len(message.splitlines()) == 16
    assert [*caught.value.results["run"].scheme] == ["BAM + SSMax"]
    assert of_kind(read_rows(copy), "retrieval") == finished.rows("retrieval", scheme="BAM + SSMax")


def test_the_command_reports_finished_runs_when_a_run_fails(finished, tiny, tmp_path, monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise RunFailedError("ALiBi, seed 4, ended with exit code 1", found)

    found = finished.results
    write_rows(tmp_path / "out", read_rows(finished.folder))
    monkeypatch.setattr(study, "compare", fail)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(changed({"corpus.source": tiny().corpus.source})))
    result = CliRunner().invoke(app, ["compare", str(recipe), "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "error: ALiBi, seed 4, ended with exit code 1" in result.output
    assert "BAM + SSMax" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "BAM + SSMax" in (tmp_path / "out" / "tables" / "passkey.md").read_text(encoding="utf-8")
    # A page with tables without data does not hide the failed run. Without a failure, such a page is an error.
    (tmp_path / "out" / "README.md").write_text("<!-- table: axes -->\n<!-- end of table -->\n")
    result = CliRunner().invoke(app, ["compare", str(recipe), "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "error: ALiBi, seed 4, ended with exit code 1" in result.output
    assert "no data for: axes" in result.output
    monkeypatch.setattr(study, "compare", lambda *arguments, **options: found)
    result = CliRunner().invoke(app, ["compare", str(recipe), "--output", str(tmp_path / "out")])
    assert (result.exit_code, "no data for: axes" in result.output) == (1, True)
    monkeypatch.setattr(study, "compare", fail)
    # Without finished runs, there is nothing to report.
    found = Results.of([finished.study])
    result = CliRunner().invoke(app, ["compare", str(recipe), "--output", str(tmp_path / "none")])
    assert (result.exit_code, result.output.strip()) == (1, "error: ALiBi, seed 4, ended with exit code 1")
    assert not (tmp_path / "none").exists()


def test_unexpected_output_of_a_worker_is_in_the_error(tiny, tmp_path, quiet, stub_worker):
    stub_worker("echo not the protocol\nexit 3")
    with pytest.raises(RunFailedError, match=r"exit code 3(.|\n)*not the protocol"):
        compare(tiny(), tmp_path / "out", only=["ALiBi"], console=quiet)
