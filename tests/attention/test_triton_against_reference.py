"""Triton's kernels against the dense formula in float64: values, log-sum-exp and all gradients."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import WITHOUT_NETWORKS, Case, cases, examples, randomize
from attention_errors import Cotangents, Result, compute, errors, gradient_scales, tolerance_of
from hypothesis import given
from hypothesis import strategies as st
from pruning_cases import small_blocks
from test_half_precision import half_case, plain_attention, root_mean_square
from triton_cases import DEVICES, compute_on, configurations, configured, place, same

from attention_priors import GeneralizedGaussian, KeySink, Laplace, RelativeBuckets, SSMax, Window, pruning_report
from attention_priors.attention import operator, plan
from attention_priors.attention.tiles import exact
from attention_priors.attention.triton import backend
from attention_priors.attention.triton.backend import Blocks, Configuration
from thoroughness import each_once, every_other_deep, every_other_slow

pytestmark = pytest.mark.parametrize("device", DEVICES)


def check_exactness(device: str, case: Case) -> None:
    exact = case.to(torch.float64)
    expected = compute(exact, "reference")
    cotangents = Cotangents.of(expected.out, expected.lse)
    found = errors(compute_on(device, case, cotangents), expected, gradient_scales(case, cotangents))
    tolerance = tolerance_of(case)
    for part, error in found.items():
        assert error <= tolerance, f"{part}: {error:.2e} > {tolerance:.2e}"


@pytest.mark.parametrize("name", every_other_slow(WITHOUT_NETWORKS, ["none", "laplace"]))
def test_values_and_gradients_in_float32(name: str, device: str) -> None:
    @examples(1, f"triton {name}")
    @given(cases(name, longest=40, largest_batch=2, masks=False), configurations())
    def check(case: Case, configuration: Configuration) -> None:
        with configured(configuration):
            check_exactness(device, case)

    check()


@pytest.mark.slow
def test_many_blocks_match_the_reference(device: str) -> None:
    """Longer sequences in blocks of every shape: pairs before, on and after the diagonal, and outside a window."""

    @examples(2, "blocks")
    @given(
        configurations(), st.integers(60, 100), st.sampled_from([0, 13]), st.sampled_from([None, 9, 40]), st.booleans()
    )
    def check(configuration: Configuration, length: int, ahead: int, window: int | None, causal: bool) -> None:
        generator = torch.Generator().manual_seed(length)
        prior = RelativeBuckets(1, num_buckets=16, max_distance=90, bidirectional=not causal)
        randomize(prior, generator)
        query, key, value = (torch.randn(1, 1, n, 5, generator=generator) for n in (length - ahead, length, length))
        case = Case(query, key, value, prior if window is None else prior + Window(1, window), causal)
        with configured(configuration):
            check_exactness(device, case)

    check()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "causal"), each_once(["positions", "documents"], [True, False]))
def test_positions_without_a_common_offset_match(device: str, kind: str, causal: bool) -> None:
    """Kernels read such positions, and documents that are not contiguous, with ids of any size."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 1, 20, 4, generator=generator)
    positions = torch.randint(0, 60, (2, 20), generator=generator)
    scale = SSMax(1, init=0.7)
    documents = torch.randint(0, 2, (2, 20), generator=generator) * 10**12
    padding = torch.rand(2, 20, generator=generator) < 0.2
    prior = Laplace(1, learn=False) + Window(1, 25)
    options: dict[str, Any] = {
        "positions": {"query_positions": positions - 5, "key_positions": positions, "key_padding_mask": padding},
        "documents": {"document_ids": documents},
    }[kind]
    case = replace(Case(query, key, value, prior, causal, scale), **options)
    with configured(same(Blocks(16, 16, 4, 1))):
        check_exactness(device, case)
        # Without a common distance per diagonal, the gradient of a learned table is summed in integers.
        learned = replace(case, prior=Laplace(1, learn=True))
        check_exactness(device, learned)
        cotangents = Cotangents.of(*learned.attend())
        one, other = (compute_on(device, learned, cotangents).grads for _ in range(2))
        assert all(torch.equal(one[name], other[name]) for name in one), "not the same in another order"


