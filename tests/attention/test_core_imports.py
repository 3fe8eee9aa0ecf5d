"""The core needs torch alone: importing it loads nothing of the laboratory."""

import subprocess
import sys

import pytest

LABORATORY = ("transformers", "pydantic", "matplotlib", "rich", "typer", "tokenizers", "scipy", "jinja2", "yaml")


@pytest.mark.parametrize("module", ["attention_priors", "attention_priors.attention", "attention_priors.models"])
def test_import_is_light(module: str) -> None:
    # torch itself may import some of them (it looks for optional packages), so it is loaded first.
    program = (
        "import sys, torch; before = set(sys.modules)\n"
        f"import {module}\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "attention_priors" in loaded
    assert not set(loaded) & set(LABORATORY)
