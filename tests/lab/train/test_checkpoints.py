"""Checkpoints are complete or absent. Incomplete ones are refused without loss of others."""

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import InterruptionError, Rows, furthest, stop_at, tiny_decoder, tiny_settings, weights_of

from attention_priors.lab.train import Observer
from attention_priors.lab.train.checkpoints import (
    MANIFEST,
    CheckpointError,
    checkpoint_steps,
    discard,
    keep_last,
    last_complete,
    seal,
    staging_folder,
    sweep,
    what_is_wrong,
)
from attention_priors.lab.train.engine import train
from attention_priors.lab.train.recipe import RunningSettings
from attention_priors.lab.train.trainer import PriorTrainer
from attention_priors.models import PriorDecoderForCausalLM
from thoroughness import every_other_deep


def _write(folder: Path, step: int, content: bytes = b"weights") -> Path:
    staged = staging_folder(folder) / f"checkpoint-{step}"
    (staged / "part").mkdir(parents=True)
    (staged / "a.bin").write_bytes(content)
    (staged / "part" / "b.bin").write_bytes(b"moments")
    seal(staged, folder / staged.name)
    staging_folder(folder).rmdir()
    return folder / staged.name


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    assert last_complete(tmp_path) is None
    for step in (2, 10, 9):
        assert what_is_wrong(_write(tmp_path, step)) is None
    assert checkpoint_steps(tmp_path) == [2, 9, 10]
    assert last_complete(tmp_path) == tmp_path / "checkpoint-10"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda c: (c / MANIFEST).unlink(), "it has no manifest.json"),
        (lambda c: _truncate(c / MANIFEST), None),
        (lambda c: (c / MANIFEST).write_text("{"), "its manifest.json cannot be read"),
        (lambda c: (c / MANIFEST).write_text('{"files": []}'), "its manifest.json cannot be read"),
        (
            lambda c: (c / MANIFEST).write_text('{"files": {"model.safetensors": {}}}'),
            "its manifest.json cannot be read",
        ),
        (lambda c: (c / "a.bin").unlink(), "a.bin is missing"),
        (lambda c: _truncate(c / "part" / "b.bin"), "part/b.bin has 6 bytes, not 7"),
        (lambda c: _change(c / "a.bin"), "the checksum of a.bin does not match the manifest"),
    ],
)
def test_incomplete_checkpoints_are_skipped_for_earlier_ones(tmp_path, damage, complaint):
    _write(tmp_path, 1)
    newest = _write(tmp_path, 2)
    damage(newest)
    messages: list[str] = []
    found = last_complete(tmp_path, messages.append)
    if complaint is None:  # only the line end is missing
        assert found == newest
        return
    assert found == tmp_path / "checkpoint-1"
    assert len(messages) == 1
    assert f"checkpoint-2 is refused: {complaint}" in messages[0]
    assert (tmp_path / "refused-checkpoint-2").is_dir()
    assert last_complete(tmp_path, lambda message: pytest.fail(message)) == found


def test_writing_a_step_again_replaces_its_checkpoint(tmp_path):
    _write(tmp_path, 3, b"old")
    again = _write(tmp_path, 3, b"new")
    assert (again / "a.bin").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_older_checkpoints_and_leftovers_are_deleted(tmp_path):
    for step in (1, 2, 30, 4):
        _write(tmp_path, step)
    keep_last(tmp_path, 2)
    assert checkpoint_steps(tmp_path) == [4, 30]
    (staging_folder(tmp_path) / "checkpoint-31").mkdir(parents=True)
    (tmp_path / ".discarded-checkpoint-2").mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-30", "checkpoint-4"]