@pytest.mark.slow
def test_keys_shared_between_programs(device: str) -> None:
    """With few queries and many keys, as in decoding, the results of several programs are merged."""

    @examples(2, "shares")
    @given(st.integers(2, 5), st.integers(1, 16), st.integers(40, 64), st.integers(0, 99), st.booleans())
    def check(shares: int, num_queries: int, num_keys: int, seed: int, causal: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (
            torch.randn(1, h, n, 5, generator=generator) for h, n in [(2, num_queries), *[(1, num_keys)] * 2]
        )
        prior, padding = Laplace(2, learn=True), torch.rand(1, num_keys, generator=generator) < 0.3
        bias = torch.rand(1, 2, num_keys, generator=generator, dtype=torch.float64).cumsum(-1)
        for options in (
            {"key_padding_mask": padding},
            {"key_bias": bias, "logit_scale": SSMax(2, init=0.7)},
            {"prior": Laplace(2, learn=True) + Window(2, 30)},
            {"document_ids": torch.arange(num_keys).unsqueeze(0) // 30} if num_queries <= num_keys else {},
        ):
            case = replace(Case(query, key, value, prior, causal), **options)
            with (
                configured(same(Blocks(16, 16, 4, 1))),
                mock.patch.object(backend, "shares", return_value=shares) as asked,
            ):
                check_exactness(device, case)
            assert asked.called

    check()


@pytest.mark.slow
@pytest.mark.parametrize("scaled", every_other_deep(["", "all", "content"], ["all"]))
def test_rows_beyond_float32_are_computed_apart(scaled: str, device: str) -> None:
    """Log-priors of one head are near, of one far, and of one far in later rows. Each row is computed in one of two
    runs.
    """
    prior = RelativeBuckets(3, num_buckets=32, max_distance=64)
    torch.manual_seed(0)
    with torch.no_grad():
        prior.bias.normal_()
        prior.bias[1] -= 30000.0
    bias = torch.zeros(2, 3, 50, dtype=torch.float64)
    bias[:, 2, 20:] = 12345.0
    query, key, value = (torch.randn(2, h, 50, 6) for h in (3, 1, 1))
    scale = SSMax(3, init=-0.2, include_prior=scaled == "all") if scaled else None
    for options in ({}, {"key_bias": bias, "document_ids": torch.arange(50).expand(2, -1) // 30}):
        case = replace(Case(query, key, value, prior, logit_scale=scale), **options)
        with (
            configured(same(Blocks(32, 32, 4, 1))),
            mock.patch.object(exact, "recompute_rows", side_effect=AssertionError),
        ):
            check_exactness(device, case)


@pytest.mark.slow
def test_skipped_blocks_are_not_visited(device: str) -> None:
    """Kernels visit only the listed slots. A query without listed slots sees no key."""
    slot = 32

    @examples(3, "kept")
    @given(configurations(slot), st.integers(0, 99), st.booleans(), st.booleans())
    def check(configuration: Configuration, seed: int, documents: bool, causal: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        prior = GeneralizedGaussian(2, init="spread", learn=True)
        query, key, value = (torch.randn(1, h, 50, 4, generator=generator) for h in (2, 1, 1))
        ids = torch.arange(50).unsqueeze(0) // 40 if documents else None
        kept = torch.rand(1, 2, 2, 2, generator=generator) < 0.6
        hidden = ~kept.repeat_interleave(slot, 2).repeat_interleave(slot, 3)[:, :, :50, :50]
        case = Case(query, key, value, prior, causal, document_ids=ids)
        masked = replace(case, attn_mask=hidden)
        expected = compute(masked.to(torch.float64), "reference")
        cotangents = Cotangents.of(expected.out, expected.lse)
        of_device = kept.to(device)
        read = operator.read_inputs

        def read_and_leave_out(*inputs: Any) -> tuple[Any, ...]:
            content, problem = read(*inputs)
            return content, replace(problem, kept=of_device)

        with (
            configured(configuration, slot),
            mock.patch.object(operator, "read_inputs", read_and_leave_out),
            mock.patch.object(plan, "CHECKED", ()),  # the self-test's problem has other slots
        ):
            result = compute_on(device, case, cotangents)
        found = errors(result, expected, gradient_scales(masked, cotangents))
        assert max(found.values()) <= tolerance_of(masked), found

    check()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_pruned_results_match_the_reference(device: str, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, 150, 4, generator=generator) for h in (2, 1, 1))
    case = Case(query, key, value, Laplace(2, slopes=[2.0, 1e-3]), causal, tolerance=1e-3)
    with configured(same(Blocks(16, 16, 4, 1)), 32), small_blocks(32):
        report = pruning_report(query, key, case.prior, tolerance=1e-3, causal=causal)
        out, lse = (x.cpu() for x in place(case, device).attend("triton"))
    assert report.skipped[0] > 0.3
    exact, exact_lse = replace(case, tolerance=0.0).attend("reference")
    assert float((out - exact).abs().max()) > 1e-7, "nothing was left out"
    longest = torch.linalg.vector_norm(value, dim=-1).max()
    assert float(torch.linalg.vector_norm(out - exact, dim=-1).max()) <= 2e-3 * longest + 1e-5
    assert float((exact_lse - lse).max()) <= 1e-3 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("theta_beta", [-8.0, 8.0])
def test_rows_of_one_key_with_huge_log_priors_match(device: str, theta_beta: float) -> None:
    """β < 0 makes the log-prior of distance 0 as low as -1e30 nats. The first row has weight 1 and gradient 0."""
    prior = GeneralizedGaussian(2, learn=True)
    with torch.no_grad():
        prior.theta_beta.fill_(theta_beta)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, 24, 4) for h in (2, 1, 1))
    small = same(Blocks(16, 16, 4, 2))
    for case in (
        Case(query, key, value, prior, logit_scale=SSMax(2, init=0.7)),
        Case(query, key, value, prior + Window(2, 1)),
    ):
        with configured(small):
            check_exactness(device, case)


def test_rows_of_one_key_have_gradient_0_in_half_precision(device: str) -> None:
    """A gradient of 0 stays 0 when multiplied by 1e30, in any order of the products."""
    prior = GeneralizedGaussian(2, learn=True)
    with torch.no_grad():
        prior.theta_beta.fill_(-8.0)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, 70, 100).half() for h in (2, 1, 1))
    case = Case(query, key, value, prior + Window(2, 1))
    cotangents = Cotangents(torch.randn(1, 2, 70, 100).half().double(), torch.zeros(1, 2, 70).double())
    with configured(same(Blocks(64, 64, 4, 1))):
        found = compute_on(device, case, cotangents)
    for part, grad in found.grads.items():
        if "." in part:
            assert (grad == 0).all(), part


