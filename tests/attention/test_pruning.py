"""Certified pruning: the weight that a query really loses, the certificate and the tolerance, in this order."""

from dataclasses import replace

import pytest
import torch
from attention_cases import PRIORS, Case, examples
from attention_errors import Cotangents, compute, errors, float32_tolerance, gradient_scales
from attention_oracle import oracle
from hypothesis import given
from hypothesis import strategies as st
from pruning_cases import attend_pruned, prunable_cases, small_blocks, spread

TOLERANCES = st.sampled_from([1e-9, 1e-6, 1e-3, 0.05, 0.5])
SIZES = st.sampled_from([2, 4, 8])


@pytest.mark.parametrize("name", PRIORS)
def test_real_error_is_within_the_certificate_and_the_certificate_within_the_tolerance(name: str) -> None:
    dropped_blocks = 0

    @examples(40, name)
    @given(prunable_cases(name, TOLERANCES), SIZES)
    def check(case: Case, size: int) -> None:
        nonlocal dropped_blocks
        observed = attend_pruned(case, size)
        exact = oracle(case)
        if observed.pruned is None:
            assert case.key.shape[2] <= 2 * size
            return
        kept, certificate = observed.pruned
        assert (certificate <= case.tolerance).all()
        pairs = spread(kept, size, *exact.weights.shape[2:])
        lost = (exact.weights * ~pairs).sum(-1)
        allowed = certificate.repeat_interleave(size, dim=-1)[..., : lost.shape[-1]]
        assert (lost <= allowed * (1 + 1e-9) + 1e-12).all(), f"lost {lost.max()}, certified {certificate.max()}"
        assert ((pairs & exact.seen) <= observed.looked_at).all(), "a kept key was not looked at"
        dropped_blocks += int((~kept).sum())

        out_error = torch.linalg.vector_norm(observed.out.detach() - exact.out.detach(), dim=-1)
        longest = torch.linalg.vector_norm(case.value.double(), dim=-1).max()
        rounding = float32_tolerance(case) * 20
        assert (out_error <= 2 * allowed * longest + rounding * longest).all()
        seen = ~torch.isneginf(exact.lse)
        low = (exact.lse - observed.lse.double()).detach()[seen]
        scale = exact.lse.detach().abs()[seen].clamp(min=1)
        assert (low <= -torch.log1p(-allowed[seen]) + rounding * scale).all()

    check()
    assert dropped_blocks > 100, "the test has tested nothing"


@pytest.mark.parametrize("name", PRIORS)
def test_gradients_are_those_of_what_is_computed(name: str) -> None:
    @examples(16, name)
    @given(prunable_cases(name, st.sampled_from([1e-3, 0.05, 0.5])), SIZES)
    def check(case: Case, size: int) -> None:
        with torch.no_grad():
            observed = attend_pruned(case, size)
        # A finite number hides a key without changing how many keys the logit scale counts.
        mask = torch.zeros(observed.looked_at.shape).masked_fill(~observed.looked_at, -1e6)
        masked = replace(case, attn_mask=mask, tolerance=0.0)
        expected = compute(masked.to(torch.float64), "reference")
        cotangents = Cotangents.of(expected.out, expected.lse)
        with small_blocks(size):
            found = compute(case, "toeplitz", cotangents)
        tolerated = float32_tolerance(case)
        for part, error in errors(found, expected, gradient_scales(masked, cotangents)).items():
            assert error <= tolerated, f"{part}: {error:.2e} > {tolerated:.2e}"

    check()
