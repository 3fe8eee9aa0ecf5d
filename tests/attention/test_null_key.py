"""A null key: a logit beside the keys, with the value zero."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import PRIORS, Case, cases, examples
from attention_errors import tolerance_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from attention_priors import GeneralizedGaussian, Laplace, NullKey, PriorAttention, SSMax, apply_null, attend
from attention_priors.attention import attend_with_weights
from thoroughness import every_other_slow


def some(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", ["head", "query"])
def test_null_key_equals_an_additional_key_of_value_0(shape: str) -> None:
    query, key, value = some(2, 3, 7, 4), some(2, 3, 9, 4), some(2, 3, 9, 5)
    logit = some(3) if shape == "head" else some(2, 3, 7)
    mask = torch.zeros(2, 3, 7, 10, dtype=torch.float64)
    mask[..., 9] = logit.view(1, 3, 1) if shape == "head" else logit
    expected = scaled_dot_product_attention(query, pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1)), mask)
    found = attend(query, key, value, causal=False, null_logit=logit)
    torch.testing.assert_close(found, expected)
    out, weights = attend_with_weights(query, key, value, causal=False, null_logit=logit)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights @ value, expected)
    assert bool((weights.sum(-1) < 1).all())


@pytest.mark.parametrize("name", every_other_slow(PRIORS, ["none", "sum"]))
def test_values_and_gradients_match_in_every_backend(name: str) -> None:
    @examples(6, name)
    @given(cases(name, longest=60), st.sampled_from([torch.float32, torch.float64]), st.booleans())
    def check(case: Case, dtype: torch.dtype, per_query: bool) -> None:
        shape = case.query.shape[:3] if per_query else case.query.shape[1:2]
        logit = some(*shape).requires_grad_()
        weight = some(*case.query.shape[:3], case.value.shape[-1])

        def compute(case: Case, backend: str) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]
            options: Any = {**case.options(), "backend": backend, "return_lse": True, "null_logit": logit}
            query, key, value = leaves
            out, lse = attend(query, key, value, case.prior, **options)
            grads = torch.autograd.grad((out.double() * weight).sum(), [*leaves, logit])
            return [x.double() for x in (out, lse, *grads)]

        expected = compute(case.to(torch.float64), "reference")
        tolerance = 1e-9 if dtype == torch.float64 else 100 * tolerance_of(case)
        for backend in case.backends():
            for found, exact in zip(compute(case.to(dtype), backend), expected, strict=True):
                finite = exact.isfinite()
                scale = 1 + float(exact[finite].abs().max()) if bool(finite.any()) else 1.0
                torch.testing.assert_close(found[finite], exact[finite], rtol=0, atol=tolerance * scale)

    check()


def test_parts_merge_before_the_null_key_applies() -> None:
    query, key, value = some(1, 2, 8, 4), some(1, 2, 8, 4), some(1, 2, 8, 4)
    prior, scale, null = GeneralizedGaussian(2), SSMax(2, 0.7), NullKey(2, init=0.4)
    places = torch.arange(8)

    def part(keys: slice, **options: Any) -> Any:
        positions = {"query_positions": places, "key_positions": places[keys], "visible_keys": places + 1}
        return attend(query, key[:, :, keys], value[:, :, keys], prior, logit_scale=scale, **positions, **options)

    whole = part(slice(0, 8), null_logit=null)
    (one, one_lse), (other, other_lse) = (part(keys, return_lse=True) for keys in (slice(0, 3), slice(3, 8)))
    lse = torch.logaddexp(one_lse, other_lse)
    merged = one * (one_lse - lse).exp().unsqueeze(-1) + other * (other_lse - lse).exp().unsqueeze(-1)
    torch.testing.assert_close(apply_null(merged, lse, null), whole)
    (found,) = torch.autograd.grad(apply_null(merged, lse, null).sum(), [null.logit])
    (expected,) = torch.autograd.grad(whole.sum(), [null.logit])
    torch.testing.assert_close(found, expected)


def test_log_sum_exp_excludes_the_null_key() -> None:
    x = some(1, 2, 6, 4)
    out, lse = attend(x, x, x, Laplace(2), return_lse=True, null_logit=torch.tensor([30.0, -30.0]))
    plain, plain_lse = attend(x, x, x, Laplace(2), return_lse=True)
    torch.testing.assert_close(lse, plain_lse)
    assert float(out[:, 0].abs().max()) < 1e-9
    torch.testing.assert_close(out[:, 1], plain[:, 1])


def test_queries_without_visible_keys_get_zeros() -> None:
    x = some(1, 1, 3, 4).requires_grad_()
    null = NullKey(1)
    hidden = torch.ones(1, 3, dtype=torch.bool)
    out = attend(x, x, x, key_padding_mask=hidden, null_logit=null)
    assert bool((out == 0).all())
    assert all(bool((grad == 0).all()) for grad in torch.autograd.grad(out.sum(), [x, null.logit]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_matches_float64(dtype: torch.dtype) -> None:
    x = some(1, 2, 40, 16, dtype=torch.float32)
    expected = attend(x.to(dtype).double(), x.to(dtype).double(), x.to(dtype).double(), null_logit=torch.ones(2))
    found = attend(x.to(dtype), x.to(dtype), x.to(dtype), null_logit=torch.ones(2))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-2)


def test_compiled_in_one_graph() -> None:
    null, prior = NullKey(2, init=0.3), Laplace(2)
    x = some(1, 2, 20, 8, dtype=torch.float32)

    def call(x: Tensor) -> Tensor:
        return attend(x, x, x, prior, null_logit=null)

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


def test_null_key_matches_add_zero_attn_of_pytorch() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True, add_zero_attn=True)
    ours = PriorAttention(12, 3, batch_first=True, add_zero_attn=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 12)
    expected, weights = theirs(x, x, x)
    out, found = ours(x, x, x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, weights[..., :5])
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], expected)


def test_a_null_key_in_a_layer_learns() -> None:
    null = NullKey(3, init=-1.0)
    layer = PriorAttention(12, 3, null_key=null)
    x = torch.randn(5, 2, 12)
    layer(x, x, x, need_weights=False)[0].square().sum().backward()
    assert null.logit.grad is not None
    assert bool((null.logit.grad != 0).all())
    assert null.to_config() == {"name": "null_key", "num_heads": 3, "init": -1.0, "learn": True}
    layer.bfloat16()
    assert null.logit.dtype == torch.float32


X = torch.randn(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: attend(X, X, X, null_logit=0.5),  # pyright: ignore[reportArgumentType, reportCallIssue]
            "null_logit must be a NullKey or a tensor, got 0.5; pass NullKey",
        ),
        (lambda: attend(X, X, X, null_logit=torch.zeros(3)), r"null_logit must have shape \(2,\) or \(1, 2, 3\)"),
        (
            lambda: attend(X, X, X, null_logit=torch.ones(2).int()),
            "null_logit must be floating point, got torch.int32",
        ),
        (lambda: attend(X, X, X, null_logit=torch.tensor([0.0, torch.inf])), "null_logit must be finite"),
        (
            lambda: attend(X, X, X, null_logit=torch.zeros(2, device="meta")),
            "null_logit is on meta, but query is on cpu",
        ),
        (lambda: apply_null(X, torch.zeros(1, 2, 4), torch.zeros(2)), "lse must have shape"),
        (lambda: NullKey(2, init=torch.inf), "init must be a finite number, got inf"),
        (lambda: NullKey(0), "num_heads must be a positive integer, got 0"),
        (lambda: PriorAttention(4, 2, add_zero_attn=True, null_key=NullKey(2)), "mutually exclusive"),
        (lambda: PriorAttention(4, 2, null_key=NullKey(1)), "null_key has num_heads=1, expected 2"),
    ],
)
def test_invalid_null_logits_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
