import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from attention_priors.priors import Laplace, alibi_slopes

LENGTH = 7
COUNTS = range(1, 129)


def bloom(heads: int) -> torch.Tensor:
    return build_alibi_tensor(torch.ones(1, LENGTH, dtype=torch.long), heads, torch.float32)[:, 0]


def mpt(heads: int) -> torch.Tensor:
    return build_mpt_alibi_tensor(heads, LENGTH)[:, 0]


def test_published_slopes():
    assert alibi_slopes(8).tolist() == [1 / 2**n for n in range(1, 9)]
    eight, sixteen = alibi_slopes(8).tolist(), alibi_slopes(16).tolist()
    assert sixteen == pytest.approx([2 ** -(n / 2) for n in range(1, 17)])
    assert alibi_slopes(12).tolist() == pytest.approx([*eight, sixteen[0], sixteen[2], sixteen[4], sixteen[6]])
    assert alibi_slopes(1).tolist() == [2**-8]
    assert alibi_slopes(12).dtype == torch.float64


def test_slopes_are_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        assert alibi_slopes(5).device.type == "cpu"


def test_slopes_are_blooms_for_1_to_128_heads():
    for heads in COUNTS:
        torch.testing.assert_close(alibi_slopes(heads).float(), bloom(heads)[:, 1], rtol=1e-5, atol=0)


def test_slopes_are_mpts_for_1_to_128_heads():
    for heads in COUNTS:
        torch.testing.assert_close(alibi_slopes(heads).float(), -mpt(heads)[:, -2], rtol=1e-6, atol=0)


def test_biases_are_blooms_up_to_a_constant_per_query_for_1_to_128_heads():
    positions = torch.arange(LENGTH)
    for heads in COUNTS:
        difference = Laplace(heads).log_prior(positions, positions) - bloom(heads)[:, None]
        for i in range(LENGTH):
            past = difference[:, i, : i + 1]
            torch.testing.assert_close(past, past[:, :1].expand_as(past), rtol=1e-5, atol=1e-5)


def test_biases_are_mpts_for_1_to_128_heads():
    positions = torch.arange(LENGTH)
    for heads in COUNTS:
        last_query = Laplace(heads).log_prior(positions[-1:], positions)[:, 0]  # MPT's table is the last row
        torch.testing.assert_close(last_query, mpt(heads), rtol=2e-6, atol=0)
