"""Plans of ``attention-priors evaluate`` in comparisons."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import carry_out, of_kind
from rich.console import Console

from attention_priors._io import read_json, write_json
from attention_priors.lab.data import load_corpus
from attention_priors.lab.data.tokenizer import pretrained_tokenizer
from attention_priors.lab.evaluate import evaluate
from attention_priors.lab.report import write_report
from attention_priors.lab.results import read_rows
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study import Recipe, compare
from attention_priors.lab.tasks import EvaluationPlan, Subject
from attention_priors.lab.tasks.ruler.haystack import haystack_of
from attention_priors.models import PriorDecoderForCausalLM

PLANS: dict[str, Any] = {
    "eight digits": {"tasks": ["passkey_8", "niah_single_1"], "lengths": [520], "depths": 2},
    "reading": {"tasks": ["perplexity", "timing"], "lengths": [60, 90], "documents": 2, "passes": 2},
}
"""Plans of the tests, without the texts of the second."""


@pytest.fixture(scope="module")
def plans(tiny: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    source = tiny().corpus.source
    assert source is not None
    # Another folder, because only the held-out part of the training corpus is read.
    texts = shutil.copytree(source, tmp_path_factory.mktemp("plans") / "texts")
    return PLANS | {"reading": PLANS["reading"] | {"corpus": str(texts)}}


@pytest.fixture(scope="module")
def asked(tiny: Any, finished: Any, plans: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a finished comparison's folder, to whose recipe plans were added, and its results."""
    folder = tmp_path_factory.mktemp("asked") / "comparison"
    shutil.copytree(finished.folder, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.parent.name == "model"}
    results = carry_out(tiny({"evaluation.plans": plans}), folder)
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing is trained again
    return folder, results


def approximate(value: Any) -> Any:
    """Chunks change only rounding."""
    return pytest.approx(value) if type(value) is float else value


def test_rows_match_an_evaluation_of_the_model(asked: Any, tiny: Any, plans: dict[str, Any], tmp_path: Path):
    folder, _ = asked
    subject = Subject.load(folder / "runs" / "ALiBi" / "seed-3" / "model")
    for name in plans:
        found = evaluate(subject, EvaluationPlan.model_validate(plans[name]), tmp_path / name, chunk=64)
        for kind in ("retrieval", "perplexity"):
            own = of_kind(read_rows(folder), kind, scheme="ALiBi", plan=name)
            expected = [row | {"scheme": "ALiBi", "seed": 3, "plan": name} for row in found.rows if row["row"] == kind]
            assert len(own) == len(expected)
            for one, other in zip(own, expected, strict=True):
                assert one == {key: approximate(value) for key, value in other.items()}
    timing = of_kind(read_rows(folder), "timing", scheme="ALiBi")
    assert [(row["length"], row["pass"]) for row in timing] == [
        (length, kind) for length in (60, 90) for kind in ("forward", "forward+backward", "decode")
    ]
    assert all(row["median_ms"] > 0 and row["plan"] == "reading" for row in timing)