def test_interrupted_deletions_leave_no_checkpoint(tmp_path, monkeypatch):
    checkpoint = _write(tmp_path, 1)

    def stop(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.exists():
            raise InterruptionError

    monkeypatch.setattr(shutil, "rmtree", stop)
    with pytest.raises(InterruptionError):
        discard(checkpoint)
    assert checkpoint_steps(tmp_path) == []


# ---- checkpoints of trainings


def _train(model: PriorDecoderForCausalLM, folder: Path, observer: Observer | None = None) -> list[dict[str, float]]:
    """Train as all tests of this file do, with losses averaged over three steps, and return the losses."""
    running = RunningSettings(log_every=3)
    return train(model, Rows(12), tiny_settings(), folder, seed=5, running=running, observer=observer).history


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Return weights and losses of an uninterrupted training."""
    model = tiny_decoder()
    history = _train(model, tmp_path_factory.mktemp("whole"))
    assert [entry["step"] for entry in history] == [3, 6]
    return weights_of(model), history


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(InterruptionError):
        _train(tiny_decoder(), folder, stop_at(5))
    assert checkpoint_steps(folder) == [2, 4]
    return folder


@pytest.fixture
def interrupted(two_checkpoints, tmp_path) -> Path:
    """Return a training with checkpoints of steps 2 and 4."""
    return Path(shutil.copytree(two_checkpoints, tmp_path / "run"))


def _resume(folder: Path, whole: tuple[Any, Any], seed: int = 99) -> tuple[list[int], list[str]]:
    """Train to the end and check that the results equal an uninterrupted training. Return steps and messages."""
    steps: list[int] = []
    messages: list[str] = []
    # If there is a checkpoint, the given weights do not matter.
    model = tiny_decoder(seed)
    history = _train(model, folder, Observer(on_step=steps.append, on_message=messages.append))
    assert furthest(weights_of(model), whole[0]) == 0
    assert history == whole[1]
    return steps, messages


def test_interrupted_trainings_match_uninterrupted_ones(interrupted, whole):
    """A checkpoint includes the sum of losses since the last log, here of step 4."""
    assert _resume(interrupted, whole) == ([5, 6], [f"Resuming from {interrupted / 'checkpoint-4'}"])
    # A finished training returns its weights.
    assert _resume(interrupted, whole)[0] == []


def test_without_a_checkpoint_training_starts_again(tmp_path, whole):
    with pytest.raises(InterruptionError):
        _train(tiny_decoder(), tmp_path, stop_at(1))
    assert _resume(tmp_path, whole, seed=0) == ([1, 2, 3, 4, 5, 6], [])


DAMAGE: list[tuple[str, Callable[[Path], Any]]] = [
    ("model.safetensors", _truncate),
    ("optimizer.pt", Path.unlink),
    ("rng_state.pth", Path.unlink),
    ("scheduler.pt", _change),
    ("trainer_state.json", _truncate),
]


@pytest.mark.parametrize("damaged", every_other_deep(DAMAGE, quick=DAMAGE[:1]), ids=lambda damaged: damaged[0])
def test_damaged_checkpoints_are_skipped_for_earlier_ones(interrupted, whole, damaged):
    name, damage = damaged
    damage(interrupted / "checkpoint-4" / name)
    steps, messages = _resume(interrupted, whole)
    assert steps[0] == 3
    assert "checkpoint-4 is refused" in messages[0]
    assert name in messages[0]
    assert "checkpoint-2" in messages[1]


def _full_on_the_second(function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    calls: list[int] = []

    def write(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise error
        return function(*args, **kwargs)

    return write


@pytest.mark.parametrize(
    "method", every_other_deep(["save_model", "_save_optimizer_and_scheduler", "_save_rng_state"], ["_save_rng_state"])
)
def test_a_full_disk_ends_training_with_the_last_checkpoint_intact(tmp_path, whole, monkeypatch, method):
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(PriorTrainer, method, _full_on_the_second(getattr(PriorTrainer, method), full))
        with pytest.raises(CheckpointError, match=r"step 4 could .*No space left.*last good checkpoint is .*-2$"):
            _train(tiny_decoder(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert what_is_wrong(tmp_path / "checkpoint-2") is None
    assert _resume(tmp_path, whole)[0][0] == 3


@pytest.mark.parametrize("limit", [10_000, 30_000], ids=["weights", "moments"])
def test_a_file_size_limit_ends_training_with_the_last_checkpoint_intact(interrupted, whole, limit):
    """The system itself refuses to write, as with a quota. Libraries raise their own errors then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = {path.name: path.stat().st_size for path in (interrupted / "checkpoint-4").iterdir()}
    # The weights reach one limit, and the optimiser's moments the other.
    assert largest["optimizer.pt"] > 30_000 > largest["model.safetensors"] > 10_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step 6 could not be written .*last good checkpoint is .*-4$"):
            _train(tiny_decoder(), interrupted)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint_steps(interrupted) == [2, 4]
    assert not staging_folder(interrupted).exists()
    assert _resume(interrupted, whole)[0][0] == 5


class _BadRows(Rows):
    """Rows of which one has NaN weights."""

    def __init__(self, count: int, bad: int) -> None:
        super().__init__(count)
        self.bad = bad

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        if index == self.bad:
            row["loss_weights"] = row["loss_weights"] * float("nan")
        return row


def test_a_nan_loss_ends_training_before_it_is_saved(tmp_path, whole):
    # Step 4 reads row 6, and the next checkpoint comes at its end.
    with pytest.raises(FloatingPointError, match=r"loss became nan at step 4; the last good checkpoint is .*-2"):
        train(tiny_decoder(), _BadRows(12, 6), tiny_settings(), tmp_path, seed=5, shuffle=False)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_settings_limit_the_number_of_checkpoints(tmp_path):
    running = RunningSettings(checkpoints_kept=1)
    train(tiny_decoder(), Rows(8), tiny_settings(steps=4), tmp_path, seed=5, running=running)
    assert checkpoint_steps(tmp_path) == [4]
