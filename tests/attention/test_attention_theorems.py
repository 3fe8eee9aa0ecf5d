"""What the papers prove about attention with a prior, checked on what the library computes."""

import math
from typing import Any

import pytest
import torch
from attention_cases import PRIORS, examples, priors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_priors import GeneralizedGaussian, Laplace, Prior, Spectral, attend
from attention_priors.attention.problem import make_problem
from attention_priors.attention.reference import reference


def attention_weights(query: Tensor, key: Tensor, prior: Prior | None, *, causal: bool = True) -> Tensor:
    """Through ``attend`` itself: with the unit vectors as values, the output is the weights."""
    batch, heads = query.shape[:2]
    num_keys = key.shape[2]
    unit = torch.eye(num_keys, dtype=query.dtype).expand(batch, heads, -1, -1)
    return attend(query, key, unit, prior, causal=causal)


def contents(seed: int, length: int = 12, heads: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, heads, length, 5, generator=generator, dtype=torch.float64) for _ in "qk")
    return query, key


def drawn_prior(data: st.DataObject, name: str, seed: int) -> Prior | None:
    return data.draw(priors(name, 2, True, torch.Generator().manual_seed(seed)))


def prior_weights(prior: Prior | None, length: int) -> Tensor:
    """π: the weights without any content."""
    zero = torch.zeros(1, 2, length, 5, dtype=torch.float64)
    return attention_weights(zero, zero, prior)


@pytest.mark.parametrize("name", PRIORS)
@examples(5)
@given(data=st.data(), seed=st.integers(0, 999))
def test_posterior_is_the_product_of_content_and_position(name: str, data: st.DataObject, seed: int) -> None:
    """BAM, Theorem 1: ``p = p_content · p_position / Z`` with ``Z = Σ p_content p_position``, which is
    ``Z_joint / (Z_content Z_position)``.
    """
    query, key = contents(seed)
    prior = drawn_prior(data, name, seed)
    content, position = attention_weights(query, key, None), prior_weights(prior, 12)
    product = content * position
    z = product.sum(-1, keepdim=True)
    joint = attention_weights(query, key, prior)
    torch.testing.assert_close(joint, product / z, rtol=1e-8, atol=1e-12)

    value = torch.zeros(1, 2, 12, 1, dtype=torch.float64)
    zero = torch.zeros_like(query)
    _, joint_lse = attend(query, key, value, prior, return_lse=True)
    _, content_lse = attend(query, key, value, return_lse=True)
    _, position_lse = attend(zero, zero, value, prior, return_lse=True)
    # With a sharply peaked prior, Z is a difference of numbers as large as the log-prior.
    size = 1 + float(position_lse.abs().max())
    torch.testing.assert_close(
        joint_lse - content_lse - position_lse, z.squeeze(-1).log(), rtol=1e-8, atol=1e-13 * size
    )


