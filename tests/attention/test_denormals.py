"""Weights whose products would be denormal, and log-sum-exps whose exponentials underflow."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_priors.attention import attend
from attention_priors.precision import NEGLIGIBLE, drop_negligible, log_sum_exp
from attention_priors.priors import GeneralizedGaussian, Laplace, Prior

TINY = torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("length", [128, 700], ids=["one tile", "tiles"])
@pytest.mark.parametrize("prior", [GeneralizedGaussian(4, "previous"), Laplace(4, [2.0, 1.0, 0.5, 0.25])])
def test_products_read_almost_no_denormal_numbers(length: int, prior: Prior, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without :func:`drop_negligible`, 1.5 to 4 % of the numbers are denormal, and attention takes twice as long.

    Gradients are as small as in training.
    """
    denormal = total = 0
    product = torch.bmm

    def counted(one: Tensor, other: Tensor, **options: Tensor) -> Tensor:
        nonlocal denormal, total
        for factor in (one, other):
            denormal += int(((factor != 0) & (factor.abs() < TINY)).sum())
            total += factor.numel()
        return product(one, other, **options)

    monkeypatch.setattr(torch, "bmm", counted)
    query, key, value = (torch.randn(2, 4, length, 16, requires_grad=True) for _ in range(3))
    torch.autograd.grad(
        attend(query, key, value, prior=prior), [query, key, value], 1e-7 * torch.randn(2, 4, length, 16)
    )
    assert total > 2 * 4 * length**2
    assert denormal < 1e-4 * total


def test_only_negligible_float32_weights_are_dropped() -> None:
    weights = [0.0, 1e-42, NEGLIGIBLE, 2 * NEGLIGIBLE, 1.0, math.nan]
    expected = torch.tensor([0.0, 0.0, 0.0, 2 * NEGLIGIBLE, 1.0, math.nan])
    assert torch.equal(drop_negligible(torch.tensor(weights)).nan_to_num(2.0), expected.nan_to_num(2.0))
    exact = torch.tensor(weights, dtype=torch.float64)
    assert torch.equal(drop_negligible(exact.clone()).nan_to_num(2.0), exact.nan_to_num(2.0))


numbers = st.floats(-200, 200, width=32) | st.sampled_from([-math.inf, -1e30, -95.0, 1e30])


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=8))
def test_log_sum_exp_is_torchs(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows)
    torch.testing.assert_close(log_sum_exp(logits), logits.logsumexp(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(log_sum_exp(logits.double()), logits.double().logsumexp(-1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("special", [math.inf, math.nan])
def test_log_sum_exp_of_infinite_and_missing_numbers(special: float) -> None:
    logits = torch.tensor([[1.0, special], [-math.inf, special], [-math.inf, -math.inf]])
    torch.testing.assert_close(log_sum_exp(logits), logits.logsumexp(-1), equal_nan=True)