def test_log_sum_exps_of_a_million_nats_keep_weights_exact(device: str) -> None:
    """A float32 log-sum-exp of that size is wrong by 0.03, but weights and gradients are exact."""
    prior = RelativeBuckets(1)
    with torch.no_grad():
        prior.bias.fill_(1e6)
    torch.manual_seed(0)
    value = torch.randn(1, 1, 40, 4)
    case = Case(torch.zeros(1, 1, 40, 4), value, value, prior)
    cotangents = Cotangents(torch.randn(1, 1, 40, 4).double(), torch.zeros(1, 1, 40).double())
    expected = compute(case.to(torch.float64), "reference", cotangents)
    with configured(same(Blocks(16, 16, 4, 1))):
        found = compute_on(device, case, cotangents)
    for part, grad in expected.grads.items():
        torch.testing.assert_close(found.grads[part].double(), grad.double(), rtol=0, atol=1e-5)


def test_logit_scale_of_the_prior_learns_in_float32(device: str) -> None:
    """The logit scale learns in float32, as the prior does. Keys are 0, so the scale affects only the prior."""
    prior = GeneralizedGaussian(2, init="spread", learn=True)
    torch.manual_seed(0)
    query, value = torch.randn(1, 2, 40, 8).half(), torch.randn(1, 1, 40, 8).half()
    case = Case(query, torch.zeros_like(value), value, prior, logit_scale=SSMax(2))
    cotangents = Cotangents(torch.randn(1, 2, 40, 8).half().double(), torch.zeros(1, 2, 40).double())
    expected = compute(case.to(torch.float64), "reference", cotangents)
    with configured(same(Blocks(16, 16, 4, 1))):
        found = compute_on(device, case, cotangents)
    for part in ("logit_scale.s", "prior.theta_alpha"):
        torch.testing.assert_close(found.grads[part], expected.grads[part], rtol=2e-5, atol=2e-5)


