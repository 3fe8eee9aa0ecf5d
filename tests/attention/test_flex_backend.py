"""``backend="flex"`` against the float64 reference: uncompiled with gradients, and compiled for the CPU."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import WITHOUT_NETWORKS, Case, cases, examples, priors
from attention_errors import ROUNDING, Cotangents, Result, compute, errors, gradient_scales, tolerance_of
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn.attention import flex_attention as pytorch

from attention_priors import (
    GeneralizedGaussian,
    Laplace,
    Prior,
    ShawVectors,
    SSMax,
    Window,
    attend,
    flex_mask_mod,
    flex_score_mod,
)
from attention_priors.attention import plan
from attention_priors.attention.flex import backend
from thoroughness import every_other_deep


def why_not_compiled() -> str:
    """Reason why FlexAttention cannot be compiled on this machine. Empty if it can."""
    try:
        backend._check_cpu()
    except RuntimeError as error:
        return str(error)
    return ""


compiled = pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled() or "compiles")


# ---- the same graph, run by PyTorch's dense formula. On CPUs, only the formula has gradients and log-sum-exp


def anywhere(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Replace PyTorch's check that no gradient is wanted on a CPU; Dynamo does not trace a mock."""


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let Dynamo capture the graph as for a compiler, and PyTorch's own reference run it, with its backward pass."""
    run: Callable[..., Any] = torch.compile(backend._attention, backend="eager", fullgraph=True, dynamic=True)
    with (
        mock.patch.object(backend, "_compiled", return_value=run),
        mock.patch.object(backend, "_attend_on_cpu", lambda problem: backend._attend(problem, True)),
        mock.patch.object(plan, "_why_not_flex", return_value=None),
        mock.patch.object(pytorch, "_validate_device", anywhere),
    ):
        yield


ALIKE = ("uniform", "kerple", "clipped_offsets")
"""Priors that FlexAttention computes as it computes ALiBi's or T5's."""
QUICK = [name for name in WITHOUT_NETWORKS if name not in ALIKE]


@pytest.mark.slow
@pytest.mark.parametrize("name", every_other_deep(WITHOUT_NETWORKS, QUICK))
def test_values_and_gradients(name: str) -> None:
    """FlexAttention's backward pass computes weights from a stored log-sum-exp and inherits its rounding."""
    compared = 0

    @examples(2 if name == "generalized_gaussian" else 1, name)  # gradients of the first case are not compared
    @given(cases(name, longest=40))
    def check(case: Case) -> None:
        nonlocal compared
        assume(case.key.shape[2] > 1)  # the simplest case needs no graph
        if case.query_positions is not None or case.key_positions is not None:
            case = replace(case, key_bias=None)  # FlexAttention refuses it
        exact = case.to(torch.float64)
        expected = compute(exact, "reference")
        cotangents = Cotangents.of(expected.out, expected.lse)
        with uncompiled():
            result = compute(case, "flex", cotangents)
        largest = largest_lse(expected)
        if largest > 1e3:
            result, expected = replace(result, grads={}), replace(expected, grads={})
        found = errors(result, expected, gradient_scales(case, cotangents))
        tolerance = tolerance_of(case)
        for part, error in found.items():
            inherited = 4 * ROUNDING * largest if part in expected.grads else 0.0
            if case.key_bias is not None and case.attn_mask is not None:
                inherited += ROUNDING * largest  # scores are relative to the best of all keys, which a mask may hide
            compared += part in expected.grads
            assert error <= tolerance + inherited, f"{part}: {error:.2e} > {tolerance:.2e} + {inherited:.2e}"

    check()
    assert compared > 0


def largest_lse(result: Result) -> float:
    return float(result.lse.masked_fill(torch.isneginf(result.lse), 0.0).abs().max())


# ---- compiled for the CPU. Each shape and each kind of mask takes seconds, so many cases share few shapes and masks


SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 8}
BELOW = 128
"""Lengths of 2 to 128 are one shape."""


