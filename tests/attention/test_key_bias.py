"""Key biases beside the prior: meaning, errors, precision, merging. Other tests draw examples by `cases()`."""

import math
from typing import Any

import pytest
import torch
from attention_cases import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attention_priors import GeneralizedGaussian, KeySink, Laplace, Prior, PriorAttention, SSMax, Window, attend
from attention_priors.attention import attend_with_weights
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.key_bias import best_seen
from thoroughness import each_once


def some(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def forgetting(gates: Tensor) -> Tensor:
    """Return the sums of a forget gate, floored where a gate is 0."""
    return -gates.log().clamp(min=-1e4).cumsum(-1)


def test_key_bias_is_added_to_the_prior() -> None:
    query, key, value, bias = some(2, 4, 7, 4), some(2, 2, 9, 4), some(2, 2, 9, 5), some(2, 4, 9)
    mask = bias.unsqueeze(-2).expand(-1, -1, 7, -1)
    for scale in (None, SSMax(4, include_prior=False)):
        options: Any = {"causal": True, "logit_scale": scale}
        expected = attend(query, key, value, Laplace(4), attn_mask=mask, **options)
        torch.testing.assert_close(attend(query, key, value, Laplace(4), key_bias=bias, **options), expected)
        out, weights = attend_with_weights(query, key, value, Laplace(4), key_bias=bias, **options)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), expected)


def test_key_bias_per_key_head_applies_to_all_its_query_heads() -> None:
    query, key, bias = some(1, 4, 5, 4), some(1, 2, 5, 4), some(1, 2, 5)
    expected = attend(query, key, key, key_bias=bias.repeat_interleave(2, 1))
    torch.testing.assert_close(attend(query, key, key, key_bias=bias), expected)


def test_a_key_sink_is_a_key_bias() -> None:
    query, key = some(2, 2, 300, 4), some(2, 2, 300, 4)
    sink = KeySink(2, 64, init={"slope": [0.2, -0.3], "bump": 1.5})
    numbers = sink.log_prior_of_key(torch.arange(300), torch.float64).detach().expand(2, -1, -1)
    for scale in (None, SSMax(2)):
        expected = attend(query, key, key, sink, logit_scale=scale)
        torch.testing.assert_close(attend(query, key, key, key_bias=numbers, logit_scale=scale), expected)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("gate", "dtype"), each_once([0.9, 0.999], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("beside", ["nothing", "alibi", "ggd and ssmax"])
def test_log_weights_at_131072_tokens_are_exact(gate: float, dtype: torch.dtype, compiled: bool, beside: str) -> None:
    """Values that distinguish two keys show the difference of their log-weights. Queries are 0."""
    length, heads = 2**17, 1
    rows = torch.tensor([5000, 70_003, length - 1])
    prior = {"alibi": Laplace(1, slopes=[0.01]), "ggd and ssmax": GeneralizedGaussian(1, init="laplace")}.get(beside)
    scale = SSMax(1, init=0.1) if beside == "ggd and ssmax" else None
    bias = forgetting(torch.full((1, heads, length), gate, dtype=torch.float64))
    query, key = torch.zeros(1, heads, len(rows), 8, dtype=dtype), torch.zeros(1, heads, length, 8, dtype=dtype)
    apart = torch.tensor([0, 1, 3, 8, 20, 100])
    value = torch.zeros(1, heads, length, 8, dtype=dtype)
    # Positions without a common offset: each query is computed alone.
    attention: Any = torch.compile(attend, backend="eager") if compiled else attend
    for number, row in enumerate(rows.tolist()):
        keys = slice(0, row + 1)
        columns = row - apart
        value.zero_()
        value[0, 0, columns, torch.arange(6)] = 1
        with torch.no_grad():
            out, _ = attention(
                query[:, :, number : number + 1], key[:, :, keys], value[:, :, keys], prior,
                logit_scale=scale, key_bias=bias[..., keys], return_lse=True,
            )  # fmt: skip
        exact = bias[0, 0, columns]
        if prior is not None:
            exact = exact + prior.log_prior_at(apart, torch.float64)[0].detach()
        factor = 1.0 if scale is None else float(scale.s.detach().double() * math.log(row + 1))
        expected = ((exact - exact[0]) * factor)[exact - exact.max() > -30 / factor]
        weights = out[0, 0, 0, :6].double()[: len(expected)]
        found = (weights / weights[0]).log()
        tolerance = 1e-4 if dtype == torch.float32 else 4 * 2.0**-8
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@examples(20)
@given(
    st.integers(0, 999),
    st.sampled_from([0.0, 1e-6, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([None, 0.999]),
    st.sampled_from([40, 700]),
    st.sampled_from([None, 0.4]),
)
def test_gates_from_0_to_1_match_the_reference(
    seed: int, gate: float, other: float, last_head: float | None, length: int, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gates = torch.full((1, 2, length), gate, dtype=torch.float64)
    if last_head is not None:
        gates[:, 1] = last_head
    gates[torch.rand(gates.shape, generator=generator) < 0.1] = other
    bias = forgetting(gates).requires_grad_()
    inputs = [torch.randn(1, 2, length, 8, generator=generator) for _ in range(3)]
    prior, logit_scale = GeneralizedGaussian(2, init="roles"), None if scale is None else SSMax(2, init=scale)
    results = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "toeplitz")):
        query, key, value = (x.to(dtype).requires_grad_() for x in inputs)
        options: dict[str, Any] = {"key_bias": bias, "logit_scale": logit_scale, "backend": backend}
        out = attend(query, key, value, prior, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), [query, key, value, bias])])
    for exact, found in zip(*results, strict=True):
        size = max(1.0, float(exact.detach().abs().max()))
        torch.testing.assert_close(found.double(), exact.double(), rtol=0, atol=5e-5 * size)