HALF = [*itertools.product([torch.float16, torch.bfloat16], ["none", "generalized_gaussian", "key_sink"])]
QUICK_HALF = [(torch.float16, "key_sink"), (torch.bfloat16, "generalized_gaussian")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype_and_name", every_other_deep(HALF, QUICK_HALF), ids=str)
def test_half_precision_is_as_exact_as_plain_attention(dtype_and_name: tuple[torch.dtype, str], device: str) -> None:
    """Errors are no larger than in plain attention with a dense float32 bias, and priors learn in float32."""
    dtype, name = dtype_and_name
    floor = torch.finfo(dtype).eps / 16
    blocks = same(Blocks(64, 64, 4, 2))
    # The interpreter truncates to bfloat16 where a device rounds, which doubles the error.
    times = 4 if device == "cpu" and dtype == torch.bfloat16 else 2

    @examples(1, f"triton {name} {dtype}")
    @given(st.data(), st.integers(0, 999), st.booleans())
    def check(data: st.DataObject, seed: int, causal: bool) -> None:
        case = half_case(name, dtype, seed, causal, data)
        case = replace(case, query=case.query[:1], key=case.key[:1], value=case.value[:1])
        exact = case.to(torch.float64)
        first = compute(exact, "reference")
        cotangents = Cotangents.of(first.out, first.lse)
        cotangents = Cotangents(cotangents.out.to(dtype).double(), torch.zeros_like(first.lse))
        expected = compute(exact, "reference", cotangents)
        plain = plain_attention(case, cotangents.out)
        with configured(blocks):
            result = compute_on(device, case, cotangents)
        assert result.out.dtype == dtype
        assert result.lse.dtype == torch.float32
        found = {"out": result.out} | result.grads
        for part, reached in plain.items():
            right = expected.out if part == "out" else expected.grads[part]
            allowed = times * root_mean_square(reached.double() - right) + times * floor * root_mean_square(right)
            assert root_mean_square(found[part].double() - right) <= allowed, part
        for part, grad in expected.grads.items():
            if "." in part:
                assert result.grads[part].dtype == torch.float32
                error = (result.grads[part].double() - grad.double()).abs().max()
                assert error <= 1e-4 * max(1.0, float(grad.abs().max())), f"{part}: {float(error):.2e}"

    check()


@pytest.mark.slow
def test_any_head_dimension_matches(device: str) -> None:
    """Head dimensions are padded to powers of two, also wide ones. Values may have another dimension."""
    blocks = same(Blocks(16, 16, 4, 1))
    for head_dim, value_dim in ((16, 33), (80, 64), (256, 96), (249, 256)):
        torch.manual_seed(head_dim)
        query, key, value = (torch.randn(1, 1, 20, n) for n in (head_dim, head_dim, value_dim))
        prior = Laplace(1, learn=True)
        with configured(blocks):
            check_exactness(device, Case(query, key, value, prior))


def test_strided_tensors_match(device: str) -> None:
    """Queries have the layout of projections, ``(B, L, H, D)``, and columns of keys are strided."""
    torch.manual_seed(0)
    query = torch.randn(2, 20, 2, 4).transpose(1, 2)
    key, value = torch.randn(2, 2, 4, 20).mT, torch.randn(2, 20, 2, 4).transpose(1, 2)
    with configured(same(Blocks(16, 16, 4, 1))):
        check_exactness(device, Case(query, key, value, Laplace(2, learn=True) + KeySink(2, train_length=8)))


@pytest.mark.slow
def test_equal_inputs_give_equal_results(device: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, 40, 8) for h in (2, 1, 1))
    case = Case(query, key, value, RelativeBuckets(2), logit_scale=SSMax(2))
    cotangents = Cotangents.of(*case.attend())
    with configured(same(Blocks(32, 32, 4, 1))):
        one, other = (compute_on(device, case, cotangents) for _ in range(2))

    def parts(result: Result) -> list[torch.Tensor]:
        return [result.out, result.lse, *result.grads.values()]

    for first, second in zip(parts(one), parts(other), strict=True):
        assert torch.equal(first, second)


def test_strides_beyond_32_bits_match(device: str, tmp_path: Path) -> None:
    """Examples are more than 2^31 numbers apart, as in a view of a large cache. The file is sparse."""
    if device != "cpu":
        pytest.skip("8 GiB of a device would be used: its memory is not sparse")
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 1, 20, 8)
    apart = 2**31 + 64
    cache = torch.from_file(str(tmp_path / "cache"), shared=True, size=apart + key.numel(), dtype=torch.float32)
    far = cache.as_strided(key.shape, (apart, 160, 8, 1)).copy_(key)
    case = Case(query, far, value, Laplace(1, learn=True))
    with configured(same(Blocks(16, 16, 4, 1))):
        found, expected = (each.attend("triton") for each in (case, replace(case, key=key)))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
