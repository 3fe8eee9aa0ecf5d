"""bfloat16 and float16 are as exact as plain attention with a dense float32 bias in that dtype."""

from dataclasses import replace

import pytest
import torch
from attention_cases import PRIORS, Case, examples, prior_descriptions, randomize
from attention_errors import ROUNDING, Cotangents, compute, gradient_scales
from attention_oracle import positions_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_priors import prior_from_config

HALVES = [torch.bfloat16, torch.float16]
LENGTH = 96


def plain_attention(case: Case, cotangent: Tensor) -> dict[str, Tensor]:
    """Compute PyTorch's attention with the log-prior as a dense float32 mask: output and gradients."""
    bias = torch.zeros(1, 1, LENGTH, LENGTH)
    if case.prior is not None:
        bias = case.prior.log_prior(*positions_of(case)).detach().float()
    if case.causal:
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        bias = bias.masked_fill(future, float("-inf"))
    leaves = [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=bias, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, cotangent.to(out.dtype))
    return dict(zip(("out", "query", "key", "value"), (out.detach(), *grads), strict=True))


def root_mean_square(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def half_case(name: str, dtype: torch.dtype, seed: int, causal: bool, data: st.DataObject) -> Case:
    generator = torch.Generator().manual_seed(seed)
    prior = None
    if name != "none":
        names = ["laplace", "clipped_offsets"] if name == "sum" else [name]
        descriptions = [data.draw(prior_descriptions(each, causal)) for each in names]
        prior = prior_from_config(descriptions if name == "sum" else descriptions[0], 4)
        randomize(prior, generator)
    query, key, value = (torch.randn(2, h, LENGTH, 16, generator=generator).to(dtype) for h in (4, 2, 2))
    return Case(query, key, value, prior, causal)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PRIORS)
def test_errors_are_no_larger_than_in_plain_attention(name: str, dtype: torch.dtype) -> None:
    floor = torch.finfo(dtype).eps / 8

    @examples(2, f"{name} {dtype}")
    @given(st.data(), st.integers(0, 999), st.booleans())
    def check(data: st.DataObject, seed: int, causal: bool) -> None:
        case = half_case(name, dtype, seed, causal, data)
        exact = case.to(torch.float64)
        first = compute(exact, "reference")
        # All inputs are rounded. Plain attention has no log-sum-exp to compare with.
        cotangents = Cotangents(Cotangents.of(first.out, first.lse).out.to(dtype).double(), torch.zeros_like(first.lse))
        expected = compute(exact, "reference", cotangents)
        plain = plain_attention(case, cotangents.out)
        for backend in ("toeplitz", "auto"):
            result = compute(case, backend, cotangents)
            assert result.out.dtype == dtype
            assert result.lse.dtype == torch.float32
            found = {"out": result.out} | result.grads
            for part, reached in plain.items():
                right = expected.out if part == "out" else expected.grads[part]
                allowed = 2 * root_mean_square(reached.double() - right) + floor * root_mean_square(right)
                error = root_mean_square(found[part].double() - right)
                assert error <= allowed, f"{part} of {backend}: {error:.2e} > {allowed:.2e}"
                assert found[part].dtype == dtype
            for part, grad in result.grads.items():
                if "." in part:
                    assert grad.dtype == torch.float32

    check()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [name for name in PRIORS if name not in ("none", "uniform", "window")])
def test_priors_learn_in_float32(name: str, dtype: torch.dtype) -> None:
    """The gradient of a prior's parameters is computed in float32, also for queries and keys in half precision."""

    @examples(2, f"{name} {dtype}")
    @given(st.data(), st.integers(0, 999))
    def check(data: st.DataObject, seed: int) -> None:
        case = half_case(name, dtype, seed, True, data)
        exact = case.to(torch.float64)
        first = compute(exact, "reference")
        cotangents = Cotangents.of(first.out, first.lse)
        cotangents = replace(cotangents, out=cotangents.out.to(dtype).double())
        expected = compute(exact, "reference", cotangents)
        result, terms = compute(case, "auto", cotangents), gradient_scales(case, cotangents)
        for part, grad in expected.grads.items():
            if "." in part:
                error = float((result.grads[part].double() - grad.double()).abs().max())
                # Terms of the sum may cancel, but not their rounding.
                allowed = max(1e-4, 1e-4 * float(grad.abs().max()), 4 * ROUNDING * float(terms[part]))
                assert error <= allowed, f"{part}: {error:.2e} > {allowed:.2e}"

    check()
