"""The Python examples of docs/hugging-face.md run in order."""

import shutil
from pathlib import Path

import pytest

from written_pages import ROOT, python_of, run_page


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert len(python_of("docs/hugging-face.md")) == 4
    names = run_page("docs/hugging-face.md")
    assert capsys.readouterr().out.count("Attention is") == 2
    assert {group["name"] for group in names["trainer"].optimizer.param_groups} >= {"prior", "logit_scale"}
    assert callable(names["evaluate"])