@pytest.mark.slow
def test_compiled_without_a_graph_for_each_length() -> None:
    prior, scale = GeneralizedGaussian(4) + KeySink(4, 64, init="recency"), SSMax(4)
    learned = [*(p for p in prior.parameters() if p.requires_grad), scale.s]

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attend(query, key, value, prior, key_bias=bias, logit_scale=scale)

    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counted)
    for length in (40, 64, 200, 333):
        query, key, value = (some(2, h, length, 16, dtype=torch.float32).requires_grad_() for h in (4, 2, 2))
        bias = forgetting(some(2, 4, length).sigmoid()).requires_grad_()
        results = []
        for function in (attention, compiled):
            out = function(query, key, value, bias)
            results.append([out, *torch.autograd.grad(out.square().sum(), [query, key, value, bias, *learned])])
        # Uncompiled short contexts use a fast path, whose cancelling sums round differently.
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=5e-5)
    assert counted.frame_count <= 2


def test_halves_of_the_keys_merge_by_log_sum_exp() -> None:
    query, key, value = some(1, 2, 8, 4), some(1, 2, 8, 4), some(1, 2, 8, 4)
    bias, places = forgetting(torch.full((1, 2, 8), 0.3, dtype=torch.float64)), torch.arange(8)

    def part(keys: slice) -> tuple[Tensor, Tensor]:
        return attend(
            query, key[:, :, keys], value[:, :, keys], query_positions=places, key_positions=places[keys],
            key_bias=bias[..., keys], return_lse=True,
        )  # fmt: skip

    (one, one_lse), (other, other_lse) = part(slice(0, 3)), part(slice(3, 8))
    lse = torch.logaddexp(one_lse, other_lse)
    merged = one * (one_lse - lse).exp().unsqueeze(-1) + other * (other_lse - lse).exp().unsqueeze(-1)
    whole, whole_lse = part(slice(0, 8))
    torch.testing.assert_close((merged, lse), (whole, whole_lse))


def test_prior_attention_accepts_a_key_bias() -> None:
    layer, x = PriorAttention(8, 2, prior=Laplace(2), batch_first=True), torch.randn(1, 5, 8)
    bias = torch.zeros(1, 2, 5)
    plain = layer(x, x, x, need_weights=False, is_causal=True)[0]
    torch.testing.assert_close(layer(x, x, x, need_weights=False, is_causal=True, key_bias=bias)[0], plain)
    bias[..., 0] = 3.0
    assert not torch.allclose(layer(x, x, x, need_weights=False, is_causal=True, key_bias=bias)[0], plain)


