"""Evaluations that are killed without warning end as if they had not been."""

import json
import sys
from pathlib import Path

import pytest

from processes import run_command
from thoroughness import DEEP

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it forks")

KILLS = 10 if DEEP else 4


def test_kills_at_random_moments_change_nothing(folders: dict[str, Path], tmp_path: Path):
    nursery = Path(__file__).with_name("evaluation_nursery.py")
    arguments = [str(folders["attached"]), "--task", "passkey,passkey_corpus,perplexity"]
    arguments += ["--lengths", "290,320,360", "--corpus", str(folders["texts"]), "--depths", "5", "--trials", "2"]
    arguments += ["--batch", "3", "--chunk", "150", "--stop-after-zeros", "2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = run_command([sys.executable, nursery, whole, killed, str(KILLS), "1", *arguments])
    lives = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lives) == KILLS
    # The test is one of resuming: most children were killed, after they had done something.
    assert sum(life["killed"] for life in lives) >= 0.6 * KILLS, lives
    assert len({life["after"] for life in lives}) >= 0.6 * KILLS, lives
    for name in ("results.jsonl", "table.md", "figures/accuracy_by_length.png"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name
    lines = [json.loads(line) for line in (whole / "results.jsonl").read_text().splitlines()]
    assert len(lines) > 60
    assert sum("stopped_before" in line for line in lines) == 2
