import pytest
import torch
from prior_samples import randomise

from attention_priors.priors import ClippedOffsets


def test_scalars_are_ordered_from_past_to_future():
    prior = ClippedOffsets(2, max_offset=2)
    with torch.no_grad():
        prior.bias.copy_(torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0], [5.0, 6.0, 7.0, 8.0, 9.0]]))
    offsets = torch.tensor([-2, -1, 0, 1, 2])  # j - i
    assert prior.log_prior_at(-offsets)[0].tolist() == offsets.tolist()
    assert prior.log_prior_at(-offsets)[1].tolist() == [5.0, 6.0, 7.0, 8.0, 9.0]


def test_offsets_are_clipped_on_both_sides():
    prior = randomise(ClippedOffsets(3, max_offset=4))
    distance = torch.tensor([-(2**20), -5, -4, 4, 5, 2**20])
    table = prior.log_prior_at(distance)
    edge = prior.natural_parameters()["bias"]
    for column in range(3):
        torch.testing.assert_close(table[:, column], edge[:, -1])
        torch.testing.assert_close(table[:, 3 + column], edge[:, 0])


def test_log_prior_matches_the_papers_definition():
    k = 3
    prior = randomise(ClippedOffsets(2, max_offset=k))
    found = prior.log_prior(torch.arange(9), torch.arange(11))
    for i in range(9):
        for j in range(11):
            clipped = max(-k, min(k, j - i))
            torch.testing.assert_close(found[:, i, j], prior.bias[:, clipped + k])


def test_uniform_and_normal_init():
    assert ClippedOffsets(2, max_offset=3).bias.tolist() == [[0.0] * 7] * 2
    torch.manual_seed(0)
    bias = ClippedOffsets(200, max_offset=20, init="normal").bias
    assert bias.shape == (200, 41)
    assert bias.std().item() == pytest.approx(0.02, rel=0.03)
