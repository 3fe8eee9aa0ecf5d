"""Sweeps and context extensions: results, and interruptions."""

import hashlib
import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_cases import carry_out, of_kind
from safetensors.torch import load_file
from transformers import set_seed

from attention_priors.lab.report import write_report
from attention_priors.lab.report.tables import tables
from attention_priors.lab.results import read_rows
from attention_priors.lab.study import RecipeError, compare
from attention_priors.lab.study.decoders import STAGES, DecoderStudy
from attention_priors.lab.study.materials import TextMaterials
from attention_priors.lab.study.runs import extended_folder, run_folder
from attention_priors.models import PriorDecoderForCausalLM
from attention_priors.models.repositioning import with_positions
from thoroughness import every_other_deep

BAM = "BAM + SSMax"
LONGER = {"context_length": 300, "steps": 4, "checkpoint_steps": 2}
ON, FRESH, BARE = "trained on", "another prior", "no prior, untrained"
SAMPLED = {"name": "generalized_gaussian", "init": "sampled"}
WAYS: dict[str, Any] = {
    ON: LONGER,
    FRESH: LONGER | {"prior": SAMPLED, "logit_scale": None},
    BARE: {"context_length": 300, "steps": 0, "prior": None},
}
EXTENSIONS: dict[str, Any] = {f"schemes.{BAM}.extensions": WAYS}
FILES = {
    "model", "training.json", "losses.json", "priors.json", "results.jsonl", "log.jsonl", "measured.json", "done.json",
    ".lock",
}  # fmt: skip


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished.folder, tmp_path / "copy"))


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


class _StopError(Exception):
    pass


