"""Priors and rotary positions against transformers' own code: BLOOM, MPT, T5 and Llama."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from attention_priors.encodings import Rotary
from attention_priors.priors import Laplace, RelativeBuckets, alibi_slopes
from thoroughness import examples

LENGTH = 7
COUNTS = range(1, 129)
DISTANCES = torch.arange(-5000, 5001)


# ---- BLOOM and MPT: ALiBi


def bloom(heads: int) -> torch.Tensor:
    return build_alibi_tensor(torch.ones(1, LENGTH, dtype=torch.long), heads, torch.float32)[:, 0]


def mpt(heads: int) -> torch.Tensor:
    return build_mpt_alibi_tensor(heads, LENGTH)[:, 0]


def test_slopes_match_bloom_for_1_to_128_heads():
    for heads in COUNTS:
        torch.testing.assert_close(alibi_slopes(heads).float(), bloom(heads)[:, 1], rtol=1e-5, atol=0)


def test_slopes_match_mpt_for_1_to_128_heads():
    for heads in COUNTS:
        torch.testing.assert_close(alibi_slopes(heads).float(), -mpt(heads)[:, -2], rtol=1e-6, atol=0)


def test_biases_match_bloom_up_to_a_constant_per_query():
    positions = torch.arange(LENGTH)
    for heads in COUNTS:
        difference = Laplace(heads).log_prior(positions, positions) - bloom(heads)[:, None]
        for i in range(LENGTH):
            past = difference[:, i, : i + 1]
            torch.testing.assert_close(past, past[:, :1].expand_as(past), rtol=1e-5, atol=1e-5)


def test_biases_match_mpt_for_1_to_128_heads():
    positions = torch.arange(LENGTH)
    for heads in COUNTS:
        last_query = Laplace(heads).log_prior(positions[-1:], positions)[:, 0]  # MPT's table is the last row
        torch.testing.assert_close(last_query, mpt(heads), rtol=2e-6, atol=0)


@pytest.mark.parametrize("heads", [4, 6])
def test_bam_lemma_2_alibi_is_a_laplace_prior(heads: int):
    positions = torch.arange(12)
    alibi = build_alibi_tensor(torch.ones(1, 12, dtype=torch.long), heads, torch.float32).expand(-1, 12, -1)
    future = positions > positions[:, None]
    ours, theirs = (
        bias.masked_fill(future, -torch.inf).softmax(-1)
        for bias in (Laplace(heads).log_prior(positions, positions), alibi)
    )
    torch.testing.assert_close(ours, theirs)


# ---- T5: buckets


@settings(max_examples=examples(30))
@given(st.integers(2, 64), st.integers(1, 3000), st.booleans())
@example(16, 112, False)  # T5's default sizes
@example(16, 120, True)
@example(54, 74, False)  # a logarithm in float64 would move distance 72
def test_buckets_match_t5(half: int, beyond: int, bidirectional: bool):
    num_buckets = 2 * half
    max_distance = num_buckets // (4 if bidirectional else 2) + beyond
    expected = T5Attention._relative_position_bucket(
        -DISTANCES, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    prior = RelativeBuckets(1, num_buckets, max_distance, bidirectional)
    assert torch.equal(prior.bucket(DISTANCES), expected)


@pytest.mark.parametrize("num_buckets", [2, 3, 5, 7, 33])
def test_few_or_odd_numbers_of_buckets_match_t5(num_buckets: int):
    for max_distance in (num_buckets + 1, 100, 5000):
        expected = T5Attention._relative_position_bucket(-DISTANCES, False, num_buckets, max_distance)
        assert torch.equal(RelativeBuckets(1, num_buckets, max_distance).bucket(DISTANCES), expected)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000)])
def test_log_prior_matches_t5s_bias(bidirectional: bool, num_buckets: int, max_distance: int):
    config = T5Config(
        d_model=8,
        d_kv=2,
        num_heads=4,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=not bidirectional,
    )
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    prior = RelativeBuckets(4, num_buckets, max_distance, bidirectional)
    torch.nn.init.normal_(prior.bias)
    with torch.no_grad():
        attention.relative_attention_bias.weight.copy_(prior.bias.T)  # pyright: ignore[reportAttributeAccessIssue]

    for queries, keys, past in ((50, 50, 0), (3, 300, 297)):
        expected = attention.compute_bias(queries, keys, past_seen_tokens=past)[0]
        found = prior.log_prior(past + torch.arange(queries), torch.arange(keys))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- Llama: rotary positions


def llama(head_dim: int, base: float, scaling: dict[str, Any]) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": "default", "rope_theta": base, **scaling}
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            head_dim=head_dim,
            max_position_embeddings=512,
            rope_parameters=parameters,  # pyright: ignore[reportArgumentType]
        )
    )


@pytest.mark.parametrize(("head_dim", "base"), [(8, 10_000.0), (64, 500_000.0), (2, 10_000.0)])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"scaling": "linear", "factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        (
            {"scaling": "yarn", "factor": 4.0, "original_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
    ids=["default", "linear", "yarn"],
)
def test_rotary_positions_match_llama(head_dim: int, base: float, ours: dict[str, Any], theirs: dict[str, Any]):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 40, head_dim), torch.randn(2, 3, 40, head_dim)
    positions = torch.stack([torch.arange(40), 100 + torch.arange(40)])
    reference = llama(head_dim, base, theirs)
    expected = apply_rotary_pos_emb(q, k, *reference(q, positions))

    encoding = Rotary(head_dim, base, **ours)
    for found, wanted in zip((encoding(q, positions), encoding(k, positions)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(encoding.frequencies()[0], reference.inv_freq, rtol=1e-6, atol=0)
    assert encoding.frequencies()[1] == pytest.approx(reference.attention_scaling)