@st.composite
def alike(draw: st.DrawFn, name: str, *, longest: int = BELOW, shortest: int = 2, **fixed: Any) -> Case:
    """Problems that share one compilation of FlexAttention."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    lengths = st.integers(shortest, longest)
    num_queries, num_keys = (longest, longest) if draw(st.booleans()) else (draw(lengths), draw(lengths))
    causal = draw(st.booleans())

    def normal(heads: int, length: int, size: int) -> Tensor:
        return torch.randn(SHAPE["batch"], heads, length, size, generator=generator)

    query_positions = key_positions = documents = padding = None
    kind = draw(st.sampled_from(["plain", "documents", "padding", "positions"]))
    if kind == "documents" and num_queries <= num_keys:
        documents = torch.randint(-2, 2, (SHAPE["batch"], num_keys), generator=generator)
        documents = documents.sort(-1).values if draw(st.booleans()) else documents
    if kind == "padding":
        padding = torch.rand(SHAPE["batch"], num_keys, generator=generator) < draw(st.sampled_from([0.3, 1.0]))
    if kind == "positions":
        query_positions = torch.randint(0, longest, (num_queries,), generator=generator)
        key_positions = torch.randint(0, longest, (SHAPE["batch"], num_keys), generator=generator)
    return Case(
        query=normal(SHAPE["heads"], num_queries, SHAPE["head_dim"]),
        key=normal(SHAPE["kv_heads"], num_keys, SHAPE["head_dim"]),
        value=normal(SHAPE["kv_heads"], num_keys, SHAPE["value_dim"]),
        prior=draw(priors(name, SHAPE["heads"], causal, generator)),
        causal=causal,
        query_positions=query_positions,
        key_positions=key_positions,
        document_ids=documents,
        key_padding_mask=padding,
        **fixed,
    )


def check_against_reference(case: Case) -> None:
    """Compare outputs. Keys that are padding are NaN for FlexAttention."""
    key = case.key
    if case.key_padding_mask is not None:
        key = key.masked_fill(case.key_padding_mask[:, None, :, None], math.nan)
    with torch.no_grad():
        expected, lse = case.to(torch.float64).attend("reference")
        out = attend(case.query, key, case.value, case.prior, **case.options(), backend="flex")
    tolerance = 2 * tolerance_of(case)  # PyTorch's exponential there has a relative error of about 2^-20
    assert out.dtype == case.query.dtype
    assert out.shape == expected.shape
    assert not out[torch.isneginf(lse)].any(), "a row that sees nothing gives zeros"
    assert float((out.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) <= tolerance


STATIONARY = [name for name in WITHOUT_NETWORKS if name not in ("none", "key_sink", "sum")]


@compiled
@pytest.mark.slow
def test_compiled_tables_match_the_reference() -> None:
    """One compilation serves every stationary prior, causal or not, with documents, padding or positions."""
    before = number_of_compilations()
    for name in STATIONARY:

        @examples(3, name)
        @given(alike(name))
        def check(case: Case) -> None:
            check_against_reference(case)

        check()
    assert number_of_compilations() - before <= 1


@compiled
@pytest.mark.slow
def test_compiled_tables_ignore_later_keys() -> None:
    sizes = (("heads", "head_dim"), ("kv_heads", "head_dim"), ("kv_heads", "value_dim"))
    query, key, value = (torch.randn(SHAPE["batch"], SHAPE[heads], BELOW, SHAPE[size]) for heads, size in sizes)
    prior, late = GeneralizedGaussian(SHAPE["heads"], init="spread"), BELOW // 2
    with torch.no_grad():
        expected = attend(query, key, value, prior, backend="flex")
        key[:, :, late] = math.nan
        found = attend(query, key, value, prior, backend="flex")
    torch.testing.assert_close(found[:, :, :late], expected[:, :, :late], rtol=0, atol=0)
    assert not torch.equal(found, expected)


def number_of_compilations() -> int:
    return counters["stats"]["unique_graphs"]


@compiled
@pytest.mark.slow
def test_compiled_lanes_and_logit_scale_match_the_reference() -> None:
    scale = SSMax(4)

    @examples(3)
    @given(alike("key_sink", logit_scale=scale), st.integers(0, 99))
    def check(case: Case, number: int) -> None:
        assert case.prior is not None
        with torch.no_grad():
            scale.s.uniform_(-1.5, 1.5, generator=torch.Generator().manual_seed(number))
        check_against_reference(replace(case, prior=case.prior + Laplace(4, learn=True)))

    check()


@compiled
@pytest.mark.deep  # uncompiled, test_values_and_gradients covers such masks and scales
def test_compiled_dense_mask_and_scaled_content_match_the_reference() -> None:
    """Several blocks of queries and keys. The mask hides keys and adds a bias."""
    scale = SSMax(4, init=0.3, include_prior=False)

    @examples(2)
    @given(alike("laplace", logit_scale=scale, softmax_scale=0.4, shortest=260, longest=380), st.integers(0, 99))
    def check(case: Case, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        shape = (2, 1, case.query.shape[2], case.key.shape[2])
        hidden = torch.rand(shape, generator=generator) < 0.5
        mask = torch.randn(shape, generator=generator).masked_fill(hidden, float("-inf"))
        check_against_reference(replace(case, attn_mask=mask))

    check()


KEPT = ((4, 1), (2, 1100), (2, 1100))
"""Heads and lengths of queries, and of cached keys and values."""


@pytest.mark.slow
@compiled
@pytest.mark.parametrize(
    ("prior", "in_documents"),
    [
        (Laplace(4) + Window(4, 70), True),
        pytest.param(Laplace(4) + Window(4, 70), False, marks=pytest.mark.deep),
        pytest.param(GeneralizedGaussian(4, init="spread"), True, marks=pytest.mark.deep),
        pytest.param(GeneralizedGaussian(4, init="spread"), False, marks=pytest.mark.deep),
    ],
)
def test_compiled_decoding_matches_the_reference(prior: Prior, in_documents: bool) -> None:
    """One query has a separate kernel. Parts of its keys may be hidden."""
    documents = torch.arange(1100).ge(900).long().expand(2, -1) if in_documents else None
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, n, 16, generator=generator) for heads, n in KEPT)
    check_against_reference(Case(query, key, value, prior, document_ids=documents))


@pytest.mark.parametrize(
    "run", [uncompiled, pytest.param(nullcontext, marks=[pytest.mark.deep, compiled])], ids=["uncompiled", "compiled"]
)
def test_half_precision_rounds_only_queries_keys_and_values(run: Callable[[], AbstractContextManager[None]]) -> None:
    """Only queries, keys and values are rounded. Logit scale and prior meet float32 scores."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 300, 16, generator=generator).bfloat16() for _ in "qkv")
    case = Case(query, key, value, GeneralizedGaussian(4, init="spread"), logit_scale=SSMax(4, init=0.4))
    with torch.no_grad(), run():
        expected, _ = case.to(torch.float64).attend("reference")
        out = attend(query, key, value, case.prior, logit_scale=case.logit_scale, backend="flex")
    assert out.dtype == torch.bfloat16
    error = (out.double() - expected).square().mean().sqrt()
    # Most of it is the output's own rounding, of at most half a step.
    assert float(error) <= torch.finfo(torch.bfloat16).eps / 2 * float(expected.square().mean().sqrt())


