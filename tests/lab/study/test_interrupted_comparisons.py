"""A comparison that is interrupted goes on from there, and ends as if nothing had happened."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from recipe_cases import changed, of_kind

from attention_priors import attend
from attention_priors._io import write_json
from attention_priors.lab.data import PasskeyTask
from attention_priors.lab.output_folder import sole_writer
from attention_priors.lab.results import FILE, read_rows
from attention_priors.lab.study import Recipe, compare
from attention_priors.lab.study.folders import run_folder
from attention_priors.lab.study.materials import Materials
from attention_priors.lab.study.run import execute
from attention_priors.lab.study.workers import TAKEN, cuda_devices, least_taken
from attention_priors.lab.train import Trained


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)


def _begin(source: str, folder: Path) -> subprocess.Popen[str]:
    """Start the command for one scheme, with the output folder ``out``."""
    recipe = folder / "tiny.yaml"
    recipe.write_text(json.dumps(changed({"corpus.source": source})))
    start = [sys.executable, "-c", "from attention_priors.lab.cli import main; main()"]
    return subprocess.Popen(
        [*start, "compare", str(recipe), "--output", str(folder / "out"), "--only", "ALiBi", "--processes", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever started the tests may have chosen to ignore Ctrl-C, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Popen has no preexec_fn there")
def test_ctrl_c_in_training_ends_all_processes_and_loses_nothing(finished, tiny, tmp_path, quiet):
    process, output = _begin(tiny().corpus.source, tmp_path), tmp_path / "out"
    run = output / "runs" / "ALiBi" / "seed-3"
    try:
        # The last file of the first checkpoint, at a third of the training.
        _wait_for(run / "checkpoints" / "checkpoint-40" / "trainer_state.json", process)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "the same command goes on from here" in " ".join(err.split())
    assert "Traceback" not in out + err
    assert not any(worker.is_running() for worker in workers)
    assert not (run / "model").exists()
    assert not (output / FILE).exists()

    results = compare(tiny(), output, only=["ALiBi"], console=quiet)
    resumed, whole = _json(run / "training.json"), _json(finished.folder / run.relative_to(output) / "training.json")
    assert resumed["history"] == whole["history"]
    for kind in ("retrieval", "perplexity", "prior"):
        assert of_kind(read_rows(output), kind) == finished.rows(kind, scheme="ALiBi"), kind
    assert results.study["wall_seconds"] >= results["run"].train_seconds[0]


@pytest.mark.skipif(sys.platform == "win32", reason="Popen has no preexec_fn there")
def test_workers_do_not_outlive_a_parent_that_is_killed(tiny, tmp_path):
    """They would write to the files of those that the next call starts."""
    process = _begin(tiny().corpus.source, tmp_path)
    try:
        _wait_for(tmp_path / "out" / "runs" / "ALiBi" / "seed-3" / "checkpoints" / "checkpoint-40", process)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
    finally:
        process.kill()
    process.communicate()
    # Of those that nobody waits for, what is left may be a name in a table.
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("patience", ["0", "0.5"])
def test_two_processes_do_not_carry_out_the_same_run(tiny, tmp_path, patience):
    output, recipe = tmp_path / "out", tiny()
    write_json(output / "recipe.json", recipe.model_dump(mode="json"))
    folder = run_folder(output, "ALiBi", 3)
    folder.mkdir(parents=True)
    worker = [sys.executable, "-m", "attention_priors.lab.study.worker"]
    with sole_writer(folder):
        process = subprocess.Popen(
            [*worker, output / "recipe.json", output, "ALiBi", "3", patience],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.wait(timeout=120) == TAKEN
    assert process.communicate()[1] == ""
    assert not (folder / "identity.json").exists()


# ---- single runs, in this process


class _StopError(Exception):
    pass


def _execute(recipe: Recipe, scheme: str, folder: Path, cache: Path, stop: str | None = None) -> list[str]:
    """Carry a run out and give the stages it went through; ``stop`` interrupts it after a first step."""
    stages: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        stages.append(stage)
        if stage == stop and done > 0:
            raise _StopError

    execute(Materials.load(recipe, cache), scheme, 3, folder, progress)
    return stages


@pytest.fixture
def trained(finished, tmp_path) -> Path:
    """A run that is trained and not tested."""
    run = tmp_path / "run"
    shutil.copytree(finished.folder / "runs" / "ALiBi" / "seed-3", run)
    for name in ("passkey.jsonl", "perplexity.json", "priors.json", "done.json"):
        (run / name).unlink()
    return run


@pytest.fixture
def half_right(monkeypatch) -> list[int]:
    """Texts count as right by their last digit. Gives their lengths as they are read."""
    lengths: list[int] = []

    def retrieves(model: object, tokens: Any, *, chunk: int) -> bool:
        lengths.append(len(tokens))
        return bool(int(tokens[-1]) % 2)

    monkeypatch.setattr("attention_priors.lab.evaluate.passkey.retrieves", retrieves)
    return lengths


def _whole_test(recipe: Recipe, trained: Path, finished: Any, half_right: list[int]) -> list[str]:
    """The lines of an evaluation that nothing interrupted."""
    reference = trained.with_name("reference")
    shutil.copytree(trained, reference)
    _execute(recipe, "ALiBi", reference, finished.folder / "cache")
    half_right.clear()
    return (reference / "passkey.jsonl").read_text().splitlines(keepends=True)


MANY = {"evaluation.passkey.trials": 3, "evaluation.passkey.stop_after_zeros": None}


@pytest.mark.parametrize("kept", [0, 1, 3, 5])
def test_a_line_that_was_cut_off_is_measured_again(tiny, finished, trained, half_right, kept):
    recipe = tiny(MANY)
    whole = _whole_test(recipe, trained, finished, half_right)
    assert len(whole) == 6
    assert len({json.loads(line)["correct"] for line in whole}) > 1
    (trained / "passkey.jsonl").write_text("".join(whole[:kept]) + whole[kept][:-9])
    stages = _execute(recipe, "ALiBi", trained, finished.folder / "cache")
    assert (trained / "passkey.jsonl").read_text() == "".join(whole)
    assert half_right == [length + 5 for length in (150, 160, 170) for _ in range(6)][3 * kept :]
    assert (trained / "done.json").exists()
    assert stages.count("train") == 1  # said to be done, and not done again


def test_an_evaluation_that_was_interrupted_keeps_its_rows(tiny, finished, trained, half_right):
    recipe = tiny(MANY)
    whole = _whole_test(recipe, trained, finished, half_right)
    with pytest.raises(_StopError):
        _execute(recipe, "ALiBi", trained, finished.folder / "cache", stop="passkey")
    assert (trained / "passkey.jsonl").read_text() == whole[0]
    assert not (trained / "done.json").exists()
    _execute(recipe, "ALiBi", trained, finished.folder / "cache")
    assert (trained / "passkey.jsonl").read_text() == "".join(whole)
    assert len(half_right) == 3 * 6


def test_a_test_of_perplexity_that_was_interrupted_starts_again(tiny, finished, trained):
    original = finished.folder / "runs" / "ALiBi" / "seed-3"
    shutil.copy(original / "passkey.jsonl", trained)
    with pytest.raises(_StopError):
        _execute(tiny(), "ALiBi", trained, finished.folder / "cache", stop="perplexity")
    assert not (trained / "perplexity.json").exists()
    _execute(tiny(), "ALiBi", trained, finished.folder / "cache")
    again, before = _json(trained / "perplexity.json"), _json(original / "perplexity.json")
    assert [row["nll"] for row in again] == pytest.approx([row["nll"] for row in before], rel=1e-4)
    assert (trained / "passkey.jsonl").read_text() == (original / "passkey.jsonl").read_text()


@pytest.mark.parametrize("right_at", [{150}, {160}, {170}, set()])
def test_a_scheme_that_retrieves_nothing_stops_early_and_says_so(tiny, finished, trained, monkeypatch, right_at):
    monkeypatch.setattr(
        "attention_priors.lab.evaluate.passkey.retrieves", lambda model, tokens, chunk: len(tokens) - 5 in right_at
    )
    recipe = tiny({"evaluation.perplexity": ...})
    _execute(recipe, "ALiBi", trained, finished.folder / "cache")
    rows = [json.loads(line) for line in (trained / "passkey.jsonl").read_text().splitlines()]
    stopped = _json(trained / "done.json")["stopped"]
    # Two lengths running without a success.
    expected = {150: (6, "160, 170"), 160: (6, None), 170: (4, "150, 160"), 0: (4, "150, 160")}
    count, lengths = expected[max(right_at, default=0)]
    assert len(rows) == count
    if count == 6:
        assert stopped is None
    else:
        assert stopped == f"no pass key retrieved at 2 lengths running ({lengths} tokens)"
    # Going on after that measures nothing more.
    (trained / "done.json").unlink()
    _execute(recipe, "ALiBi", trained, finished.folder / "cache")
    assert len((trained / "passkey.jsonl").read_text().splitlines()) == count
    assert _json(trained / "done.json")["stopped"] == stopped


def test_every_scheme_is_tested_on_the_same_texts(tiny, finished, monkeypatch, tmp_path):
    texts: list[list[int]] = []
    sample = PasskeyTask.sample

    def remember(self: PasskeyTask, *arguments: Any) -> Any:
        text = sample(self, *arguments)
        texts.append(text.tokens.tolist())
        return text

    recipe = tiny({"evaluation.perplexity": ...})
    read = []
    for name in ("ALiBi", "BAM_+_SSMax"):
        run = shutil.copytree(finished.folder / "runs" / name / "seed-3", tmp_path / name)
        for file in ("passkey.jsonl", "done.json"):
            (run / file).unlink()
        materials = Materials.load(recipe, finished.folder / "cache")
        with monkeypatch.context() as patch:
            patch.setattr(PasskeyTask, "sample", remember)
            patch.setattr("attention_priors.lab.evaluate.passkey.retrieves", lambda *args, **kwargs: True)
            # The seed of the run is no part of the texts.
            execute(materials, name.replace("_", " "), len(read), run, lambda *args: None)
        read.append(texts.copy())
        texts.clear()
    assert len(read[0]) == 6
    assert read[0] == read[1]


def test_the_time_of_a_training_survives_a_failure_to_save_it(tiny, finished, tmp_path, monkeypatch):
    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    changes = {"training.steps": 2, "evaluation.passkey": ..., "evaluation.perplexity": ...}
    recipe, run = tiny(changes), tmp_path / "run"
    run.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Trained, "save", full)
        with pytest.raises(OSError, match="No space left"):
            _execute(recipe, "ALiBi", run, finished.folder / "cache")
    write_json(run / "train_seconds.json", 1000 + _json(run / "train_seconds.json"))
    _execute(recipe, "ALiBi", run, finished.folder / "cache")
    assert _json(run / "training.json")["train_seconds"] >= 1000
    assert not (run / "train_seconds.json").exists()


def _first_difference(one: list[dict[str, float]], other: list[dict[str, float]]) -> float:
    """The first position from which losses differ."""
    pairs = zip(one, other, strict=True)
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
def test_positions_that_change_without_steps_change_after_training(tiny, finished, tmp_path, scheme):
    way = scheme["change"] | {"context_length": 160, "steps": 0}
    first = {key: value for key, value in scheme.items() if key != "change"}
    changes = {
        "schemes": {"new": first | {"extensions": {"changed": way}}},
        "training.steps": 1,
        "training.passkey_ratio": 0,
        "model.initializer_range": 0.5,
        "evaluation.passkey": ...,
    }
    run = tmp_path / "run"
    run.mkdir()
    _execute(tiny(changes), "new", run, finished.folder / "cache")
    changed = run / "extended" / "changed"
    position = _first_difference(_json(changed / "perplexity.json"), _json(run / "perplexity.json"))
    if "prior" in way:
        # A query sees 40 tokens, itself included: the 41st is the first to miss one.
        assert position == pytest.approx((32 * 63) ** 0.5)
    else:
        assert position < 16
    layers = {row["layer"] for row in _json(changed / "priors.json")["priors"]}
    assert layers == ({0} if scheme.get("share_prior") else {0, 1} if "prior" in way else set())


def test_a_tolerance_at_evaluation_is_not_one_in_training(tiny, finished, tmp_path, monkeypatch):
    seen: dict[bool, set[float]] = {True: set(), False: set()}

    def watched(query: torch.Tensor, *arguments: Any, tolerance: float, **options: Any) -> torch.Tensor:
        seen[torch.is_grad_enabled()].add(tolerance)
        return attend(query, *arguments, tolerance=tolerance, **options)

    monkeypatch.setattr("attention_priors.models.decoder.attend", watched)
    scheme = {"prior": "laplace", "evaluation": {"tolerance": 0.25}}
    run = tmp_path / "run"
    run.mkdir()
    changes = {"schemes": {"new": scheme}, "training.steps": 1, "evaluation.passkey": ...}
    _execute(tiny(changes), "new", run, finished.folder / "cache")
    assert seen[True] == {0.0}
    assert 0.25 in seen[False]


def test_rows_of_a_model_that_is_gone_do_not_join_those_of_the_next(tiny, finished, trained, half_right):
    recipe = tiny(MANY)
    whole = _whole_test(recipe, trained, finished, half_right)
    half_right.clear()
    (trained / "passkey.jsonl").write_text("".join(whole[:3]))
    shutil.rmtree(trained / "model")
    _execute(recipe, "ALiBi", trained, finished.folder / "cache")
    assert len(half_right) == 3 * len(whole)  # all texts are read, and not the second half of them
    assert len((trained / "passkey.jsonl").read_text().splitlines()) == len(whole)


# ---- devices


def test_runs_share_out_the_devices(monkeypatch: pytest.MonkeyPatch):
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
