import math

import pytest
import torch

from attention_priors.encodings import Sinusoidal


def vaswani(position: int, width: int, base: float = 10_000.0) -> list[float]:
    values = []
    for coordinate in range(width):
        phase = position / base ** (2 * (coordinate // 2) / width)
        values.append(math.cos(phase) if coordinate % 2 else math.sin(phase))
    return values


@pytest.mark.parametrize(("width", "base"), [(2, 10_000.0), (16, 10_000.0), (10, 50.0)])
def test_sinusoids_match_the_papers_formula_at_far_positions(width: int, base: float):
    positions = [0, 1, 2, 100, 4095, 999_983, 2**20]
    found = Sinusoidal(width, base)(torch.tensor(positions))
    assert found.shape == (len(positions), width)
    assert found.dtype == torch.float32
    for row, position in zip(found.tolist(), positions, strict=True):
        assert row == pytest.approx(vaswani(position, width, base), abs=1e-6)


def test_positions_may_be_batched():
    encoding = Sinusoidal(6)
    positions = torch.tensor([[0, 1, 2], [7, 8, 9]])
    found = encoding(positions)
    assert found.shape == (2, 3, 6)
    torch.testing.assert_close(found[1], encoding(positions[1]))


@pytest.mark.parametrize("width", [0, 3, -2, 4.0])
def test_width_must_be_even(width: int):
    with pytest.raises(ValueError, match=f"width must be a positive even integer, got {width}"):
        Sinusoidal(width)


@pytest.mark.parametrize("base", [1.0, 0.0, -3.0, math.nan])
def test_base_must_be_above_one(base: float):
    with pytest.raises(ValueError, match=f"base must be a finite number above 1, got {base}"):
        Sinusoidal(4, base)