def test_plans_read_the_held_out_part_of_the_training_corpus(finished: Any, tiny: Any, tmp_path: Path):
    """Applies if a plan names no corpus, or the recipe's, maybe in another spelling."""
    folder = tmp_path / "comparison"
    shutil.copytree(finished.folder, folder)
    source = tiny().corpus.source
    plan = {
        "tasks": ["perplexity_windows", "passkey_corpus", "niah_single_2"],
        "lengths": [512],
        "documents": 2,
        "depths": 2,
    }
    plans = {"unnamed": plan, "named": plan | {"corpus": f"{source}/../{Path(source).name}"}}
    carry_out(tiny({"evaluation.plans": plans}), folder, only=["ALiBi"])
    held_out = load_corpus(source).held_out
    path = folder / "runs" / "ALiBi" / "seed-3" / "results.jsonl"
    before = len((finished.folder / path.relative_to(folder)).read_text().splitlines())
    lines = [json.loads(line) for line in path.read_text().splitlines()][before:]
    # Both plans have equal texts, so each task runs once.
    assert len([line for line in lines if "identity" in line]) == 3
    for name in plans:
        entries = read_json(path.with_name("measured.json"))
        (entry,) = (entry for entry in entries if entry["name"] == name)
        assert entry["texts"].keys() == set(plan["tasks"])
        read = [line["document"] for line in lines if line.get("task") == "perplexity_windows"]
        assert read
        assert all(any(one.startswith(document.name) for document in held_out) for one in read)
        described = {line["identity"]["task"]: line["identity"] for line in lines if "identity" in line}
        assert described["perplexity_windows"]["corpus"] == f"{Path(source).name} (held out)"
        assert described["passkey_corpus"]["corpus_tokens"] == described["perplexity_windows"]["corpus_tokens"]
        assert described["niah_single_2"]["haystack_fingerprint"] == haystack_of(load_corpus(source)).fingerprint


def test_plans_use_the_tolerance_at_evaluation(asked: Any, plans: dict[str, Any], tmp_path: Path):
    """The second scheme is tested with a tolerance, which enters the ID of a run in the results."""
    run = next(path for path in (asked[0] / "runs").iterdir() if path.name.startswith("BAM")) / "seed-3"
    plan = EvaluationPlan.model_validate(plans["reading"] | {"tasks": ["perplexity"]})

    def ids(folder: Path) -> set[str]:
        lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
        return {line["run"] for line in lines if line.get("task") == "perplexity"}

    found = {}
    for tolerance in (0.0, 0.01):
        model = PriorDecoderForCausalLM.from_pretrained(run / "model", tolerance=tolerance)
        output = tmp_path / str(tolerance)
        evaluate(Subject("mine", model, pretrained_tokenizer(run / "model")), plan, output, chunk=64)
        found[tolerance] = ids(output)
    assert found[0.01] < ids(run)
    assert not found[0.0] & ids(run)


def test_finished_measurements_are_reused(
    asked: Any, tiny: Any, plans: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    folder, _ = asked
    monkeypatch.setattr("subprocess.Popen", lambda *arguments, **options: pytest.fail("a worker was started"))
    before = read_rows(folder)[1:]
    compare(tiny({"evaluation.plans": plans}), folder, console=Console(quiet=True))
    assert read_rows(folder)[1:] == before
    # Results omit plans that are no longer in the recipe.
    compare(tiny({"evaluation.plans": {"reading": plans["reading"]}}), folder, console=Console(quiet=True))
    kept = [row for row in before if row.get("plan") != "eight digits" and row["row"] != "run"]
    assert [row for row in read_rows(folder)[1:] if row["row"] != "run"] == kept


def test_changed_plans_need_the_model(asked: Any, tiny: Any, plans: dict[str, Any], tmp_path: Path):
    folder = tmp_path / "comparison"
    shutil.copytree(asked[0], folder)
    run = folder / "runs" / "ALiBi" / "seed-3"
    longer = {"reading": plans["reading"] | {"lengths": [60, 80, 90], "tasks": ["perplexity"]}}
    carry_out(tiny({"evaluation.plans": longer}), folder, only=["ALiBi"])
    lines = (run / "results.jsonl").read_text().splitlines()
    before = (asked[0] / run.relative_to(folder) / "results.jsonl").read_text().splitlines()
    assert lines[: len(before)] == before
    assert [json.loads(line)["length"] for line in lines[len(before) :]] == [80, 80]
    losses = of_kind(read_rows(folder), "perplexity", scheme="ALiBi", plan="reading")
    assert {row["length"] for row in losses} == {60, 80, 90}

    shutil.rmtree(run / "model")
    plan = tiny({"evaluation.plans": {"reading": longer["reading"] | {"lengths": [70]}}})
    with pytest.raises(FileNotFoundError, match=r"model is missing.*remove .*seed-3 to train the model again"):
        carry_out(plan, folder, only=["ALiBi"])


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (
            {"tasks": ["passkey"], "lengths": [20]},
            r"evaluation\.plans\.more: lengths: 20 tokens for the task 'passkey'",
        ),
        (
            {"tasks": ["perplexity"], "lengths": [64], "corpus": "nowhere"},
            r"plans\.more: corpus: source 'nowhere' does",
        ),
    ],
)
def test_impossible_texts_are_refused_before_any_work(
    tiny: Any, tmp_path: Path, plan: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RecipeError, match=complaint):
        compare(tiny({"evaluation.plans": {"more": plan}}), tmp_path / "new", console=Console(quiet=True))
    assert not (tmp_path / "new" / "runs").exists()


