"""An interrupted comparison resumes, and has the results of an uninterrupted one."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from filelock import FileLock, Timeout
from recipe_cases import carry_out, changed, of_kind

from attention_priors import attend
from attention_priors._io import write_json
from attention_priors.lab.cli import main
from attention_priors.lab.results import FILE, read_rows
from attention_priors.lab.study import Recipe, worker
from attention_priors.lab.study.decoders import DecoderStudy
from attention_priors.lab.study.results import collect
from attention_priors.lab.study.runs import Progress, run_folder
from attention_priors.lab.study.workers import FINISHED, TAKEN, cuda_devices, least_taken
from attention_priors.lab.train.engine import Trained
from processes import fork


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _wait_for(path: Path, process: BaseProcess) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.is_alive()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)


def test_ctrl_c_in_training_ends_all_processes_without_loss(finished, tiny, tmp_path, quiet, monkeypatch):
    recipe, output, printed = tmp_path / "tiny.yaml", tmp_path / "out", tmp_path / "printed"
    recipe.write_text(json.dumps(changed({"corpus.source": tiny().corpus.source})))
    words = ["compare", str(recipe), "--output", str(output), "--only", "ALiBi", "--processes", "1"]

    def call() -> None:
        # The parent of the tests may ignore Ctrl-C, which is inherited.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv[1:] = words
        main()

    process = fork(call, printed)
    run = output / "runs" / "ALiBi" / "seed-3"
    try:
        # The last file of the first checkpoint, at a third of the training.
        _wait_for(run / "checkpoints" / "checkpoint-40" / "trainer_state.json", process)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
    finally:
        process.kill()
    assert process.exitcode == 130, printed.read_text()
    assert "run the same command to resume" in " ".join(printed.read_text().split())
    assert "Traceback" not in printed.read_text()
    assert not any(worker.is_running() for worker in workers)
    assert not (run / "model").exists()
    assert not (output / FILE).exists()

    results = carry_out(tiny(), output, ["ALiBi"])
    resumed, whole = _json(run / "training.json"), _json(finished.folder / run.relative_to(output) / "training.json")
    assert resumed["history"] == whole["history"]
    for kind in ("retrieval", "perplexity", "prior"):
        assert of_kind(read_rows(output), kind) == finished.rows(kind, scheme="ALiBi"), kind
    assert results.study["wall_seconds"] > 0  # from the interrupted call


@pytest.fixture
def recipe_file(tiny: Any, tmp_path: Path) -> Path:
    write_json(tmp_path / "recipe.json", tiny().model_dump(mode="json"))
    return tmp_path / "recipe.json"


def test_workers_lock_their_run_and_end_with_their_parent(recipe_file: Path, tmp_path: Path):
    """A surviving worker would write to the files of the next call's workers."""
    run = run_folder(tmp_path / "out", "ALiBi", 3)
    run.mkdir(parents=True)
    (from_parent, to_worker), (from_worker, to_parent) = os.pipe(), os.pipe()

    def work(output: Path, scheme: str, seed: int, progress: Progress) -> None:
        progress("train", 0, 120)
        time.sleep(120)
        (run / "model").mkdir()

    def call() -> None:
        os.close(to_worker)
        os.dup2(from_parent, 0)
        worker.load_study = lambda *arguments: MagicMock(is_finished=lambda *run: False, execute=work)
        with open(to_parent, "w") as sys.stdout:
            worker.main(str(recipe_file), str(tmp_path / "out"), "ALiBi", "3", "0")

    process = fork(call, tmp_path / "printed")
    os.close(to_parent)
    os.close(from_parent)
    try:
        with open(from_worker) as lines:
            assert json.loads(lines.readline()) == {"stage": "train", "done": 0, "total": 120}
        with pytest.raises(Timeout):
            FileLock(run / ".lock", timeout=0).acquire()
        os.close(to_worker)  # as when the parent is killed
        process.join(60)
        assert process.exitcode == 1
    finally:
        process.kill()
    assert not (run / "model").exists()


