"""Autocast, and the computation for devices other than CPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import PRIORS, Case, cases, examples, priors
from attention_errors import Cotangents, compute, errors, gradient_scales, tolerance_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_priors import Laplace, ShawVectors, Spectral, attend
from attention_priors.attention.tiles import backend as tiles_backend
from attention_priors.attention.tiles import forward, one_tile

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.mark.parametrize("backend", ["auto", "toeplitz", "blockwise", "reference"])
def test_autocast_takes_mixed_dtypes(backend: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8).bfloat16(), torch.randn(2, 2, 9, 8).half()
    prior = Laplace(4, learn=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(query, key, value, prior, return_lse=True, backend=backend)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    exact = Case(query.bfloat16(), key.bfloat16(), value.bfloat16(), prior).to(torch.float64)
    expected, expected_lse = exact.attend()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.05)
    # Autocast is off inside. It would round the logits, and so the log-sum-exp, to bfloat16.
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="key"):
        attend(query, key, value, prior)


def test_autocast_leaves_float64() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(x, x, x).dtype == torch.nn.functional.scaled_dot_product_attention(x, x, x).dtype == x.dtype
        with pytest.raises(ValueError, match=r"query must have dtype .* got torch.int64"):
            attend(x.long(), x.long(), x.long())
        with pytest.raises(ValueError, match="key must be a tensor, got NoneType"):
            attend(x, None, x)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("backend", ["auto", "toeplitz", "blockwise", "reference"])
def test_an_empty_batch_under_autocast_has_empty_results(backend: str) -> None:
    prior = Spectral(2)
    out, lse = attend(*torch.randn(3, 0, 2, 5, 4), prior, return_lse=True, backend=backend)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert (out.shape, lse.shape) == ((0, 2, 5, 4), (0, 2, 5))


def test_gradients_of_an_autocast_forward_pass() -> None:
    """A backward pass outside of autocast, as PyTorch advises, is as exact as without autocast."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 40, 8).bfloat16()
    grads = []
    for inside in (True, False):
        prior = Laplace(2, learn=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out = attend(x, x, x, prior)
        out.float().square().sum().backward()
        assert prior.log_slope.grad is not None
        grads.append(prior.log_slope.grad)
    assert (grads[0] != 0).all()
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-6)


def test_autocast_with_relative_vectors() -> None:
    x = torch.randn(1, 2, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(x, x, x, relative=ShawVectors(4)).dtype == torch.bfloat16


class Elsewhere(Tensor):
    """CPU tensor that reports another device."""

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cuda")

    @property
    def is_cpu(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False


@contextmanager
def elsewhere() -> Iterator[None]:
    """Make tiles use the formula for other devices in place of the CPU's kernel."""
    plain = forward.attend_plain

    def attend_plain(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        out, lse = plain(query.as_subclass(Elsewhere), *others)
        return out.as_subclass(Tensor), lse.as_subclass(Tensor)

    with (
        mock.patch.object(forward, "FLASH_ON_CPU", side_effect=AssertionError),
        mock.patch.object(forward, "attend_plain", attend_plain),
        mock.patch.object(one_tile, "attend_plain", attend_plain),
        mock.patch.object(tiles_backend, "attend_bare", return_value=None),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIORS)
def test_other_devices_compute_the_same(name: str) -> None:
    """The formula for other devices, run on the CPU."""

    @examples(3, name)
    @given(cases(name, longest=60), st.sampled_from([torch.float32, torch.float64]))
    def check(case: Case, dtype: torch.dtype) -> None:
        exact = case.to(torch.float64)
        expected = compute(exact, "reference")
        cotangents = Cotangents.of(expected.out, expected.lse)
        with elsewhere():
            found = errors(compute(case.to(dtype), "toeplitz", cotangents), expected, gradient_scales(case, cotangents))
        tolerance = tolerance_of(case) if dtype == torch.float32 else 3e-6
        assert max(found.values()) <= tolerance, found

    check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_devices_in_half_precision(dtype: torch.dtype) -> None:
    @examples(2)
    @given(st.data(), st.booleans())
    def check(data: st.DataObject, causal: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        prior = data.draw(priors("clipped_offsets", 4, causal, generator))
        query, key, value = (torch.randn(2, h, 50, 8, generator=generator).to(dtype) for h in (4, 2, 2))
        case = Case(query, key, value, prior, causal)
        expected, _ = case.to(torch.float64).attend("reference")
        with elsewhere():
            out, lse = case.attend("toeplitz")
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        assert float((out.double() - expected).abs().max()) <= 4 * torch.finfo(dtype).eps * float(value.abs().max())

    check()
