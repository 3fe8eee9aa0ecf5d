import pytest
import torch

from attention_priors.priors import RelativeBuckets


def test_near_distances_have_own_buckets_and_the_future_shares_one():
    prior = RelativeBuckets(1)
    assert prior.bucket(torch.arange(16)).tolist() == list(range(16))
    assert prior.bucket(torch.tensor([-1, -500])).tolist() == [0, 0]
    assert prior.bucket(torch.tensor([128, 10**6])).tolist() == [31, 31]


def test_each_direction_has_half_of_the_buckets():
    prior = RelativeBuckets(1, bidirectional=True)
    assert prior.bucket(torch.arange(8)).tolist() == list(range(8))
    assert prior.bucket(-torch.arange(1, 8)).tolist() == list(range(17, 24))
    assert prior.bucket(torch.tensor([10**6, -(10**6)])).tolist() == [15, 31]


def test_buckets_do_not_depend_on_the_integer_type():
    distance = torch.arange(-300, 301)
    prior = RelativeBuckets(1, bidirectional=True)
    assert torch.equal(prior.bucket(distance.int()).long(), prior.bucket(distance))


def test_uniform_and_normal_init():
    assert RelativeBuckets(2).natural_parameters()["bias"].tolist() == [[0.0] * 32] * 2
    torch.manual_seed(0)
    bias = RelativeBuckets(500, init="normal").natural_parameters()["bias"]
    assert bias.shape == (500, 32)
    assert bias.std().item() == pytest.approx(512**-0.5, rel=0.03)
