"""Gradients of a prior that does not learn, by PyTorch's kernel, against the dense formula in float64."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from attention_cases import Case, cases, examples, in_blocks_of
from attention_errors import Cotangents, gradient_scales, tolerance_of
from hypothesis import given
from hypothesis import strategies as st

from attention_priors import Laplace, attend
from attention_priors.attention.plan import Backend
from attention_priors.attention.tiles import plain_backward
from attention_priors.precision import flushes_denormals
from thoroughness import each_once


def gradients(case: Case, backend: str, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    case = replace(case, **{name: getattr(case, name).detach().requires_grad_() for name in case.given()})
    leaves = case.leaves()
    with in_blocks_of(case.small_blocks):
        out, _ = case.attend(backend)
        grads = torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype), allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), grads, strict=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["none", "laplace", "window", "relative_buckets", "sum", "a gap"])
def test_gradients_equal_those_of_the_dense_formula(name: str, dtype: torch.dtype) -> None:
    with mock.patch.object(plain_backward, "backward", wraps=plain_backward.backward) as kernel:

        @examples(5, f"{name} {dtype}")
        @given(cases(name, longest=100, keyed=False), st.integers(2, 12))
        def check(case: Case, size: int) -> None:
            if case.prior is not None:
                case.prior.requires_grad_(False)
            case = replace(case, small_blocks=size, key_bias=None)
            exact = case.to(torch.float64)
            out, lse = exact.attend("reference")
            cotangents = replace(Cotangents.of(out, lse), lse=torch.zeros_like(lse))
            expected = gradients(exact, "reference", cotangents.out)
            scales = gradient_scales(case, cotangents)
            for part, found in gradients(case.to(dtype), "toeplitz", cotangents.out).items():
                size_of_terms = max(float(expected[part].abs().max()), float(scales[part]), 0.1)
                # Parameters are float32 for every dtype of the queries.
                tolerance = tolerance_of(case, torch.float32 if "." in part else dtype)
                assert float((found - expected[part]).abs().max()) / size_of_terms <= tolerance, part

        check()
    assert kernel.call_count > 0


@pytest.mark.parametrize(("dtype", "kv_heads"), each_once([torch.float32, torch.bfloat16], [4, 1]))
def test_gradients_of_long_problems_equal_float64(dtype: torch.dtype, kv_heads: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, 1460, 16, generator=drawn) for h in (4, kv_heads, kv_heads))
    prior, cotangent = Laplace(4, slopes=[0.01] * 4), torch.randn(1, 4, 1460, 16, generator=drawn)

    def differentiated(backend: Backend, of: torch.dtype) -> tuple[torch.Tensor, ...]:
        content = [x.to(dtype).to(of).requires_grad_() for x in (query, key, value)]
        out = attend(content[0], content[1], content[2], prior, backend=backend)
        return torch.autograd.grad(out, content, cotangent.to(of))

    with mock.patch.object(plain_backward, "backward", wraps=plain_backward.backward) as kernel:
        found = differentiated("toeplitz", dtype)
    assert kernel.call_count == 1
    expected = differentiated("blockwise", torch.float64)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * other.abs().max()


def test_steep_priors_need_flushed_denormal_numbers() -> None:
    query, key, value = (torch.randn(1, 1, 700, 8, requires_grad=True) for _ in range(3))

    def uses_the_kernel(slope: float) -> bool:
        with mock.patch.object(plain_backward, "backward", wraps=plain_backward.backward) as kernel:
            attend(query, key, value, Laplace(1, slopes=[slope])).sum().backward()
        return kernel.call_count == 1

    flushed = flushes_denormals()
    try:
        torch.set_flush_denormal(False)
        assert (uses_the_kernel(0.01), uses_the_kernel(1.0)) == (True, False)
        if torch.set_flush_denormal(True):  # some processors cannot
            assert uses_the_kernel(1.0)
    finally:
        torch.set_flush_denormal(flushed)


def test_heads_that_share_keys_may_keep_different_keys() -> None:
    drawn = torch.Generator().manual_seed(0)
    content = [torch.randn(1, h, 2048, 4, generator=drawn, requires_grad=True) for h in (2, 1, 1)]
    prior, cotangent = Laplace(2, slopes=[1.0, 0.001]), torch.randn(1, 2, 2048, 4, generator=drawn)
    flushed = flushes_denormals()
    try:
        torch.set_flush_denormal(True)
        found, expected = (
            torch.autograd.grad(attend(content[0], content[1], content[2], prior, backend=name), content, cotangent)
            for name in ("toeplitz", "blockwise")
        )
    finally:
        torch.set_flush_denormal(flushed)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
