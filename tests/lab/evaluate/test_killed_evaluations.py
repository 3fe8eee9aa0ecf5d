"""Evaluations that are killed without warning have the results of uninterrupted ones."""

import json
from pathlib import Path

from evaluation_nursery import kill_at_random, let_live, size

from thoroughness import DEEP

KILLS = 10 if DEEP else 4


def test_kills_at_random_moments_change_no_result(folders: dict[str, Path], tmp_path: Path):
    arguments = [str(folders["attached"]), "--task", "passkey,passkey_corpus,perplexity"]
    arguments += ["--lengths", "290,320,360", "--corpus", str(folders["texts"]), "--depths", "5", "--trials", "2"]
    arguments += ["--batch", "3", "--chunk", "150", "--stop-after-zeros", "2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    let_live(whole, arguments)
    lives = kill_at_random(killed, arguments, size(whole / "results.jsonl"), KILLS, seed=1)
    assert len(lives) == KILLS
    # The test needs resumptions: most children were killed after some work.
    assert sum(life["killed"] for life in lives) >= 0.6 * KILLS, lives
    assert len({life["after"] for life in lives}) >= 0.6 * KILLS, lives
    for name in ("results.jsonl", "table.md", "figures/accuracy_by_length.png"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name
    lines = [json.loads(line) for line in (whole / "results.jsonl").read_text().splitlines()]
    assert len(lines) > 60
    assert sum("stopped_before" in line for line in lines) == 2