@pytest.fixture
def exit_code(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Return a worker as a function of its arguments, run in this process without its global side effects."""
    for name in ("_end_with_the_parent", "logging"):
        monkeypatch.setattr(worker, name, MagicMock())
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(sys, "stdout", sys.stdout)

    def run(*arguments: object) -> object:
        with pytest.raises(SystemExit) as ended:
            worker.main(*map(str, arguments))
        return ended.value.code

    return run


@pytest.mark.parametrize("patience", [0, 0.5])
def test_two_processes_do_not_execute_one_run(recipe_file, tmp_path, exit_code, patience):
    folder = run_folder(tmp_path / "out", "ALiBi", 3)
    folder.mkdir(parents=True)
    with FileLock(folder / ".lock"):
        assert exit_code(recipe_file, tmp_path / "out", "ALiBi", 3, patience) == TAKEN
    assert not (folder / "training.json").exists()


def test_workers_report_finished_runs(finished, exit_code):
    assert exit_code(finished.folder / "recipe.json", finished.folder, "ALiBi", 3, 0) == FINISHED


# ---- single runs, in this process


class _StopError(Exception):
    pass


def _execute(recipe: Recipe, scheme: str, output: Path, cache: Path, stop: str | None = None) -> list[str]:
    """Execute a run and return its stages. ``stop`` interrupts it after a first step."""
    stages: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        stages.append(stage)
        if stage == stop and done > 0:
            raise _StopError

    run_folder(output, scheme, 3).mkdir(parents=True, exist_ok=True)
    DecoderStudy(recipe, cache).execute(output, scheme, 3, progress)
    return stages


@pytest.fixture
def trained(finished, tmp_path) -> Path:
    """Return a run that is trained but not tested, in the folder of a comparison."""
    output = tmp_path / "comparison"
    run = run_folder(output, "ALiBi", 3)
    shutil.copytree(run_folder(finished.folder, "ALiBi", 3), run)
    for name in ("results.jsonl", "log.jsonl", "measured.json", "priors.json", "done.json"):
        (run / name).unlink()
    return output


_Predictions = tuple[torch.Tensor, torch.Tensor]


def _predictions(answers: torch.Tensor, right: torch.Tensor | bool) -> _Predictions:
    """Return predictions and margins of a model that is right or wrong about each answer."""
    rights = torch.as_tensor(right).expand(answers.shape)
    return torch.where(rights, answers, answers + 1), torch.where(rights, 1.0, -1.0)


@pytest.fixture
def lengths_read(monkeypatch) -> list[int]:
    """Record the lengths of the read texts. A text counts as right according to its last digit."""
    lengths: list[int] = []

    def forced(model: object, prompts: torch.Tensor, answers: torch.Tensor, **options: Any) -> _Predictions:
        lengths.append(prompts.shape[1])
        return _predictions(answers, answers[:, -1:] % 2 == 1)

    monkeypatch.setattr("attention_priors.lab.tasks.retrieval.forced_predictions", forced)
    return lengths


MANY = {"evaluation.passkey.trials": 3, "evaluation.passkey.stop_after_zeros": None}


def test_interrupted_evaluations_resume_anywhere(tiny, finished, trained, lengths_read):
    """Interruptions come after whole lines, after a truncated line, and after the end of a plan."""
    recipe, run = tiny(MANY), run_folder(trained, "ALiBi", 3)
    with pytest.raises(_StopError):
        _execute(recipe, "ALiBi", trained, finished.folder / "cache", stop="evaluate")
    begun = (run / "results.jsonl").read_text().splitlines()
    assert len(begun) == 2  # the plan's identity, and one text
    assert not (run / "done.json").exists()
    stages = _execute(recipe, "ALiBi", trained, finished.folder / "cache")
    assert stages.count("train") == 1  # recorded as done, and not repeated
    assert lengths_read == [150] * 6 + [160] * 6 + [170] * 6
    whole, measured = ((run / name).read_text() for name in ("results.jsonl", "measured.json"))
    lines = whole.splitlines(keepends=True)
    assert [line.rstrip() for line in lines[:2]] == begun
    assert len({json.loads(line).get("score") for line in lines[1:19]}) == 2
    for kept in (1, 7, 18):
        (run / "results.jsonl").write_text("".join(lines[:kept]) + lines[kept][:-9])
        for name in ("measured.json", "done.json"):
            (run / name).unlink()
        lengths_read.clear()
        _execute(recipe, "ALiBi", trained, finished.folder / "cache")
        assert lengths_read == ([150] * 6 + [160] * 6 + [170] * 6)[kept - 1 :]
        assert (run / "results.jsonl").read_text() == whole
        assert _without_times(_json(run / "measured.json")) == _without_times(json.loads(measured))
        assert (run / "done.json").exists()
    # A finished plan is not repeated, even if its lines are lost.
    entries = _json(run / "measured.json")
    write_json(run / "measured.json", entries[:1])
    (run / "results.jsonl").unlink()
    lengths_read.clear()
    _execute(recipe, "ALiBi", trained, finished.folder / "cache")
    assert lengths_read == []
    assert _without_times(_json(run / "measured.json")) == _without_times(entries)


def _without_times(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


@pytest.mark.parametrize("right_at", [{150}, {160}, set()])
def test_schemes_without_retrieval_stop_early_with_a_record(tiny, finished, trained, monkeypatch, right_at):
    monkeypatch.setattr(
        "attention_priors.lab.tasks.retrieval.forced_predictions",
        lambda model, prompts, answers, **options: _predictions(answers, prompts.shape[1] in right_at),
    )
    recipe = tiny({"evaluation.perplexity": ...})
    # Two consecutive lengths without a success.
    count, reason = {
        150: (6, None), 160: (6, None), 0: (4, "nothing right at 2 lengths running (150, 160 tokens)")
    }[max(right_at, default=0)]  # fmt: skip
    for _ in range(2):  # resuming afterwards measures nothing more
        _execute(recipe, "ALiBi", trained, finished.folder / "cache")
        results = collect(recipe, trained, [("ALiBi", 3)], wall_seconds=1.0, corpus={})
        assert [row["length"] for row in of_kind(results, "retrieval")] == [150, 150, 160, 160, 170, 170][:count]
        assert [run["stopped"] for run in of_kind(results, "run")] == [reason]
        for name in ("measured.json", "done.json"):
            (run_folder(trained, "ALiBi", 3) / name).unlink()


def test_a_stopped_plan_does_not_stop_the_preset(tiny, finished, trained, monkeypatch):
    monkeypatch.setattr(
        "attention_priors.lab.tasks.retrieval.forced_predictions",
        lambda model, prompts, answers, **options: _predictions(answers, answers.shape[1] == 5),
    )
    further = {"tasks": ["passkey_8"], "lengths": [300, 310], "depths": 2, "stop_after_zeros": 1}
    recipe = tiny({"evaluation.perplexity": ..., "evaluation.plans": {"further": further}})
    _execute(recipe, "ALiBi", trained, finished.folder / "cache")
    results = collect(recipe, trained, [("ALiBi", 3)], wall_seconds=1.0, corpus={})
    assert {row["length"]: row["stopped"] for row in of_kind(results, "retrieval", plan="further")} == {
        300: "nothing right at 1 length running (300 tokens)"
    }
    assert [run["stopped"] for run in of_kind(results, "run")] == [None]


def test_every_scheme_is_tested_on_equal_texts(finished):
    """The texts do not depend on the seed of the run."""
    identities, expected = [], []
    for scheme in ("ALiBi", "BAM + SSMax"):
        path = run_folder(finished.folder, scheme, 3) / "results.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        identities.append([line["identity"] | {"model": ""} for line in lines if "identity" in line])
        expected.append([line["expected"] for line in lines if "expected" in line][:4])
    assert identities[0] == identities[1]
    assert expected[0] == expected[1]


def test_the_time_of_a_training_survives_a_failure_to_save_it(tiny, finished, tmp_path, monkeypatch):
    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    changes = {"training.steps": 2, "evaluation.passkey": ..., "evaluation.perplexity": ...}
    recipe, run = tiny(changes), run_folder(tmp_path, "ALiBi", 3)
    with monkeypatch.context() as patch:
        patch.setattr(Trained, "save", full)
        with pytest.raises(OSError, match="No space left"):
            _execute(recipe, "ALiBi", tmp_path, finished.folder / "cache")
    write_json(run / "train_seconds.json", 1000 + _json(run / "train_seconds.json"))
    _execute(recipe, "ALiBi", tmp_path, finished.folder / "cache")
    assert _json(run / "training.json")["train_seconds"] >= 1000
    assert not (run / "train_seconds.json").exists()


def _first_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Return the first position with different losses."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a["position"] is not None]
    return next((a["position"] for a, b in pairs if abs(a["nll"] - b["nll"]) > 1e-5), float("inf"))


@pytest.mark.parametrize(
    "scheme",
    [
        {"change": {"prior": {"name": "window", "size": 40}}},
        {"prior": "laplace", "share_prior": True, "change": {"prior": ["laplace", {"name": "window", "size": 40}]}},
        {
            "encoding": {"name": "rotary", "base": 100},
            "change": {"encoding": {"name": "rotary", "base": 100, "base_multiplier": 0.02}},
        },
        {"encoding": "rotary", "change": {"encoding": {"name": "rotary", "base_multiplier": 50}}},
    ],
    ids=["a window alone", "a window with a shared prior", "a smaller base", "a larger base"],
)
def test_position_changes_without_steps_apply_after_training(tiny, finished, tmp_path, scheme):
    way = scheme["change"] | {"context_length": 160, "steps": 0}
    first = {key: value for key, value in scheme.items() if key != "change"}
    changes = {
        "schemes": {"new": first | {"extensions": {"changed": way}}},
        "training.steps": 1,
        "training.passkey_ratio": 0,
        "model.initializer_range": 0.5,
        "evaluation.passkey": ...,
    }
    _execute(tiny(changes), "new", tmp_path, finished.folder / "cache")
    run = run_folder(tmp_path, "new", 3)
    changed = run / "extended" / "changed"
    position = _first_difference(*(_json(folder / "measured.json")[0]["rows"] for folder in (changed, run)))
    if "prior" in way:
        # A query sees 40 tokens, including itself. The 41st token is the first that misses one.
        assert position == pytest.approx((32 * 63) ** 0.5)
    else:
        assert position < 16
    layers = {row["layer"] for row in _json(changed / "priors.json")["priors"]}
    assert layers == ({0} if scheme.get("share_prior") else {0, 1} if "prior" in way else set())


def test_a_tolerance_at_evaluation_does_not_apply_in_training(tiny, finished, tmp_path, monkeypatch):
    seen: dict[bool, set[float]] = {True: set(), False: set()}

    def watched(query: torch.Tensor, *arguments: Any, tolerance: float = 0.0, **options: Any) -> torch.Tensor:
        seen[torch.is_grad_enabled()].add(tolerance)
        return attend(query, *arguments, tolerance=tolerance, **options)

    monkeypatch.setattr("attention_priors.models.pretrained.attend", watched)
    scheme = {"prior": "laplace", "evaluation": {"tolerance": 0.25}}
    changes = {"schemes": {"new": scheme}, "training.steps": 1, "evaluation.passkey": ...}
    _execute(tiny(changes), "new", tmp_path, finished.folder / "cache")
    assert seen[True] == {0.0}
    assert 0.25 in seen[False]


def test_rows_of_a_replaced_model_are_dropped(tiny, finished, trained, lengths_read):
    recipe, run = tiny(MANY | {"training.steps": 1}), run_folder(trained, "ALiBi", 3)
    with pytest.raises(_StopError):
        _execute(recipe, "ALiBi", trained, finished.folder / "cache", stop="evaluate")
    shutil.rmtree(run / "model")
    lengths_read.clear()
    _execute(recipe, "ALiBi", trained, finished.folder / "cache")
    assert len(lengths_read) == 3 * 6  # all texts are read
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    assert len({line["identity"]["model"] for line in lines if "identity" in line}) == 1


# ---- devices


def test_runs_are_distributed_over_devices(monkeypatch: pytest.MonkeyPatch):
    for count, visible, expected in (
        (0, None, []),
        (2, None, ["0", "1"]),
        (2, "3, 5", ["3", "5"]),
        (1, "GPU-8f1c", ["GPU-8f1c"]),
    ):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert cuda_devices() == expected
    assert least_taken([], []) is None
    assert least_taken(["0"], [None]) is None
    assert least_taken(["0", "1"], []) == "0"
    assert least_taken(["0", "1", "2"], ["0", "1"]) == "2"
    assert least_taken(["0", "1"], ["1", "0", "0"]) == "1"