def _execute(study: DecoderStudy, output: Path, stop: tuple[str, int | None] | None = None) -> list[tuple[str, int]]:
    """Run the scheme and return its progress. ``stop`` interrupts it in that stage; None, at the stage's first step."""
    steps: list[tuple[str, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        steps.append((stage, done))
        if stop in ((stage, done), (stage, None)):
            raise _StopError

    study.execute(output, BAM, 3, progress)
    return steps


def _first(finished: Any, output: Path) -> Path:
    """Copy the finished run into the folder of a comparison."""
    run = run_folder(output, BAM, 3)
    shutil.copytree(run_folder(finished.folder, BAM, 3), run)
    return run


@pytest.fixture(scope="module")
def extended(finished, tiny, tmp_path_factory) -> tuple[DecoderStudy, Path]:
    """Return a finished run and its uninterrupted extensions."""
    output = tmp_path_factory.mktemp("extended")
    run, study = _first(finished, output), DecoderStudy(tiny(EXTENSIONS), finished.folder / "cache")
    before = _weights(run)
    _execute(study, output)
    assert _weights(run) == before
    assert _weights(extended_folder(run, ON)) != before
    return study, run


def test_extensions_keep_the_first_models_files(extended):
    _, run = extended
    assert {path.name for path in (run / "extended").iterdir()} == {"trained_on", "another_prior", "no_prior_untrained"}
    losses = [_json(run / "losses.json")]
    for way, steps in ((ON, 4), (FRESH, 4), (BARE, 0)):
        assert {path.name for path in extended_folder(run, way).iterdir()} == FILES
        losses.append(_json(extended_folder(run, way) / "losses.json"))
        training = _json(extended_folder(run, way) / "training.json")
        assert (training["steps"], len(training["history"])) == (steps, steps)
    assert all(list(of_model) == ["150", "300"] for of_model in losses)
    assert all(3 < value < 7 for of_model in losses for value in of_model.values())
    assert len({json.dumps(of_model) for of_model in losses}) == len(losses)


def test_every_extension_starts_from_the_first_model(extended):
    _, run = extended
    first, bare, fresh = (
        load_file(folder / "model" / "model.safetensors")
        for folder in (run, extended_folder(run, BARE), extended_folder(run, FRESH))
    )
    # Without training, only the prior differs.
    assert {name for name in first if ".prior." not in name} == set(bare)
    assert all(torch.equal(weight, first[name]) for name, weight in bare.items())
    # After four steps, weights are near the first model's, and the prior's parameters near their new start.
    kept = [name for name in fresh if ".prior." not in name]
    assert not any("logit_scale" in name for name in fresh)
    assert all(torch.allclose(fresh[name], first[name], rtol=0, atol=0.02) for name in kept)
    assert not all(torch.equal(fresh[name], first[name]) for name in kept)
    set_seed(3)
    start = with_positions(
        PriorDecoderForCausalLM.from_pretrained(run / "model"), {"prior": SAMPLED, "logit_scale": None}
    ).state_dict()
    new = [name for name in fresh if ".prior." in name]
    assert all(torch.allclose(fresh[name], start[name], rtol=0, atol=0.02) for name in new)
    assert not all(torch.allclose(first[name], start[name], rtol=0, atol=0.1) for name in new)


@pytest.mark.parametrize(
    "stop",
    every_other_deep(
        [
            (f"{ON}: train", 0),
            (f"{ON}: train", 3),
            (f"{ON}: train", 4),
            (f"{ON}: evaluate", None),
            (f"{FRESH}: train", 0),
            (f"{FRESH}: train", 3),
            (f"{FRESH}: evaluate", 100),
            (f"{BARE}: train", 1),
            (f"{BARE}: evaluate", None),
        ],
        quick=[(f"{ON}: train", 3), (f"{ON}: evaluate", None), (f"{FRESH}: evaluate", 100), (f"{BARE}: train", 1)],
    ),
)
def test_interrupted_extensions_resume_with_equal_results(extended, finished, tiny, tmp_path, stop):
    _, whole = extended
    way = stop[0].split(":")[0]
    study = DecoderStudy(tiny({f"schemes.{BAM}.extensions": {way: WAYS[way]}}), finished.folder / "cache")
    run = _first(finished, tmp_path)
    with pytest.raises(_StopError):
        _execute(study, tmp_path, stop)
    assert not (extended_folder(run, way) / "done.json").exists()
    steps = _execute(study, tmp_path)
    one, other = (extended_folder(folder, way) for folder in (run, whole))
    assert _weights(one) == _weights(other)
    for name in ("losses.json", "results.jsonl", "priors.json"):
        assert (one / name).read_text() == (other / name).read_text(), name
    assert _json(one / "training.json")["history"] == _json(other / "training.json")["history"]
    if stop[1] == 3:
        assert (f"{way}: train", 3) in steps  # from the checkpoint of step 2
        assert (f"{way}: train", 1) not in steps


def test_new_extensions_reuse_finished_work(extended, finished, tiny, tmp_path):
    _, whole = extended
    run = _first(finished, tmp_path)
    for ways in ({ON: WAYS[ON]}, WAYS):
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
        study = DecoderStudy(tiny({f"schemes.{BAM}.extensions": ways}), finished.folder / "cache")
        steps = _execute(study, tmp_path)
        # Losses before the extension cover the known lengths.
        assert before == {path: path.stat().st_mtime_ns for path in before}
    done = [(f"{ON}: {stage}", count) for stage, count in zip(STAGES, (4, 1), strict=True)]
    assert [step for step in steps if step[0].startswith(ON)] == done
    for way in WAYS:
        assert _weights(extended_folder(run, way)) == _weights(extended_folder(whole, way))


def test_extensions_train_on_new_rows(extended, monkeypatch, finished, tmp_path):
    study, _ = extended
    seeds = []
    original = TextMaterials.training_rows

    def remember(self: TextMaterials, settings: Any, seed: int) -> Any:
        seeds.append((settings.context_length, seed))
        return original(self, settings, seed)

    monkeypatch.setattr(TextMaterials, "training_rows", remember)
    _first(finished, tmp_path)
    monkeypatch.setattr(DecoderStudy, "measure", lambda *arguments: None)
    _execute(study, tmp_path)
    assert seeds == [(300, 3 + 2**32)] * 2


def test_losses_cover_whole_held_out_rows_of_equal_tokens(extended):
    study, _ = extended
    materials = study.materials
    assert isinstance(materials, TextMaterials)
    short, long = (list(materials.held_out_rows(length)) for length in (150, 300))
    tokens = [token for row in short for token in row["input_ids"].tolist()]
    assert tokens == materials.held_out_stream.tokens[: len(tokens)].tolist()
    assert [token for row in long for token in row["input_ids"].tolist()] == tokens[: 300 * len(long)]
    assert 0 <= len(short) - 2 * len(long) <= 1


def test_a_sweep_with_extensions_is_compared_and_reported(copy, extended, tiny):
    _, run = extended
    shutil.copytree(run, run_folder(copy, BAM, 3), dirs_exist_ok=True)
    changes = EXTENSIONS | {
        "sweep": {
            "schemes": [BAM],
            "axes": {"init": {"prior.init": ["roles", "uniform"]}},
            "base": {"init": "roles"},
        }
    }
    uniform = f"{BAM} · init=uniform"
    # The base keeps its results.
    before = (run_folder(copy, BAM, 3) / "results.jsonl").stat().st_mtime_ns
    results = carry_out(tiny(changes), copy, only=[BAM, uniform])
    assert (run_folder(copy, BAM, 3) / "results.jsonl").stat().st_mtime_ns == before
    rows = partial(of_kind, read_rows(copy))
    names = {scheme: [f"{scheme}, extended to 300: {way}" for way in WAYS] for scheme in (BAM, uniform)}
    assert results.names == [
        "ALiBi", BAM, *names[BAM], uniform, *names[uniform],
    ]  # fmt: skip
    entries = {scheme["scheme"]: scheme for scheme in results.schemes}
    assert entries[uniform]["axes"] == {"scheme": BAM, "init": "uniform", "extension": "before"}
    for name, way in zip(names[uniform], WAYS, strict=True):
        axes = {"scheme": BAM, "init": "uniform", "extension": way}
        assert (entries[name]["axes"], entries[name]["extended_from"]) == (axes, uniform)
        assert entries[name]["context_length"] == (150 if way == BARE else 300)  # length of the last training
        assert all(rows(kind, scheme=name) for kind in ("run", "retrieval", "perplexity", "extension"))
    assert "axes" not in entries["ALiBi"]
    on, fresh, bare = names[uniform]
    assert {row["scheme"] for row in rows("prior")} >= {on, fresh}
    assert not rows("prior", scheme=bare)
    assert not rows("logit_scale", scheme=fresh)
    assert entries[bare]["description"] == (
        "ssmax · tolerance=0.01 at evaluation · training(steps=3) · for 300 tokens without more training, from "
        + uniform
    )
    assert (entries[bare]["prior_parameters"], entries[on]["prior_parameters"]) == (4, 4 + 8)
    assert [row["final_loss"] for row in rows("run", scheme=bare)] == [None]
    extended = {row["scheme"]: row for row in rows("extension")}
    assert [(row["from"], row["to"], row["steps"]) for row in extended.values()] == [
        (150, 300, 4), (150, 300, 4), (150, 300, 0),
    ] * 2  # fmt: skip
    run = copy / "runs" / "BAM_+_SSMax_init_uniform" / "seed-3"
    assert extended[fresh]["loss"] == {
        "before": _json(run / "losses.json"), "after": _json(extended_folder(run, FRESH) / "losses.json"),
    }  # fmt: skip

    write_report(results, copy)
    assert [line[:3] for line in tables(results)["extension"].merged][:4] == [
        [BAM, "before", "–"], ["150 → 300", ON, "4"], ["", FRESH, "4"], ["", BARE, "0"],
    ]  # fmt: skip
    made = {"passkey", "margins_and_reach", "perplexity", "axes", "extension", "heads"}
    made |= {"prior_mass", "prior_reach", "training", "runs"}
    assert {path.name for path in (copy / "tables").iterdir()} == {f"{n}.{end}" for n in made for end in ("md", "tex")}


def test_changed_extensions_are_refused_and_the_first_run_stays(copy, tiny, quiet, monkeypatch):
    for path, content in DecoderStudy(tiny(EXTENSIONS), copy / "cache").identities(copy, BAM, 3).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a worker was started"))
    for way, other, complaint in (
        (ON, {"steps": 5}, r"trained_on holds a run of another recipe; .*training\.steps \(there 4, here 5\)"),
        (FRESH, {"prior": None}, r"another_prior holds a run of another recipe; .*positions\.prior .*here None"),
        (BARE, {"context_length": 450}, r"untrained holds a run .*context_length \(there 300, here 450\)"),
    ):
        with pytest.raises(RecipeError, match=complaint):
            compare(tiny({f"schemes.{BAM}.extensions": WAYS | {way: WAYS[way] | other}}), copy, console=quiet)
    # Without an extension, the run is finished.
    assert len(compare(tiny(), copy, console=quiet)["run"]) == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"schemes.ALiBi.extensions.on": {"context_length": 150_000, "batch_size": 1, "passkey_ratio": 0}},
            r"schemes\.ALiBi\.extensions\.on.*150000",
        ),
        (
            {"schemes.ALiBi.extensions.bare": {"context_length": 150_000, "steps": 0, "prior": None}},
            r"schemes\.ALiBi\.extensions\.bare\.context_length: .* fewer than a row of 150000",
        ),
        (
            {"schemes.ALiBi.evaluation": {"passkey": {"lengths": [10, 150]}}},
            r"schemes\.ALiBi\.evaluation\.passkey: lengths: 10 tokens",
        ),
    ],
)
def test_impossible_texts_are_named_before_any_work(tiny, tmp_path, quiet, changes, complaint):
    with pytest.raises(RecipeError, match=complaint):
        compare(tiny(changes), tmp_path / "out", console=quiet)
    assert not (tmp_path / "out" / "runs").exists()


def test_patterns_select_schemes(tiny, tmp_path, quiet):
    with pytest.raises(RecipeError, match=r"unknown scheme 'RoPE\*'; the recipe has 'ALiBi'"):
        compare(tiny(), tmp_path / "out", only=["RoPE*"], console=quiet)
