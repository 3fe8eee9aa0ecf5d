"""Runs that are killed without warning have the results of uninterrupted ones."""

from collections.abc import Callable
from pathlib import Path

from nursery import kill_at_random, let_live

from attention_priors._io import read_json
from thoroughness import DEEP

# Half of the kills come while a checkpoint is written.
KILLS, STEPS = (10, 42) if DEEP else (6, 27)


def test_kills_at_random_moments_change_no_result(write_recipe: Callable[..., Path], tmp_path):
    recipe = write_recipe(
        # Checkpoints are so frequent that many kills come while one is written.
        training={"steps": STEPS, "checkpoint_steps": 2, "tokens_per_step": 48},
        running={"log_every": 3},
        validation={"every": 15, "tokens": 200},
    )
    let_live(recipe, tmp_path / "whole")
    lives = kill_at_random(recipe, tmp_path / "killed", KILLS, seed=1)
    assert len(lives) == KILLS
    # The test needs resumptions: most children were killed, some while they wrote, and later children resumed from
    # checkpoints.
    assert sum(life["killed"] for life in lives) >= KILLS // 2, lives
    assert any(life["half_written"] for life in lives), lives
    assert len({life["from"] for life in lives}) >= 2, lives

    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        whole, killed = (tmp_path / run / "model" / name for run in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes(), name
    whole, killed = (read_json(tmp_path / run / "training.json") for run in ("whole", "killed"))
    assert whole["history"] == killed["history"]
    assert whole["validation"] == killed["validation"]
    assert [entry["step"] for entry in whole["history"]] == list(range(3, STEPS + 1, 3))
    assert not list((tmp_path / "killed").rglob("*unfinished*"))
