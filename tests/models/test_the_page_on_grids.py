"""The Python of docs/grids.md runs as it stands there, from top to bottom."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "grids.md"


def test_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    with torch.no_grad():
        for block in blocks:
            exec(compile(block, "docs/grids.md", "exec"), names)
    assert capsys.readouterr().out == "torch.Size([6, 3073])\n"
    assert names["out"].shape == (2, 20, 512)
    # What is said of cross-attention without positions.
    layer, letters, frames = names["layer"], names["letters"], names["frames"]
    last = names["places"] | {"query_positions": torch.arange(140, 160)}
    with torch.no_grad():
        unplaced, placed = (layer(letters, frames, frames, need_weights=False, **where)[0] for where in ({}, last))
    torch.testing.assert_close(unplaced, placed, rtol=1e-4, atol=1e-5)
    assert float((unplaced - names["out"]).abs().max()) > 1e-3
