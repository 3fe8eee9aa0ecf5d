"""The Python examples of docs/grids.md and docs/encoders.md run in order."""

import pytest
import torch

from written_pages import python_of, run_page


def test_examples_of_grids_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(python_of("docs/grids.md")) == 2
    with torch.no_grad():
        run_page("docs/grids.md")
    assert capsys.readouterr().out == "torch.Size([6, 3073])\n"


def test_examples_of_encoders_run() -> None:
    assert len(python_of("docs/encoders.md")) == 2
    torch.manual_seed(0)
    with torch.no_grad():
        names = run_page("docs/encoders.md")
    assert names["out"].shape == (2, 20, 512)
    assert 5 < names["loss"] < 7  # ln 401 is 6
    # The page's statement on cross-attention without positions.
    layer, letters, frames = names["layer"], names["letters"], names["frames"]
    last = names["places"] | {"query_positions": torch.arange(140, 160)}
    with torch.no_grad():
        unplaced, placed = (layer(letters, frames, frames, need_weights=False, **where)[0] for where in ({}, last))
    torch.testing.assert_close(unplaced, placed, rtol=1e-4, atol=1e-5)
    assert float((unplaced - names["out"]).abs().max()) > 1e-3
