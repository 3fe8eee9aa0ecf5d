"""Triton's kernels against the dense formula in float64: values, log-sum-exp and all gradients."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from attention_cases import PRIORS, Case, cases, examples, priors, randomize
from attention_errors import Cotangents, Result, compute, errors, float32_tolerance, gradient_scales
from hypothesis import given
from hypothesis import strategies as st
from test_extreme_parameters import EXTREMES
from test_half_precision import half_case, plain_attention, root_mean_square
from triton_cases import DEVICES, compute_on, configurations, configured

from attention_priors import GeneralizedGaussian, KeySink, Laplace, RelativeBuckets, SSMax, Window
from attention_priors.attention import triton_backend
from attention_priors.attention.triton_backend import Blocks, Configuration

pytestmark = pytest.mark.parametrize("device", DEVICES)


def check_exactness(device: str, case: Case) -> None:
    exact = case.to(torch.float64)
    expected = compute(exact, "reference")
    cotangents = Cotangents.of(expected.out, expected.lse)
    found = errors(compute_on(device, case, cotangents), expected, gradient_scales(case, cotangents))
    tolerance = float32_tolerance(case)
    for part, error in found.items():
        assert error <= tolerance, f"{part}: {error:.2e} > {tolerance:.2e}"


@pytest.mark.parametrize("name", PRIORS)
def test_float32(name: str, device: str) -> None:
    @examples(5, f"triton {name}")
    @given(cases(name, longest=40, masks=False), configurations())
    def check(case: Case, configuration: Configuration) -> None:
        with configured(configuration):
            check_exactness(device, case)

    check()
