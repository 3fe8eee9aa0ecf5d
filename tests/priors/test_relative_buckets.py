import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prior_samples import randomise
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from attention_priors.priors import RelativeBuckets
from thoroughness import examples

DISTANCES = torch.arange(-5000, 5001)


@settings(max_examples=examples(30))
@given(st.integers(2, 64), st.integers(1, 3000), st.booleans())
@example(16, 112, False)  # T5's own sizes
@example(16, 120, True)
@example(54, 74, False)  # where a logarithm in float64 would move distance 72
def test_buckets_are_t5s(half: int, beyond: int, bidirectional: bool):
    num_buckets = 2 * half
    max_distance = num_buckets // (4 if bidirectional else 2) + beyond
    expected = T5Attention._relative_position_bucket(
        -DISTANCES, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    prior = RelativeBuckets(1, num_buckets, max_distance, bidirectional)
    assert torch.equal(prior.bucket(DISTANCES), expected)


@pytest.mark.parametrize("num_buckets", [2, 3, 5, 7, 33])
def test_buckets_are_t5s_for_few_or_odd_numbers_of_buckets(num_buckets: int):
    for max_distance in (num_buckets + 1, 100, 5000):
        expected = T5Attention._relative_position_bucket(-DISTANCES, False, num_buckets, max_distance)
        assert torch.equal(RelativeBuckets(1, num_buckets, max_distance).bucket(DISTANCES), expected)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000)])
def test_log_prior_is_t5s_bias(bidirectional: bool, num_buckets: int, max_distance: int):
    config = T5Config(
        d_model=8,
        d_kv=2,
        num_heads=4,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=not bidirectional,
    )
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    prior = randomise(RelativeBuckets(4, num_buckets, max_distance, bidirectional))
    with torch.no_grad():
        attention.relative_attention_bias.weight.copy_(prior.bias.T)  # pyright: ignore[reportAttributeAccessIssue]

    for queries, keys, past in ((50, 50, 0), (3, 300, 297)):
        expected = attention.compute_bias(queries, keys, past_seen_tokens=past)[0]
        found = prior.log_prior(past + torch.arange(queries), torch.arange(keys))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_near_distances_have_buckets_of_their_own_and_the_future_shares_one():
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


def test_starts():
    assert RelativeBuckets(2).natural_parameters()["bias"].tolist() == [[0.0] * 32] * 2
    torch.manual_seed(0)
    bias = RelativeBuckets(500, init="normal").natural_parameters()["bias"]
    assert bias.shape == (500, 32)
    assert bias.std().item() == pytest.approx(512**-0.5, rel=0.03)
