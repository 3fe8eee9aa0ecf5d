import pytest
import torch

from attention_priors.encodings import LearnedTable, LinearToy


def test_learned_table_looks_positions_up():
    encoding = LearnedTable(3, 5)
    positions = torch.tensor([[4, 0], [2, 2]])
    found = encoding(positions)
    assert found.shape == (2, 2, 3)
    for row in range(2):
        for column in range(2):
            torch.testing.assert_close(found[row, column], encoding.table[int(positions[row, column])])


def test_learned_table_starts_like_gpt2():
    torch.manual_seed(0)
    encoding = LearnedTable(64, 512)
    assert encoding.table.std().item() == pytest.approx(0.02, rel=0.02)
    with torch.no_grad():
        encoding.table.zero_()
    encoding.reset_parameters()
    assert encoding.table.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("position", [5, 6, 4096])
def test_a_position_past_the_learned_table_raises_an_error(position: int):
    with pytest.raises(ValueError, match=rf"position {position} is past the end .* 5 positions.*max_length"):
        LearnedTable(3, 5)(torch.tensor([0, position, 1]))


def test_padding_before_the_first_position_is_allowed():
    encoding = LearnedTable(3, 5)
    assert torch.isfinite(encoding(torch.tensor([-4096, -1, 0]))).all()
    assert encoding(torch.empty(0, dtype=torch.long)).shape == (0, 3)


def test_learned_table_trains_used_rows():
    encoding = LearnedTable(2, 4)
    encoding(torch.tensor([1, 3, 3])).sum().backward()
    assert encoding.table.grad is not None
    assert encoding.table.grad.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]


def test_linear_toy_is_the_position_in_every_coordinate():
    found = LinearToy(3)(torch.tensor([[0, 1], [7, 100_000]]))
    assert found.dtype == torch.float32
    assert found.tolist() == [[[0.0] * 3, [1.0] * 3], [[7.0] * 3, [100_000.0] * 3]]


@pytest.mark.parametrize("size", [0, -1, 2.0])
def test_sizes_must_be_positive_integers(size: int):
    with pytest.raises(ValueError, match=f"width must be a positive integer, got {size}"):
        LearnedTable(size, 4)
    with pytest.raises(ValueError, match=f"max_length must be a positive integer, got {size}"):
        LearnedTable(4, size)
    with pytest.raises(ValueError, match=f"width must be a positive integer, got {size}"):
        LinearToy(size)