def test_mods_work_in_a_custom_flex_attention() -> None:
    """The documentation's example: a prior, its masks and a custom mask."""
    length, prefix = 150, 20
    prior = GeneralizedGaussian(2, init="spread")

    def in_prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < prefix

    with torch.no_grad():
        mask_mod = pytorch.or_masks(flex_mask_mod(prior, length, length), in_prefix)
        block_mask = pytorch.create_block_mask(mask_mod, None, None, length, length, device="cpu")
        query, key, value = torch.randn(3, 2, 2, length, 16)
        attention: Any = pytorch.flex_attention  # not compiled, because that takes seconds
        out = attention(query, key, value, score_mod=flex_score_mod(prior, length, length), block_mask=block_mask)
        hidden = (torch.arange(length) > torch.arange(length).unsqueeze(-1)) & (torch.arange(length) >= prefix)
        expected = attend(query, key, value, prior, causal=False, attn_mask=hidden)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


# ---- arguments refused before any work


X = torch.randn(1, 2, 5, 8)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("query", {"query": X.clone().requires_grad_()}),
        ("value", {"value": X.clone().requires_grad_()}),
        (r"prior\.log_slope", {"prior": Laplace(2, learn=True)}),
        ("logit_scale", {"logit_scale": SSMax(2)}),
        ("return_lse", {"return_lse": True}),
        ("float64", {"query": X.double(), "key": X.double(), "value": X.double()}),
        ("relative", {"relative": ShawVectors(8)}),
        ("dropout_p", {"dropout_p": 0.1}),
        ("attn_mask", {"attn_mask": torch.zeros(5, 5, requires_grad=True)}),
    ],
)
def test_unsupported_arguments_are_refused_on_cpus(name: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"query": X, "key": X, "value": X, "prior": Laplace(2)} | changes
    with (
        mock.patch.object(backend, "_attend", side_effect=AssertionError("work was done")),
        pytest.raises(ValueError, match=name) as raised,
    ):
        attend(**arguments, backend="flex")
    assert "flex" in str(raised.value)


