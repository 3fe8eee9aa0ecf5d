"""Fast paths for decoding steps, and for short contexts with padding and packed documents."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import PRIORS, Case, examples, priors
from attention_errors import Cotangents, Result, compute, errors, gradient_scales, tolerance_of
from hypothesis import given
from hypothesis import strategies as st
from pruning_cases import pruned_above

from attention_priors import ClippedOffsets, GeneralizedGaussian, Laplace, SSMax, Window, attend
from attention_priors.attention.plan import Plan
from attention_priors.attention.problem import Problem
from attention_priors.attention.tiles import backend, bare
from attention_priors.attention.tiles.bare import attend_bare

TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-10}


@contextmanager
def counted() -> Iterator[list[bool]]:
    """Record whether the fast path answered each call."""
    answered: list[bool] = []

    def note(problem: Problem, plan: Plan, *, need_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        found = attend_bare(problem, plan, need_lse=need_lse)
        answered.append(found is not None)
        return found

    with mock.patch.object(backend, "attend_bare", note):
        yield answered


@st.composite
def one_query(draw: st.DrawFn, name: str, dtype: torch.dtype) -> Case:
    """Draw one query per text, at the end of its keys."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kv_heads, group, batch = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    keys, width = draw(st.integers(1, 300)), draw(st.integers(1, 12))
    # With equal widths, PyTorch's kernel computes a query that sees few keys.
    value_width = draw(st.just(width) | st.integers(1, 12))
    heads, causal = kv_heads * group, draw(st.booleans())
    scale = None
    if draw(st.booleans()):
        scale = SSMax(heads, include_prior=draw(st.booleans()))
        with torch.no_grad():
            scale.s.uniform_(-1, 2, generator=generator)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return Case(
        randn(batch, heads, 1, width),
        randn(batch, kv_heads, keys, width),
        randn(batch, kv_heads, keys, value_width),
        draw(priors(name, heads, causal, generator)),
        causal=causal,
        logit_scale=scale,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", PRIORS)
def test_one_query_matches_the_reference(name: str, dtype: torch.dtype) -> None:
    ways: list[bool] = []

    @examples(6, name)
    @given(one_query(name, dtype))
    @torch.no_grad()
    def check(case: Case) -> None:
        exact = case.to(torch.float64)
        expected = attend(exact.query, exact.key, exact.value, case.prior, **case.options(), backend="reference")
        # Twice, because the second call reuses the table.
        for _ in range(2):
            with counted() as answered:
                found = attend(case.query, case.key, case.value, case.prior, **case.options(), backend="toeplitz")
            torch.testing.assert_close(found, expected.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            assert found.is_contiguous()
            if isinstance(case.prior, Window):
                assert answered == [case.prior.size >= case.key.shape[2]]  # it hides no key
            ways.extend(answered)

    check()
    if name == "axial":
        assert not any(ways)  # keys have positions
    elif name not in ("sum", "window"):
        assert sum(ways) > len(ways) / 2, "hardly ever taken"


def plain(prior: object = None, **others: object) -> Case:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 50, 8)
    return replace(Case(query, key, torch.randn(2, 2, 50, 8), prior), **others)  # pyright: ignore[reportArgumentType]


PADDING = torch.zeros(2, 50, dtype=torch.bool).index_fill_(1, torch.arange(7), True)


@pytest.mark.parametrize(
    "case",
    [
        plain(Laplace(4) + Window(4, 9)),
        plain(Laplace(4), key_padding_mask=PADDING),
        plain(Laplace(4), attn_mask=PADDING[:1, None, None].expand(1, 1, 1, 50)),
        plain(Laplace(4), document_ids=PADDING.long()),
        plain(Laplace(4), query_positions=torch.tensor([60])),
    ],
    ids=["window", "padding", "mask", "documents", "positions"],
)
def test_masks_and_positions_use_the_general_path(case: Case) -> None:
    with torch.no_grad(), counted() as answered:
        found = attend(case.query, case.key, case.value, case.prior, **case.options(), backend="toeplitz")
    assert answered == [False]
    expected = attend(case.query, case.key, case.value, case.prior, **case.options(), backend="reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 50])
def test_a_tolerance_changes_the_path_only_if_keys_are_pruned(num_queries: int) -> None:
    query, key, value = torch.randn(2, 4, num_queries, 8), *torch.randn(2, 2, 4, 50, 8)
    with torch.no_grad():
        exact = attend(query, key, value, Laplace(4))
        for fewest, unpruned in {50: True, 49: False}.items():
            with pruned_above(fewest), counted() as answered:
                found = attend(query, key, value, Laplace(4), tolerance=1e-3, backend="toeplitz")
            assert answered == [unpruned]
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5 if unpruned else 5e-3)


def test_gradients_use_the_general_path() -> None:
    case = plain(Laplace(4))
    with counted() as answered:
        attend(case.query.requires_grad_(), case.key, case.value, case.prior, backend="toeplitz").sum().backward()
    assert answered == [False]
    assert case.query.grad is not None


@pytest.mark.parametrize(("height", "is_near"), [(-200.0, True), (-5000.0, False)])
def test_log_priors_far_from_0_use_the_general_path(height: float, is_near: bool) -> None:
    """If float32 cannot represent the log-priors of all keys, the general path is used."""
    prior = ClippedOffsets(4, init="normal")
    with torch.no_grad():
        prior.bias.add_(height)
        case = plain(prior)
        with counted() as answered:
            found = attend(case.query, case.key, case.value, prior, backend="toeplitz")
        exact = case.to(torch.float64)
        expected = attend(exact.query, exact.key, exact.value, prior, backend="reference")
    assert answered == [is_near]
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_a_negative_logit_scale_uses_the_general_path() -> None:
    """A negative scale prefers the lowest log-prior, at the far end."""
    case = plain(Laplace(4, slopes=[20.0] * 4), logit_scale=SSMax(4, init=-1.0))
    with torch.no_grad(), counted() as answered:
        attend(case.query, case.key, case.value, case.prior, **case.options(), backend="toeplitz")
    assert answered == [False]


def test_returned_log_sum_exp_matches_the_reference() -> None:
    case = plain(Laplace(4))
    with torch.no_grad():
        out, lse = attend(case.query, case.key, case.value, case.prior, return_lse=True, backend="toeplitz")
        alone = attend(case.query, case.key, case.value, case.prior, backend="toeplitz")
        expected = attend(case.query, case.key, case.value, case.prior, return_lse=True, backend="reference")
    torch.testing.assert_close(out, alone)
    torch.testing.assert_close(lse, expected[1])


# ---- a short context


@st.composite
def short_context(draw: st.DrawFn, name: str, dtype: torch.dtype) -> Case:
    """Draw a short context: as many queries as keys or, without a causal mask, any number; perhaps packed or padded."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kv_heads, group, batch = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    keys, width, causal = draw(st.integers(2, 70)), draw(st.integers(1, 12)), draw(st.booleans())
    queries, heads = keys if causal else draw(st.integers(2, 70)), kv_heads * group
    scale = None
    if draw(st.booleans()):
        scale = SSMax(heads, include_prior=draw(st.booleans()))
        with torch.no_grad():
            scale.s.uniform_(-0.5, 1, generator=generator)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    starts = torch.rand(batch, keys, generator=generator) < draw(st.sampled_from([0.0, 0.1]))
    padding = torch.rand(batch, keys, generator=generator) < draw(st.sampled_from([0.1, 0.9]))
    return Case(
        randn(batch, heads, queries, width),
        randn(batch, kv_heads, keys, width),
        randn(batch, kv_heads, keys, width),
        draw(priors(name, heads, causal, generator)),
        causal=causal,
        logit_scale=scale,
        key_bias=10 * randn(batch, heads, keys).double() if draw(st.booleans()) else None,
        document_ids=starts.cumsum(-1) if queries <= keys and draw(st.booleans()) else None,
        key_padding_mask=padding if draw(st.booleans()) else None,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", PRIORS)
def test_short_contexts_match_the_reference(name: str, dtype: torch.dtype) -> None:
    ways: list[bool] = []

    @examples(5, name)
    @given(short_context(name, dtype), st.integers(1, 3))
    def check(case: Case, rows_at_once: int) -> None:
        exact = case.to(torch.float64)
        expected = compute(exact, "reference")
        cotangents = Cotangents.of(expected.out, expected.lse)
        scales, tolerance = gradient_scales(case, cotangents), tolerance_of(case, dtype)
        logits_of_row = case.query.shape[1] * case.query.shape[2] * case.key.shape[2]
        with counted() as answered, mock.patch.object(bare, "SHORT_NUMBERS", rows_at_once * logits_of_row):
            found = errors(compute(case, "toeplitz", cotangents), expected, scales)
        for part, error in found.items():
            # Parameters and their gradients are float32 for every dtype of the queries.
            allowed = max(3e-6, tolerance) if "." in part else tolerance
            assert error <= allowed, f"{part}: {error:.2e} > {allowed:.2e}"
        ways.extend(answered)

    check()
    if case_is_general(name):
        assert not any(ways)
    elif name == "fire":
        assert len({*ways}) == 2  # up to the threshold, and above
    elif name != "sum":
        assert sum(ways) > len(ways) / 2, "hardly ever taken"


@pytest.mark.parametrize("name", ["none", "laplace", "generalized_gaussian", "relative_buckets", "key_sink"])
def test_short_contexts_in_a_call_of_the_kernel_match_the_reference(name: str) -> None:
    @examples(10, name)
    @given(short_context(name, torch.float32), st.integers(1, 3))
    def check(case: Case, rows_at_once: int) -> None:
        expected = compute(case.to(torch.float64), "reference")
        logits_of_row = case.query.shape[1] * case.query.shape[2] * case.key.shape[2]
        with (
            mock.patch.object(bare, "FUSED_ROWS", 1),
            mock.patch.object(bare, "SHORT_NUMBERS", rows_at_once * logits_of_row),
            mock.patch.object(bare, "attend_plain", wraps=bare.attend_plain) as kernel,
            torch.no_grad(),
        ):
            found = Result(*case.attend("toeplitz"), {})
        assert kernel.called
        assert max(errors(found, replace(expected, grads={}), {}).values()) <= tolerance_of(case)

    check()


def case_is_general(name: str) -> bool:
    """Return whether a prior has positions on a grid."""
    return name == "axial"


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": PADDING[:1, None, None, :20]},
        {"document_ids": torch.arange(20).expand(2, -1) % 2},
        {"query_positions": torch.arange(20)},
    ],
    ids=str,
)
def test_other_short_contexts_use_the_general_path(options: dict[str, Any]) -> None:
    query = torch.randn(2, 4, 20, 8)
    with counted() as answered:
        attend(query, query, query, Laplace(4), backend="toeplitz", **options)
    assert answered == [False]


@pytest.mark.parametrize(
    ("place", "height"),
    [("padding", 300.0), ("padding", 1e5), ("padding", 1e300), ("future", 300.0), ("future", 1e5), ("future", 1e30)],
)
def test_a_hidden_key_of_high_bias_changes_nothing(place: str, height: float) -> None:
    query, key_bias = torch.randn(2, 4, 20, 8), torch.zeros(2, 4, 20, dtype=torch.float64)
    options: dict[str, Any] = {"key_padding_mask": PADDING[:, :20]} if place == "padding" else {}
    hidden, seen = (3, slice(7, 20)) if place == "padding" else (19, slice(0, 19))
    key_bias[..., hidden] = height
    with torch.no_grad(), counted() as answered:
        out, lse = attend(
            query, query, query, Laplace(4), key_bias=key_bias, return_lse=True, backend="toeplitz", **options
        )
    assert answered == [height < 1e5]
    expected = attend(query, query, query, Laplace(4), return_lse=True, backend="reference", **options)
    torch.testing.assert_close(out[:, :, seen], expected[0][:, :, seen], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse[:, :, seen], expected[1][:, :, seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_strided_tables_match_the_reference(causal: bool) -> None:
    class Transposed(ClippedOffsets):
        def log_prior_at(self, distance: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return super().log_prior_at(distance, dtype).T.contiguous().T

    query, prior = torch.randn(2, 4, 20, 8, dtype=torch.float64), Transposed(4, init="normal")
    with torch.no_grad(), counted() as answered:
        found = attend(query, query, query, prior, causal=causal, backend="toeplitz")
    assert answered == [True]
    torch.testing.assert_close(found, attend(query, query, query, prior, causal=causal, backend="reference"))


@pytest.mark.parametrize(("num_queries", "num_keys", "causal"), [(30, 30, True), (12, 30, False)])
def test_strided_columns_match_the_reference(num_queries: int, num_keys: int, causal: bool) -> None:
    """Strides as after ``unbind(-1)``. The kernels expect the numbers of a row to be contiguous."""
    query, key, value = (torch.randn(2, 4, n, 8, 3)[..., 0] for n in (num_queries, num_keys, num_keys))
    prior = ClippedOffsets(4, init="normal")
    with torch.no_grad(), counted() as answered:
        found = attend(query, key, value, prior, causal=causal, backend="toeplitz")
    assert answered == [True]
    torch.testing.assert_close(found, attend(query, key, value, prior, causal=causal, backend="reference"))


def test_a_backward_pass_inside_autocast_is_exact() -> None:
    query = torch.randn(2, 4, 20, 8, requires_grad=True)
    prior = GeneralizedGaussian(4)

    def gradient() -> torch.Tensor:
        out = attend(query, query, query, prior, backend="toeplitz")
        with torch.autocast("cpu", enabled=inside):
            return torch.autograd.grad(out.sum(), query)[0]

    inside = False
    expected = gradient()
    inside = True
    assert torch.equal(gradient(), expected)


@pytest.mark.parametrize("length", [20, 200])
def test_gradients_that_are_recorded_match(length: int) -> None:
    """With ``create_graph``, the operator computes the gradients, in one tile or several, and refuses the second ones.

    All keys of one document are padding.
    """
    query, key_bias = torch.randn(3, 4, length, 8).double(), torch.randn(3, 4, length).double()
    prior, documents = GeneralizedGaussian(4, learn=True), torch.arange(3 * length).view(3, length) * 9 // (3 * length)
    leaves = (query.requires_grad_(), key_bias.requires_grad_(), *prior.parameters())
    with mock.patch.object(bare, "SHORT_NUMBERS", 2 * 4 * length * length), counted() as answered:
        out = attend(
            query, query, query, prior, document_ids=documents, key_padding_mask=documents == 3, key_bias=key_bias
        )
    assert answered == [True]
    expected = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    found = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="second derivative"):
        found[0].sum().backward()
