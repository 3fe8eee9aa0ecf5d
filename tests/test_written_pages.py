"""The Python examples of pages that need only this package run."""

import inspect
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from attention_priors import attend
from attention_priors.lab.data.tokenizer import pretrained_tokenizer
from attention_priors.lab.inspect import effective_reach
from attention_priors.lab.tasks.passkey import PasskeyTexts
from attention_priors.lab.tasks.ruler.texts import RulerTexts
from attention_priors.priors import GeneralizedGaussian, Laplace
from thoroughness import DEEP
from written_pages import ROOT, run_page


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "copy-mixture",
        "custom-masks",
        "evaluate",
        "inspect",
        "key-biases",
        "layers",
        "pruning",
        "result-rows",
    ],
)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not DEEP:
        # Graphs are captured. Tests of FlexAttention compile for the CPU.
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    assert run_page(f"docs/{name}.md")


def test_the_page_of_attend_documents_every_argument() -> None:
    (table,) = re.findall(r"## Arguments\n(.*?)\n## ", (ROOT / "docs/attention.md").read_text(), re.DOTALL)
    first_column = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`(\w+)`", first_column)) == set(inspect.signature(attend).parameters)


def test_examples_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("README.md")
    assert names["out"].shape == (1, 8, 1024, 64)
    assert sum(isinstance(module, GeneralizedGaussian) for module in names["model"].modules()) == 3
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 600


def test_the_tokenizer_of_the_page_meets_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("docs/tokenizers.md")
    tokenizer = pretrained_tokenizer("my-tokenizer")
    length = PasskeyTexts(tokenizer).shortest_text + 40
    sample = PasskeyTexts(tokenizer, decoys=1).draw_text(length, torch.Generator().manual_seed(0))
    assert len(sample.tokens) == length
    RulerTexts(tokenizer, "niah_single_1").draw_text(800, torch.Generator().manual_seed(0))


def test_documented_reach_of_slopes_is_correct(capsys: pytest.CaptureFixture[str]) -> None:
    run_page("docs/choosing.md")
    printed = capsys.readouterr().out.splitlines()
    expected = {n: effective_reach(Laplace(4), n, [0.5])[0].tolist() for n in (128, 1024, 8192)}
    assert printed == [f"{length} {halves}" for length, halves in expected.items()]
    near, *_, far = zip(*expected.values(), strict=True)
    assert len(set(near)) == 1
    assert [half / length for half, length in zip(far, expected, strict=True)] == sorted(
        (half / length for half, length in zip(far, expected, strict=True)), reverse=True
    )
