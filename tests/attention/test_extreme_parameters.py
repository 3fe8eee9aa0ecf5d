"""Finite inputs never give nan or infinite results."""

from dataclasses import replace

import pytest
import torch
from attention_cases import PRIORS, Case, examples, prior_descriptions, randomize
from attention_errors import Cotangents, compute
from hypothesis import given
from hypothesis import strategies as st

from attention_priors import GeneralizedGaussian, SSMax, Window, prior_from_config
from thoroughness import each_once, every_other_deep

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXTREMES = {
    "theta_beta": (-8.0, 8.0),
    "theta_alpha": (-60.0, 60.0),
    "theta_mu": (-50.0, 50.0),
    "log_slope": (-60.0, 60.0),
    "slope": (-1e4, 1e4),
    "bias": (-1e6, 1e6),
    "alpha": (-1e6, 1e6),
    "beta": (-1e6, 1e6),
    "gain": (-1e4, 1e4),
    "bump": (-1e6, 1e6),
}


def assert_finite(case: Case, backend: str) -> None:
    result = compute(case, backend)
    assert torch.isfinite(result.out).all(), f"output of {backend}"
    assert not torch.isnan(result.lse).any(), f"log-sum-exp of {backend}"
    assert not torch.isposinf(result.lse).any(), f"log-sum-exp of {backend}"
    for name, grad in result.grads.items():
        assert torch.isfinite(grad).all(), f"gradient of {name}, {backend}"


def extreme_case(dtype: torch.dtype, prior, seed: int, causal: bool) -> Case:
    """Two sequences: one with left padding, whose first queries see no key, and one of padding only."""
    generator = torch.Generator().manual_seed(seed)
    length = 33
    query, key, value = (3 * torch.randn(3, h, length, 8, generator=generator).to(dtype) for h in (4, 2, 2))
    padding = torch.zeros(3, length, dtype=torch.bool)
    padding[1, :5] = True
    padding[2] = True
    return Case(query, key, value, prior, causal, key_padding_mask=padding, small_blocks=10)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), each_once(PRIORS, DTYPES))
def test_random_extremes_give_finite_results(name: str, dtype: torch.dtype) -> None:
    @examples(2, f"{name} {dtype}")
    @given(st.data(), st.integers(0, 999), st.booleans(), st.booleans(), st.booleans())
    def check(data: st.DataObject, seed: int, causal: bool, padded: bool, scaled: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        prior = None
        if name != "none":
            names = ["generalized_gaussian", "window", "laplace"] if name == "sum" else [name]
            descriptions = [data.draw(prior_descriptions(each, causal)) for each in names]
            prior = prior_from_config(descriptions if name == "sum" else descriptions[0], 4)
            randomize(prior, generator, EXTREMES)
        case = extreme_case(dtype, prior, seed, causal)
        if not padded:
            case = Case(case.query, case.key, case.value, prior, causal)
        if scaled and (causal or not padded):
            case = replace(case, logit_scale=SSMax(4, init=-2.0))
        for backend in case.backends():
            assert_finite(case, backend)
            assert_finite(replace(case, small_blocks=None), backend)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("theta_beta", every_other_deep([-8.0, -1.0, 0.0, 1e-4, 1.0, 8.0], [-8.0, 1e-4, 8.0]))
@pytest.mark.parametrize("theta_alpha", every_other_deep([-80.0, 0.0, 20.0, 80.0], [-80.0, 20.0, 80.0]))
@pytest.mark.parametrize(("dtype", "causal"), each_once(DTYPES, [True, False]))
def test_corners_of_the_generalized_gaussian_give_finite_results(
    dtype: torch.dtype, theta_beta: float, theta_alpha: float, causal: bool
) -> None:
    """β < 0 at distance 0 gives the largest number: ``(1e-5)^-8 = 1e40``."""
    prior = GeneralizedGaussian(4, learn=True)
    with torch.no_grad():
        prior.theta_beta.fill_(theta_beta)
        prior.theta_alpha.fill_(theta_alpha)
    case = extreme_case(dtype, prior, 0, causal)
    for backend in ("toeplitz", "blockwise"):
        assert_finite(case, backend)
        assert_finite(replace(case, small_blocks=None), backend)
        assert_finite(Case(case.query, case.key, case.value, prior, causal), backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("small_blocks", [None, 2])
@pytest.mark.parametrize("backend", ["toeplitz", "blockwise", "auto", "reference"])
def test_rows_without_visible_keys_give_zeros(dtype: torch.dtype, backend: str, small_blocks: int | None) -> None:
    """A window before all keys, padding, and queries before the first key."""
    x = torch.randn(2, 2, 6, 4).to(dtype)
    padding = torch.tensor([[True] * 6, [False] * 6])
    far = torch.arange(6) + 100
    blind_cases = (
        (Case(x, x, x, key_padding_mask=padding), (slice(0, 1), slice(None))),
        (Case(x, x, x, Window(2, 3), query_positions=far), (slice(None), slice(None))),
        (Case(x, x, x, Window(2, 3), False, key_padding_mask=padding), (slice(0, 1), slice(None))),
        (Case(x, x[:, :, :2], x[:, :, :2]), (slice(None), slice(0, 4))),
        (Case(x, x, x, attn_mask=torch.ones(6, 6, dtype=torch.bool)), (slice(None), slice(None))),
        (Case(x, x, x, attn_mask=torch.full((6, 6), float("-inf"))), (slice(None), slice(None))),
    )
    for blind_case, (batch, rows) in blind_cases:
        case = replace(blind_case, small_blocks=small_blocks)
        out, lse = case.attend(backend)
        blind = torch.zeros(2, 2, 6, dtype=torch.bool)
        blind[batch, :, rows] = True
        assert torch.equal(torch.isneginf(lse), blind)
        assert (out[blind] == 0).all()
        assert (out[~blind] != 0).any() or blind.all()
        result = compute(case, backend)
        assert (result.grads["query"][blind] == 0).all()
        for name, grad in result.grads.items():
            assert torch.isfinite(grad).all(), name


@pytest.mark.parametrize("small_blocks", [None, 2])
def test_rows_without_visible_keys_have_no_gradient(small_blocks: int | None) -> None:
    x = torch.randn(1, 2, 4, 3)
    padding = torch.ones(1, 4, dtype=torch.bool)
    prior = GeneralizedGaussian(2, init="laplace", learn=True)
    case = Case(x, x, x, prior, key_padding_mask=padding, small_blocks=small_blocks)
    out, lse = torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4)
    result = compute(case, "toeplitz", Cotangents.of(out, lse))
    for name, grad in result.grads.items():
        assert (grad == 0).all(), name