@torch.no_grad()
def test_a_missing_compiler_is_an_error() -> None:
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.raises(RuntimeError, match=r"C\+\+ compiler"):
        attend(X, X, X, Laplace(2), backend="flex")


@torch.no_grad()
def test_missing_vector_units_are_an_error() -> None:
    nowhere = mock.patch.object(torch.cpu, "_is_avx2_supported", return_value=False)
    with nowhere, pytest.raises(RuntimeError, match="AVX2"):
        attend(X, X, X, Laplace(2), backend="flex")


@compiled
@torch.no_grad()
def test_flex_never_falls_back_to_the_dense_formula() -> None:
    """With torch.compile switched off, FlexAttention would silently use the dense formula."""
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match=r"torch\.compile"):
        attend(X, X, X, Laplace(2), backend="flex")


@compiled
@torch.no_grad()
@pytest.mark.slow
def test_flex_works_inside_a_compiled_function() -> None:
    """A graph break keeps the result. With ``fullgraph=True``, PyTorch's error explains the reason."""
    query = torch.randn(2, 4, 90, 16)
    prior = Laplace(4)

    def attention(x: Tensor) -> Tensor:
        return attend(x, x[:, :2], x[:, 2:, :, :8], prior, backend="flex") * 2

    with pytest.raises(Unsupported, match="backend='flex'"):
        torch.compile(attention, backend="eager", fullgraph=True)(query)
    torch.testing.assert_close(torch.compile(attention, backend="eager")(query), attention(query))


# ---- CUDA


@pytest.mark.cuda
@pytest.mark.parametrize("name", WITHOUT_NETWORKS)
def test_values_and_gradients_on_cuda(name: str) -> None:
    """Compiled forward and backward pass, log-sum-exp and gradients of parameters."""

    @examples(2, name)
    @given(alike(name, longest=300, shortest=100, logit_scale=SSMax(4, init=0.3)))
    def check(case: Case) -> None:
        exact = case.to(torch.float64)
        expected = compute(exact, "reference")
        cotangents = Cotangents.of(expected.out, expected.lse)
        result = compute_on_cuda(case, cotangents)
        if largest_lse(expected) > 1e3:
            result, expected = replace(result, grads={}), replace(expected, grads={})
        for part, error in errors(result, expected, gradient_scales(case, cotangents)).items():
            assert error <= 1e-4, f"{part}: {error:.2e}"

    check()


def compute_on_cuda(case: Case, cotangents: Cotangents) -> Result:
    tensors = {field.name: getattr(case, field.name) for field in fields(case)}
    moved = {name: tensor.cuda() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    modules = {"prior": copy.deepcopy(case.prior), "logit_scale": copy.deepcopy(case.logit_scale)}
    moved |= {name: module.cuda() for name, module in modules.items() if module is not None}
    result = compute(replace(case, **moved), "flex", Cotangents(cotangents.out.cuda(), cotangents.lse.cuda()))
    grads = {name: grad.cpu() for name, grad in result.grads.items()}
    return Result(result.out.cpu(), result.lse.cpu(), grads)