@pytest.mark.parametrize("name", PRIORS)
@examples(5)
@given(data=st.data(), seed=st.integers(0, 999))
def test_attention_solves_entropic_transport(name: str, data: st.DataObject, seed: int) -> None:
    """GOAT, Propositions 2.2 and 3.1: ``softmax(s + log π)`` is the only minimum of ``-<p, s> + KL(p ‖ π)``, and
    the minimum is ``-log Σ π e^s``.
    """
    query, key = contents(seed)
    prior = drawn_prior(data, name, seed)
    best, position = attention_weights(query, key, prior), prior_weights(prior, 12)
    score = query @ key.mT / math.sqrt(5)

    def objective(p: Tensor) -> Tensor:
        divergence = torch.where(p > 0, p * (p.clamp(min=1e-300) / position.clamp(min=1e-300)).log(), 0.0)
        return (-p * score + divergence).sum(-1)

    minimum = objective(best)
    torch.testing.assert_close(minimum, -(position * score.exp()).sum(-1).log(), rtol=1e-8, atol=1e-10)
    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 0.1, 1.0, 5.0):
        # Any other distribution where π is not 0: the best one, with its logits moved.
        moved = best * (size * torch.randn(best.shape, generator=generator, dtype=torch.float64)).exp()
        other = moved / moved.sum(-1, keepdim=True)
        worse = objective(other) - minimum
        assert (worse >= -1e-10).all()
        # The excess is KL(other ‖ best), the whole of it.
        excess = torch.where(other > 0, other * (other.clamp(min=1e-300) / best.clamp(min=1e-300)).log(), 0.0).sum(-1)
        torch.testing.assert_close(worse, excess, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", PRIORS)
@examples(5)
@given(data=st.data(), seed=st.integers(0, 999), strength=st.sampled_from([0.01, 0.3, 2.0]))
def test_content_collapse(name: str, data: st.DataObject, seed: int, strength: float) -> None:
    """GOAT, Theorem 5.1: content scores that differ by at most ω leave ``π e^-ω <= p <= π e^ω``."""
    query, key = contents(seed)
    query = query * strength
    prior = drawn_prior(data, name, seed)
    joint, position = attention_weights(query, key, prior), prior_weights(prior, 12)
    score = query @ key.mT / math.sqrt(5)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    highest = score.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
    lowest = score.masked_fill(~visible, float("inf")).amin(-1, keepdim=True)
    spread = highest - lowest
    slack = 1e-12
    assert (joint >= position * (-spread).exp() * (1 - 1e-9) - slack).all()
    assert (joint <= position * spread.exp() * (1 + 1e-9) + slack).all()
    # The bounds are no mere formality: content does move the weights.
    if name in ("none", "uniform"):
        assert float((joint - position).abs().max()) > 1e-4


@examples(20)
@given(seed=st.integers(0, 999), slope=st.floats(0.01, 3.0), num_queries=st.integers(1, 20), causal=st.just(True))
def test_key_only_slope_is_a_recency_prior(seed: int, slope: float, num_queries: int, causal: bool) -> None:
    """GOAT, Proposition F.6: under a causal mask ``m j`` gives the weights of ``-m |i - j|``."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, 2, n, 4, generator=generator, dtype=torch.float64) for n in (num_queries, 20, 20)
    )
    prior = Laplace(2, slopes=[slope, 2 * slope])
    for return_lse in (False, True):
        by_lanes = attend(query, key, value, prior, backend="lanes", return_lse=return_lse)  # pyright: ignore[reportArgumentType, reportCallIssue]
        by_table = attend(query, key, value, prior, backend="toeplitz", return_lse=return_lse)  # pyright: ignore[reportArgumentType, reportCallIssue]
        torch.testing.assert_close(by_lanes, by_table, rtol=1e-10, atol=1e-10)
    only_keys = torch.stack([slope * torch.arange(20.0), 2 * slope * torch.arange(20.0)]).double().unsqueeze(-2)
    hidden = torch.ones(num_queries, 20, dtype=torch.bool).triu(21 - num_queries)
    mask = only_keys.masked_fill(hidden, float("-inf")).unsqueeze(0)
    expected = attend(query, key, value, causal=False, attn_mask=mask)
    torch.testing.assert_close(attend(query, key, value, prior, backend="lanes"), expected, rtol=1e-6, atol=1e-6)


def test_lanes_without_the_mask_are_another_prior() -> None:
    """Proposition F.6 needs the mask: both ways, ``m j`` prefers the last key and ``-m |i - j|`` a near one."""
    prior = Laplace(1, slopes=[0.5])
    zero = torch.zeros(1, 1, 8, 2, dtype=torch.float64)
    unit = torch.eye(8, dtype=torch.float64).expand(1, 1, -1, -1)
    weights = attend(zero, zero, unit, prior, causal=False)
    assert weights[0, 0].argmax(-1).tolist() == list(range(8))


@pytest.mark.parametrize("backend", ["auto", "blockwise", "reference"])
def test_dropout(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64) for _ in "qkv")
    prior = Laplace(2)
    many = [x.expand(4000, -1, -1, -1) for x in (query, key, value)]
    whole, lse = attend(query, key, value, prior, return_lse=True)

    def dropped(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return attend(*many, prior, dropout_p=0.5, return_lse=True, backend=backend)  # pyright: ignore[reportArgumentType, reportCallIssue]

    first, first_lse = dropped(0)
    again, _ = dropped(0)
    other, _ = dropped(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # Six standard errors of the mean.
    error = (first.mean(0) - whole[0]).abs()
    assert (error <= 6 * first.std(0) / math.sqrt(4000)).all()
    assert (first.std(0) > 0.1).any()
    torch.testing.assert_close(first_lse, lse.expand(4000, -1, -1))


def test_dropout_of_recomputed_blocks() -> None:
    """Blocks are computed anew in the backward pass: they must drop the same weights again."""
    torch.manual_seed(0)
    # float32, so that one block of queries does not hold all: 2 · 4 · 900 · 900 > 2^21.
    query, key, value = (torch.randn(2, 4, 900, 2, requires_grad=True) for _ in "qkv")

    torch.manual_seed(1)
    out = attend(query, key, value, dropout_p=0.3)
    (gradient,) = torch.autograd.grad(out.sum(), value)
    # d out / d value are the kept weights, so `value · gradient` adds up to the output itself.
    torch.testing.assert_close((gradient * value).sum(), out.sum(), rtol=1e-4, atol=1e-2)


def test_weights_that_reference_returns() -> None:
    """They are those that unit vectors as values give, and add up to one."""
    query, key = contents(0)
    prior = GeneralizedGaussian(2, init="spread") + Spectral(2)
    nothing: dict[str, Any] = dict.fromkeys(
        (
            "logit_scale",
            "softmax_scale",
            "query_positions",
            "key_positions",
            "document_ids",
            "key_padding_mask",
            "attn_mask",
        )
    )
    problem = make_problem(query, key, key, prior, causal=True, relative=None, dropout_p=0.0, **nothing)
    _, _, weights = reference(problem)
    torch.testing.assert_close(weights, attention_weights(query, key, prior), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
