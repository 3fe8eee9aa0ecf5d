"""The Python examples of docs/export.md run in order."""

from functools import cache
from pathlib import Path

import pytest

from attention_priors.hf import export
from written_pages import python_of, run_page


@pytest.mark.slow
def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnxruntime", "onnxscript", "gguf"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    # Trace the model once for two formats.
    monkeypatch.setattr(export, "_trace", cache(export._trace))
    assert len(python_of("docs/export.md")) == 5
    names = run_page("docs/export.md")
    model, prompt = names["model"], names["prompt"]
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert names["tokens"] == names["found"] == expected[0, prompt.shape[1] :].tolist()
    files = {"model.pt2", "model.onnx", "attention.pt2", "attention.onnx", "alibi.gguf"}
    assert {path.name for path in tmp_path.iterdir()} == files
