"""The core needs torch alone: importing it loads nothing of the laboratory."""

import sys

import pytest

from processes import run_command

LABORATORY = ("transformers", "pydantic", "matplotlib", "rich", "typer", "tokenizers", "scipy", "jinja2", "yaml")


@pytest.mark.parametrize("module", ["attention_priors", "attention_priors.attention", "attention_priors.models"])
def test_import_is_light(module: str) -> None:
    # torch itself may import some of them (it looks for optional packages), so it is loaded first.
    program = (
        "import sys, torch; before = set(sys.modules)\n"
        f"import {module}\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = run_command([sys.executable, "-c", program])
    loaded = done.stdout.split()
    assert "attention_priors" in loaded
    assert not set(loaded) & set(LABORATORY)


def test_import_leaves_the_compiler_alone() -> None:
    """It takes as long to import as all the rest of torch."""
    program = "import sys, attention_priors; assert 'torch._dynamo' not in sys.modules"
    run_command([sys.executable, "-c", program])


def test_works_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from attention_priors import Laplace, attend\n"
        "x = torch.randn(1, 2, 3, 4); attend(x, x, x, Laplace(2))"
    )
    run_command([sys.executable, "-c", program])


def test_attach_comes_when_it_is_asked_for() -> None:
    program = (
        "import sys, attention_priors; assert 'transformers' not in sys.modules\n"
        "from attention_priors import attach; from attention_priors.hf import attach as there\n"
        "assert attach is there and 'attach' in attention_priors.__all__"
    )
    run_command([sys.executable, "-c", program])