BAD = {
    "a list": ([0.0], "key_bias must be a tensor"),
    "half precision": (torch.zeros(1, 2, 4, dtype=torch.float16), "float32 or float64, got torch.float16"),
    "a shape": (torch.zeros(1, 2, 5), r"key_bias must have shape \(1, 2, 4\) or \(1, 1, 4\), got \(1, 2, 5\)"),
    "infinity": (torch.full((1, 2, 4), -math.inf), "key_bias must be finite; hide keys with key_padding_mask"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_key_biases_are_refused(name: str) -> None:
    bias, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        attend(torch.zeros(1, 2, 4, 4), *torch.zeros(2, 1, 1, 4, 4), key_bias=bias)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize("num_queries", [1, 2, 700])
def test_key_bias_combines_with_a_table_and_wider_values(num_queries: int) -> None:
    """The key bias is then a column of the keys, except for one query, whose keys are not widened."""
    query, key, value = (some(1, 2, n, d, dtype=torch.float32) for n, d in ((num_queries, 7), (700, 7), (700, 12)))
    bias, prior, before = some(1, 2, 700).cumsum(-1), GeneralizedGaussian(2), key.clone()
    expected = attend(query, key, value, prior, key_bias=bias, backend="reference", return_lse=True)
    for tolerance in (0.0, 1e-7):
        found = attend(query, key, value, prior, key_bias=bias, tolerance=tolerance, return_lse=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(key, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", ["padding", "padding, not causal", "the future", "another document", "a window"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 9), (9, 9), (400, 400)])
def test_biases_of_hidden_keys_have_no_influence(
    num_queries: int, num_keys: int, hidden: str, dtype: torch.dtype
) -> None:
    """The best bias is subtracted. If that is a large bias of a hidden key, the others lose their digits."""
    query, key = some(2, 2, num_queries, 4, dtype=dtype), some(2, 2, num_keys, 4, dtype=dtype)
    bias, places = some(2, 2, num_keys), torch.arange(num_keys)
    options: dict[str, Any] = {"causal": hidden not in ("padding, not causal", "a window"), "return_lse": True}
    prior: Prior = Laplace(2)
    if hidden == "a window":
        prior, large, blind = prior + Window(2, 4), places == 0, slice(-max(1, num_queries - 4), None)
    elif hidden == "the future":
        large, blind = places == num_keys - 1, slice(0, num_queries - 1)
    elif hidden == "another document":
        documents = places // 5
        options["document_ids"] = documents.expand(2, -1)
        large, blind = documents == 0, slice(-1, None)
    else:
        large, blind = places < 3, slice(None)
        options["key_padding_mask"] = large.expand(2, -1)
    expected = attend(query, key, key, prior, key_bias=bias, **options)
    found = attend(query, key, key, prior, key_bias=bias.masked_fill(large, 1e20), **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[:, :, blind], other[:, :, blind])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 9), (5, 9), (9, 9), (12, 9)])
@pytest.mark.parametrize("documents", [False, True])
def test_the_best_visible_bias_is_subtracted(num_queries: int, num_keys: int, causal: bool, documents: bool) -> None:
    """There are more queries than keys, and padding at the start, whose biases have no meaning."""
    if documents and num_queries > num_keys:
        return
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, 3, num_keys, dtype=torch.float64, generator=generator)
    padding = torch.arange(num_keys) < torch.tensor([[2], [0]])
    numbers[0, :, :2] = 1e20
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [7, 7, 8, 8, 8, 8, 8, 8, 8]]) if documents else None
    own = None if ids is None else ids[:, num_keys - num_queries :]
    geometry = Geometry(2, 3, num_queries, num_keys, torch.device("cpu"), causal, None, None, own, ids, padding)
    found = best_seen(numbers, geometry)
    visible = geometry.visible()
    assert visible is not None
    expected = numbers.unsqueeze(-2).masked_fill(~visible, -math.inf).amax(-1).expand(-1, -1, num_queries)
    seen = expected > -math.inf
    assert torch.equal(found[seen], expected[seen])


def test_documents_in_several_runs_with_padding() -> None:
    """The best bias of all keys is then subtracted, which is exact enough in float32."""
    documents, padding = torch.tensor([[0, 1, 1, 0, 1]]), torch.tensor([[False, True, True, False, False]])
    numbers = torch.tensor([[[3.0, 1e20, 1e20, 5.0, 4.0]]], dtype=torch.float64)
    geometry = Geometry(1, 1, 5, 5, torch.device("cpu"), True, None, None, documents, documents, padding)
    assert best_seen(numbers, geometry).tolist() == [[[3.0, 5.0, 5.0, 5.0, 4.0]]]
