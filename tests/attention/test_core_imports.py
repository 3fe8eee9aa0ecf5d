"""The core needs only torch, and importing it loads nothing of the laboratory."""

import sys
from types import SimpleNamespace

import pytest

import attention_priors
from processes import run_command

LABORATORY = ("transformers", "pydantic", "matplotlib", "rich", "typer", "tokenizers", "scipy", "jinja2", "yaml")


@pytest.mark.slow
def test_import_is_light() -> None:
    """Importing loads nothing of the laboratory and no compiler. A compiler takes as long as all of torch."""
    # torch itself may import some of these modules (it looks for optional packages), so it is loaded first.
    program = (
        "import sys, torch; before = set(sys.modules)\n"
        "import attention_priors; assert 'torch._dynamo' not in sys.modules\n"
        "import attention_priors.attention, attention_priors.models\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = run_command([sys.executable, "-c", program])
    loaded = done.stdout.split()
    assert "attention_priors" in loaded
    assert not set(loaded) & set(LABORATORY)


@pytest.mark.slow
def test_works_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from attention_priors import Laplace, attend\n"
        "x = torch.randn(1, 2, 3, 4); attend(x, x, x, Laplace(2))"
    )
    run_command([sys.executable, "-c", program])


def test_attach_is_imported_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(attach=object())
    monkeypatch.setitem(sys.modules, "attention_priors.hf", package)
    assert attention_priors.attach is package.attach
    assert "attach" in attention_priors.__all__
