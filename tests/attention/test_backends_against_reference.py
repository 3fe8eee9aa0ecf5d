"""Every backend against the dense formula in float64: values, log-sum-exp and all gradients."""

from dataclasses import replace

import pytest
import torch
from attention_cases import OWN, PRIORS, Case, cases, examples, priors
from attention_errors import Cotangents, compute, errors, gradient_scales, tolerance_of
from hypothesis import given
from hypothesis import strategies as st

from attention_priors import Laplace, SSMax, attend
from thoroughness import every_other_deep


@pytest.mark.parametrize("name", [*PRIORS, *OWN])
def test_values_and_gradients_in_float32(name: str) -> None:
    @examples(4, name)
    @given(cases(name))
    def check(case: Case) -> None:
        exact = case.to(torch.float64)
        expected = compute(exact, "reference")
        cotangents = Cotangents.of(expected.out, expected.lse)
        scales = gradient_scales(case, cotangents)
        for backend in case.backends():
            found = errors(compute(case, backend, cotangents), expected, scales)
            tolerance = tolerance_of(case)
            for part, error in found.items():
                assert error <= tolerance, f"{part} of {backend}: {error:.2e} > {tolerance:.2e}"

    check()


@pytest.mark.parametrize("name", [*PRIORS, *OWN])
def test_values_and_gradients_in_float64(name: str) -> None:
    """Float64 shows small mistakes that rounding would hide."""

    @examples(3, name)
    @given(cases(name, longest=60))
    def check(case: Case) -> None:
        case = case.to(torch.float64)
        expected = compute(case, "reference")
        cotangents = Cotangents.of(expected.out, expected.lse)
        scales = gradient_scales(case, cotangents)
        for backend in case.backends():
            result = compute(case, backend, cotangents)
            for part, error in errors(result, expected, scales).items():
                # Parameters and their gradients are float32 for every dtype of the queries. Key biases may be float32
                # too.
                single = "." in part or (part == "key_bias" and result.grads[part].dtype == torch.float32)
                tolerance = 3e-6 if single else 1e-10
                assert error <= tolerance, f"{part} of {backend}: {error:.2e} > {tolerance:.2e}"

    check()


@pytest.mark.parametrize("name", [*PRIORS, *OWN])
def test_results_without_log_sum_exp(name: str) -> None:
    """Without a returned log-sum-exp, backends may use another algorithm, as for lanes. Values and gradients are
    equal.
    """

    @examples(3, name)
    @given(cases(name, longest=60, masks=False), st.booleans())
    def check(case: Case, plain: bool) -> None:
        if plain:
            positions = {"query_positions": None, "key_positions": None}
            # The key bias of padding has no meaning.
            case = replace(case, **positions, document_ids=None, key_padding_mask=None, key_bias=None)
        case = case.to(torch.float64)
        case = replace(case, **{n: getattr(case, n).requires_grad_() for n in case.given()})
        leaves = case.leaves()
        cotangent = Cotangents.of(*case.attend("reference")).out

        def both(backend: str) -> list[torch.Tensor]:
            out = attend(
                case.query,
                case.key,
                case.value,
                case.prior,
                **case.options(),
                backend=backend,  # pyright: ignore[reportArgumentType, reportCallIssue]
            )
            grads = torch.autograd.grad(out, list(leaves.values()), cotangent, allow_unused=True)
            zeros = [torch.zeros_like(leaf) for leaf in leaves.values()]
            return [out.detach(), *(z if g is None else g for z, g in zip(zeros, grads, strict=True))]

        expected = both("reference")
        scales = gradient_scales(case, replace_lse(Cotangents(cotangent, case.attend("reference")[1])))
        for backend in case.backends(need_lse=False):
            for part, found, exact in zip(("out", *leaves), both(backend), expected, strict=True):
                # PyTorch's own backward pass gives a row with one key a gradient of about 1e-16.
                size = max(float(exact.abs().max()), float(scales[part]) if part != "out" else 0.0, 0.1)
                tolerance = 3e-6 if "." in part else 1e-10
                error = float((found - exact).abs().max()) / size
                assert error <= tolerance, f"{part} of {backend}: {error:.2e}"

    check()


def replace_lse(cotangents: Cotangents) -> Cotangents:
    return Cotangents(cotangents.out, torch.zeros_like(cotangents.lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["blockwise", "auto"])
def test_gradient_of_a_float_mask(backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, n, 3, generator=generator, dtype=torch.float64) for n in (5, 9, 9))
    prior = Laplace(4, learn=True)
    for size in ((5, 9), (1, 4, 5, 9), (2, 1, 1, 9), (2, 4, 5, 9)):
        mask = torch.randn(size, generator=generator, dtype=torch.float64)
        mask[..., 3] = float("-inf")
        cotangent = torch.randn(2, 4, 5, 3, generator=generator, dtype=torch.float64)

        def gradient(name: str, dtype: torch.dtype, mask: torch.Tensor = mask) -> torch.Tensor:
            leaf = mask.to(dtype).requires_grad_()
            inputs = (x.to(dtype) for x in (query, key, value))
            out = attend(*inputs, prior, attn_mask=leaf, logit_scale=SSMax(4), backend=name)  # pyright: ignore[reportArgumentType, reportCallIssue]
            return torch.autograd.grad(out, leaf, cotangent.to(dtype))[0].double()  # noqa: B023

        expected = gradient("reference", torch.float64)
        assert float(expected.abs().max()) > 1e-3
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(gradient(backend, dtype), expected, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("num_queries", every_other_deep([1, 255, 256, 257, 513, 700], [1, 256, 257, 700]))
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients_around_the_default_block_size(num_queries: int, causal: bool) -> None:
    """Blocks have their default size, and more keys than fit one block of queries."""
    generator = torch.Generator().manual_seed(num_queries)

    @examples(2, f"{num_queries} {causal}")
    @given(priors("generalized_gaussian", 2, causal, generator), st.sampled_from([None, 7]))
    def check(prior, window) -> None:
        from attention_priors import Window

        query, key, value = (
            torch.randn(1, h, n, 4, generator=generator) for h, n in ((2, num_queries), (1, 600), (1, 600))
        )
        case = Case(query, key, value, prior if window is None else prior + Window(2, window), causal)
        expected = compute(case.to(torch.float64), "reference")
        cotangents = Cotangents.of(expected.out, expected.lse)
        found = errors(compute(case, "toeplitz", cotangents), expected, gradient_scales(case, cotangents))
        assert max(found.values()) <= tolerance_of(case), found

    check()


def test_the_backend_lanes_refuses_priors_without_lanes() -> None:
    x = torch.randn(1, 2, 4, 3)
    with pytest.raises(ValueError, match="backend='lanes' cannot compute this: not all of the prior is factored"):
        attend(x, x, x, Laplace(2), backend="lanes")