def test_models_with_other_texts_are_not_compared(asked: Any, tiny: Any, plans: dict[str, Any], tmp_path: Path):
    """The files of a package may have changed after some seeds were measured."""
    folder = tmp_path / "comparison"
    shutil.copytree(asked[0], folder)
    recipe = tiny({"evaluation.plans": plans})
    path = folder / "runs" / "ALiBi" / "seed-3" / "measured.json"
    entries = read_json(path)
    assert {entry["name"]: set(entry["texts"]) for entry in entries if entry["name"] is not None} == {
        "eight digits": {"passkey_8", "niah_single_1"},
        "reading": {"perplexity"},  # times do not depend on texts
    }
    for name, place in (("reading", r"plans\.reading"), (None, "perplexity")):
        old = {"texts": {"perplexity": "of last year"}}
        changed = [
            entry | old if (entry["name"], *entry["texts"]) == (name, "perplexity") else entry for entry in entries
        ]
        write_json(path, changed)
        with pytest.raises(
            RecipeError,
            match=rf"evaluation\.{place}: the texts of the task 'perplexity' have changed .* measured\.json",
        ):
            compare(recipe, folder, console=Console(quiet=True))


def test_versions_include_those_of_plans(asked: Any, tiny: Any, plans: dict[str, Any], tmp_path: Path):
    folder = tmp_path / "comparison"
    shutil.copytree(asked[0], folder)
    path = folder / "runs" / "ALiBi" / "seed-3" / "measured.json"
    found = read_json(path)
    found[-1]["versions"]["torch"] = "9.9"
    write_json(path, found)
    results = compare(tiny({"evaluation.plans": plans}), folder, console=Console(quiet=True))
    assert results.study["versions"]["torch"] == f"{asked[1].study['versions']['torch']}, 9.9"


def test_plans_have_separate_folders(tiny: Any):
    plan = {"tasks": ["timing"], "lengths": [64]}
    with pytest.raises(ValueError, match="plans 'a b' and 'a_b' would share the folder 'a_b'"):
        tiny({"evaluation.plans": {"a b": plan, "a_b": plan}})


def test_learned_tables_must_hold_the_texts_of_plans(tiny: Any):
    scheme = {"schemes": {"learned": {"encoding": {"name": "learned", "max_length": 300}}}}
    with pytest.raises(ValueError, match="max_length=300 positions, but the model reads texts of 528 tokens"):
        tiny(scheme | {"evaluation.plans": PLANS})


def test_tables_and_report_show_plans(asked: Any, tmp_path: Path):
    _, results = asked
    page = write_report(results, tmp_path).read_text(encoding="utf-8")
    tables = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "tables").iterdir()}
    assert r"eight digits: niah\_single\_1" in tables["retrieval.md"]
    assert "BAM + SSMax" in tables["retrieval.md"]
    assert "reading: perplexity, texts of 90 tokens; documents: 2" in tables["losses.md"]
    assert "| forward+backward | ALiBi |" in tables["timing.md"]
    assert r"\pm" in tables["timing.tex"]
    assert "Further tasks" in page
    assert "Time and memory of a pass" in page
