import pytest
import torch

from attention_priors.priors import alibi_slopes


def test_slopes_match_the_published_code():
    assert alibi_slopes(8).tolist() == [1 / 2**n for n in range(1, 9)]
    eight, sixteen = alibi_slopes(8).tolist(), alibi_slopes(16).tolist()
    assert sixteen == pytest.approx([2 ** -(n / 2) for n in range(1, 17)])
    assert alibi_slopes(12).tolist() == pytest.approx([*eight, sixteen[0], sixteen[2], sixteen[4], sixteen[6]])
    assert alibi_slopes(1).tolist() == [2**-8]
    assert alibi_slopes(12).dtype == torch.float64


def test_slopes_are_on_the_cpu_under_any_default_device():
    with torch.device("meta"):
        assert alibi_slopes(5).device.type == "cpu"
