"""Sizes of a training, and how they are shared out."""

import pytest
from pydantic import ValidationError
from training_cases import tiny_settings

from attention_priors.lab.train import RunningSettings, TrainingSettings
from attention_priors.lab.train.engine import check_machinery


def test_steps_and_rows_follow_from_tokens():
    settings = tiny_settings(steps=None, tokens=1000, batch_size=None, tokens_per_step=36)
    assert (settings.rows_per_step, settings.step_tokens, settings.total_steps, settings.total_rows) == (3, 36, 27, 81)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": 100}, "give either steps or tokens, got steps and tokens"),
        ({"steps": None}, "give either steps or tokens, got neither"),
        ({"tokens_per_step": 12}, "give either batch_size or tokens_per_step, got batch_size and tokens_per_step"),
        ({"batch_size": None, "tokens_per_step": 50}, "tokens_per_step=50 must be a multiple of context_length=12"),
        ({"steps": None, "tokens": 23}, "tokens=23 must be at least one step, 24 tokens"),
        ({"warmup_steps": 6}, "warmup_steps=6 must be less than the 6 steps there are"),
    ],
)
def test_sizes_that_do_not_go_together_are_named(changes, complaint):
    with pytest.raises(ValidationError, match=complaint):
        tiny_settings(**changes)


@pytest.mark.parametrize(
    ("rows", "at_a_time", "processes", "expected"),
    [(8, None, 1, (8, 1)), (8, None, 4, (2, 1)), (8, 2, 1, (2, 4)), (8, 2, 2, (2, 2)), (8, 2, 4, (2, 1))],
)
def test_a_steps_rows_are_shared_out(rows, at_a_time, processes, expected):
    running = RunningSettings(rows_at_a_time=at_a_time)
    assert running.accumulation(tiny_settings(batch_size=rows), processes) == expected


@pytest.mark.parametrize(
    ("at_a_time", "processes", "complaint"),
    [
        (3, 1, r"8 rows a step \(96 tokens\) are no multiple of rows_at_a_time=3 on 1 process$"),
        (4, 4, r"8 rows a step \(96 tokens\) are no multiple of rows_at_a_time=4 on 4 processes"),
        (None, 3, "8 rows a step cannot be shared out evenly among 3 processes"),
    ],
)
def test_what_does_not_divide_is_an_error(at_a_time, processes, complaint):
    with pytest.raises(ValueError, match=complaint):
        RunningSettings(rows_at_a_time=at_a_time).accumulation(tiny_settings(batch_size=8), processes)


def test_sharding_on_a_cpu_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"running\.fsdp needs CUDA devices"):
        check_machinery(tiny_settings(), RunningSettings(fsdp={}))


def test_sharding_on_one_process_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"running\.fsdp needs several processes"):
        check_machinery(tiny_settings(), RunningSettings(fsdp={}))


def test_float16_on_a_cpu_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    settings: TrainingSettings = tiny_settings(precision="float16")
    with pytest.raises(ValueError, match=r"training\.precision float16 needs a CUDA device"):
        check_machinery(settings, RunningSettings())


def test_a_logger_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("attention_priors.lab.train.engine.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"running\.report_to: wandb is not installed"):
        check_machinery(tiny_settings(), RunningSettings(report_to=("wandb",)))
