"""The Python of docs/hugging-face.md runs as it stands there, from top to bottom."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hugging-face.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/hugging-face.md", "exec"), names)
    assert capsys.readouterr().out.count("Attention is") == 2
    assert {group["name"] for group in names["trainer"].optimizer.param_groups} >= {"prior", "logit_scale"}
    assert callable(names["evaluate"])
