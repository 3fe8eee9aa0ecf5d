import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_priors.priors import Uniform, Window
from thoroughness import examples


@settings(max_examples=examples(20))
@given(st.integers(1, 50), st.integers(-60, 60))
def test_window_shows_distances_below_its_size(size: int, distance: int):
    visible = Window(1, size).visible_at(torch.tensor([distance]))
    assert visible.dtype == torch.bool
    assert visible.item() == (-size < distance < size)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_window_is_zero_inside_and_minus_infinity_outside(size: int):
    positions = torch.arange(8)
    found = Window(2, size).log_prior(positions, positions)
    for i in range(8):
        for j in range(8):
            expected = 0.0 if abs(i - j) < size else -torch.inf
            assert found[:, i, j].tolist() == [expected] * 2


def test_window_separates_its_mask_from_its_finite_log_prior():
    positions = torch.arange(8)
    bias, visible = Window(2, 3).bias_and_visibility(positions, positions)
    assert bias.tolist() == torch.zeros(2, 8, 8).tolist()
    assert visible is not None
    assert visible.shape == (8, 8)
    assert visible.sum(-1).tolist() == [3, 4, 5, 5, 5, 5, 4, 3]


def test_window_masks_batches_of_positions():
    queries, keys = torch.tensor([[3], [9]]), torch.tensor([[2, 3, 4], [2, 3, 9]])
    found = Window(2, 2).log_prior(queries, keys)
    assert found.shape == (2, 2, 1, 3)
    assert (found == 0).tolist() == [[[[True, True, True]]] * 2, [[[False, False, True]]] * 2]


def test_uniform_is_zero_everywhere_and_hides_nothing():
    prior = Uniform(3)
    bias, visible = prior.bias_and_visibility(torch.arange(4), torch.arange(5))
    assert bias.tolist() == torch.zeros(3, 4, 5).tolist()
    assert visible is None
    assert prior.log_prior_at(torch.tensor([-(2**20), 0, 7])).tolist() == [[0.0] * 3] * 3


def test_uniform_has_no_lanes():
    lanes = Uniform(3).lanes(torch.arange(8).view(2, 4), torch.arange(10).view(2, 5), dtype=torch.float64)
    assert lanes.query.shape == (2, 3, 4, 0)
    assert lanes.key.shape == (2, 5, 0)
    assert lanes.query.dtype == lanes.key.dtype == torch.float64
