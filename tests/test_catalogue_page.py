"""The catalogue page is complete, matches the classes, and its Python runs."""

import ast
import inspect
import re
import runpy
from typing import Any

import pytest
import torch

from attention_priors.attention.logit_scale import LOGIT_SCALES
from attention_priors.encodings import ENCODINGS
from attention_priors.priors import GeneralizedGaussian
from written_pages import ROOT, run_page

PAGE = "docs/priors.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
KNOWN = ("self", "num_heads", "width", "head_dim")
"""Arguments that the model supplies."""


def _row(kind: type, name: str) -> str:
    found = [line for line in TEXT.splitlines() if line.startswith(f"| `{kind.__name__}`, `{name}` |")]
    assert len(found) == 1, (kind, found)
    return found[0]


@pytest.mark.parametrize(("name", "kind"), [*LOGIT_SCALES.items(), *ENCODINGS.items()], ids=lambda part: str(part)[:40])
def test_tables_show_every_argument_with_its_default(name: str, kind: Any):
    # Names in code, with or without a default: `learn=False`
    words: dict[str, str] = {}
    for word, default in re.findall(r"`(\w+)(=[^`]*)?`", _row(kind, name)):
        words[word] = words.get(word) or default
    for argument in inspect.signature(kind).parameters.values():
        if argument.name in KNOWN:
            continue
        assert argument.name in words, argument
        if argument.default is inspect.Parameter.empty:
            assert not words[argument.name]
        else:
            assert ast.literal_eval(words[argument.name].removeprefix("=")) == argument.default, argument


def test_tables_of_priors_match_the_classes():
    written = runpy.run_path(str(ROOT / "docs" / "catalogue.py"))["page"](TEXT)
    assert written == TEXT, "the classes have changed: python docs/catalogue.py"


def test_the_table_of_init_is_complete():
    table = TEXT.split("| `init` | initial heads |", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(GeneralizedGaussian.inits)


def test_examples_run(capsys: pytest.CaptureFixture[str]):
    run_page(PAGE)
    shape, peaks = capsys.readouterr().out.splitlines()
    assert shape == str(torch.Size([8, 1, 1001]))
    assert "-4.0" in peaks
