"""Sweeps and context extensions that are carried out: what they give, and what an interruption leaves of them."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attention_priors.experiments import RecipeError, compare
from attention_priors.experiments import run as run_module
from attention_priors.experiments.materials import Materials, TextMaterials
from attention_priors.experiments.run import execute, extended_folder
from attention_priors.report import gallery, write_figures, write_report, write_tables

BAM = "BAM + SSMax"
EXTENDED = f"{BAM}, extended to 300"
EXTENSION: dict[str, Any] = {f"schemes.{BAM}.extension": {"context_length": 300, "steps": 4, "checkpoint_steps": 2}}


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished.folder, tmp_path / "copy"))


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


class _StopError(Exception):
    pass


def _execute(materials: Materials, run: Path, stop: tuple[str, int] | None = None) -> list[tuple[str, int]]:
    """Carry a run out and give its progress; ``stop`` interrupts it there."""
    steps: list[tuple[str, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        steps.append((stage, done))
        if (stage, done) == stop:
            raise _StopError

    execute(materials, BAM, 3, run, progress)
    return steps


@pytest.fixture(scope="module")
def extended(finished, tiny, tmp_path_factory) -> tuple[Materials, Path]:
    """A finished run, and its extension, which nothing interrupted."""
    run = tmp_path_factory.mktemp("extended") / "run"
    shutil.copytree(finished.folder / "runs" / "BAM_+_SSMax" / "seed-3", run)
    materials = Materials.load(tiny(EXTENSION), finished.folder / "cache")
    before = _weights(run)
    _execute(materials, run)
    assert _weights(run) == before
    assert _weights(extended_folder(run)) != before
    return materials, run


def test_an_extension_leaves_the_first_models_files_and_its_own(extended):
    _, run = extended
    names = {"model", "training.json", "loss.json", "priors.json", "passkey.jsonl", "perplexity.json", "done.json"}
    assert {path.name for path in extended_folder(run).iterdir()} == names
    loss = _json(extended_folder(run) / "loss.json")
    assert {when: list(losses) for when, losses in loss.items()} == {"before": ["150", "300"], "after": ["150", "300"]}
    assert all(3 < value < 7 for losses in loss.values() for value in losses.values())
    assert loss["before"] != loss["after"]
    assert _json(extended_folder(run) / "training.json")["steps"] == 4


@pytest.mark.parametrize(
    "stop",
    [
        ("extended train", 0),
        ("extended train", 3),
        ("extended train", 4),
        ("extended passkey", 0),
        ("extended perplexity", 1),
    ],
)
def test_an_extension_that_was_interrupted_ends_as_if_nothing_had_happened(extended, finished, tmp_path, stop):
    materials, whole = extended
    run = tmp_path / "run"
    shutil.copytree(finished.folder / "runs" / "BAM_+_SSMax" / "seed-3", run)
    with pytest.raises(_StopError):
        _execute(materials, run, stop)
    assert not (extended_folder(run) / "done.json").exists()
    steps = _execute(materials, run)
    assert _weights(extended_folder(run)) == _weights(extended_folder(whole))
    for name in ("loss.json", "passkey.jsonl", "perplexity.json", "priors.json"):
        one, other = (extended_folder(folder) / name for folder in (run, whole))
        assert one.read_text() == other.read_text(), name
    assert (_json(extended_folder(run) / "training.json"))["history"] == _json(
        extended_folder(whole) / "training.json"
    )["history"]
    if stop == ("extended train", 3):
        assert ("extended train", 3) in steps  # from the checkpoint of step 2
        assert ("extended train", 1) not in steps


def test_the_rows_of_an_extension_are_new_ones(extended, monkeypatch, finished, tmp_path):
    materials, _ = extended
    seeds = []
    original = TextMaterials.training_rows

    def remember(self: TextMaterials, settings: Any, seed: int) -> Any:
        seeds.append((settings.context_length, seed))
        return original(self, settings, seed)

    monkeypatch.setattr(TextMaterials, "training_rows", remember)
    run = tmp_path / "run"
    shutil.copytree(finished.folder / "runs" / "BAM_+_SSMax" / "seed-3", run)
    monkeypatch.setattr(run_module, "_test", lambda *arguments: None)
    _execute(materials, run)
    assert seeds == [(300, 3 + 2**32)]


def test_losses_are_over_whole_held_out_rows_of_the_same_tokens(extended):
    materials, _ = extended
    short, long = (list(materials.held_out_rows(length)) for length in (150, 300))
    tokens = [token for row in short for token in row["input_ids"].tolist()]
    assert tokens == materials.held_out_stream.tokens[: len(tokens)].tolist()
    assert [token for row in long for token in row["input_ids"].tolist()] == tokens[: 300 * len(long)]
    assert 0 <= len(short) - 2 * len(long) <= 1


def test_a_sweep_with_extensions_is_compared_and_reported(copy, tiny, quiet, monkeypatch):
    changes = EXTENSION | {
        "sweep": {
            "schemes": [BAM],
            "axes": {"init": {"prior.init": ["roles", "uniform"]}},
            "base": {"init": "roles"},
        }
    }
    uniform = f"{BAM} · init=uniform"
    # Two at a time; what the folder has of the base is kept.
    before = (copy / "runs" / "BAM_+_SSMax" / "seed-3" / "passkey.jsonl").stat().st_mtime_ns
    results = compare(tiny(changes), copy, only=["BAM*"], processes=2, console=quiet)
    assert (copy / "runs" / "BAM_+_SSMax" / "seed-3" / "passkey.jsonl").stat().st_mtime_ns == before
    assert [scheme["name"] for scheme in results["schemes"]] == [
        "ALiBi", BAM, EXTENDED, uniform, f"{uniform}, extended to 300",
    ]  # fmt: skip
    axes = {"scheme": BAM, "init": "uniform", "extension": "after"}
    assert results["schemes"][-1]["axes"] == axes
    assert results["schemes"][-1]["extended_from"] == uniform
    assert [scheme["context_length"] for scheme in results["schemes"]] == [150, 150, 300, 150, 300]
    for section in ("runs", "passkey", "perplexity", "priors", "logit_scales", "extensions"):
        mine = [row for row in results[section] if row["scheme"] == f"{uniform}, extended to 300"]
        assert mine
        assert all(row["axes"] == axes for row in mine)
        assert all("axes" not in row for row in results[section] if row["scheme"] == "ALiBi")
    assert [(row["from"], row["to"], row["steps"]) for row in results["extensions"]] == [(150, 300, 4)] * 2

    monkeypatch.setattr(gallery.Illustration, "png", lambda _: b"\x89PNG")  # for speed
    write_report(results, copy / "report.html")
    assert "perplexity_by_axis_01_init.png" in [path.name for path in write_figures(results, copy / "figures")]
    assert [path.name for path in write_tables(results, copy / "tables")] == [
        f"{stem}.{ending}"
        for stem in ("passkey", "perplexity", "axes", "extension", "heads", "prior_mass")
        for ending in ("md", "tex")
    ]


def test_another_extension_is_refused_and_the_first_run_kept(copy, tiny, quiet, monkeypatch):
    run = copy / "runs" / "BAM_+_SSMax" / "seed-3"
    identity = tiny(EXTENSION).extension_of(BAM).model_dump(mode="json")
    (run / "extended").mkdir()
    (run / "extended" / "identity.json").write_text(json.dumps({"training": identity}))
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a worker was started"))
    with pytest.raises(
        RecipeError, match=r"extended holds a run of another recipe; .*training\.steps \(there 4, here 5\)"
    ):
        compare(tiny(EXTENSION | {f"schemes.{BAM}.extension.steps": 5}), copy, console=quiet)
    # Without an extension, the run is as finished as it was.
    assert len(compare(tiny(), copy, console=quiet)["runs"]) == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"schemes.ALiBi.extension": {"context_length": 150_000, "tokens_per_step": 150_000, "passkey_ratio": 0}},
            r"schemes\.ALiBi\.extension.*150000",
        ),
        (
            {"schemes.ALiBi.evaluation": {"passkey": {"lengths": [10, 150]}}},
            r"schemes\.ALiBi\.evaluation\.passkey\.lengths: 10 tokens",
        ),
    ],
)
def test_texts_that_cannot_be_made_are_named_before_any_work(tiny, tmp_path, quiet, changes, complaint):
    with pytest.raises(RecipeError, match=complaint):
        compare(tiny(changes), tmp_path / "out", console=quiet)
    assert not (tmp_path / "out" / "runs").exists()


def test_a_pattern_chooses_schemes(tiny, tmp_path, quiet):
    with pytest.raises(RecipeError, match=r"unknown scheme 'RoPE\*'; the recipe has ALiBi"):
        compare(tiny(), tmp_path / "out", only=["RoPE*"], console=quiet)
