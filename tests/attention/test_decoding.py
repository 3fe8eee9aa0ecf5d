"""Decoding steps whose log-prior is cached: they skip the checked problem and the plan."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import PRIORS, examples, priors
from hypothesis import given
from hypothesis import strategies as st

from attention_priors import GeneralizedGaussian, Laplace, Prior, ResidualSSMax, SSMax, Window, attend
from attention_priors.attention.observe import observed

STATIONARY = [name for name in PRIORS if name not in ("none", "axial", "fire", "key_sink", "sum", "uniform", "window")]
TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-10}


@contextmanager
def general_path() -> Iterator[list[bool]]:
    """Record the calls that need a checked problem."""
    calls: list[bool] = []

    def note(*inputs: Any, **options: Any) -> Any:
        calls.append(True)
        return make_problem(*inputs, **options)

    dispatch: Any = inspect.getmodule(attend)
    make_problem = dispatch.make_problem
    with mock.patch.object(dispatch, "make_problem", note):
        yield calls


def inputs(
    keys: int = 50, batch: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (
        torch.randn(batch, *size, generator=generator, dtype=dtype) for size in ((4, 1, 8), (2, keys, 8), (2, keys, 8))
    )
    return query, key, value


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", STATIONARY)
def test_steps_match_the_reference(name: str, dtype: torch.dtype) -> None:
    fast: list[bool] = []

    @examples(6, name)
    @given(st.data())
    @torch.no_grad()
    def check(data: st.DataObject) -> None:
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        prior = data.draw(priors(name, 4, True, generator))
        scale = None
        if data.draw(st.booleans()):
            scale = data.draw(st.sampled_from([SSMax, ResidualSSMax]))(4, include_prior=data.draw(st.booleans()))
            scale.s.uniform_(0.1, 1, generator=generator)
        options: dict[str, Any] = {"logit_scale": scale, "softmax_scale": data.draw(st.sampled_from([None, 0.3]))}
        first, batch = data.draw(st.integers(64, 300)), data.draw(st.integers(1, 3))
        for keys in range(first, first + 4):
            given = inputs(keys, batch, dtype)
            with general_path() as calls:
                found = attend(*given, prior, **options)
            fast.append(not calls)
            query, key, value = (x.double() for x in given)
            expected = attend(query, key, value, prior, **options, backend="reference")
            torch.testing.assert_close(found, expected.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    check()
    assert sum(fast) > len(fast) / 3, "hardly ever taken"


@pytest.mark.parametrize("number", [0, 1, 7, 8, 9, 10**6])
@pytest.mark.parametrize("scale", [SSMax(3), ResidualSSMax(3), ResidualSSMax(3, train_length=8)], ids=repr)
def test_logit_scales_of_an_integer_equal_those_of_a_tensor(scale: SSMax, number: int) -> None:
    with torch.no_grad():
        scale.s.copy_(torch.tensor([-0.5, 0.0, 1.5]))
    for dtype in TOLERANCE:
        expected = scale(torch.tensor([[number]]), dtype)
        # The scale may be a small difference of numbers near 1.
        torch.testing.assert_close(
            scale(number, dtype), expected, rtol=TOLERANCE[dtype] / 30, atol=TOLERANCE[dtype] / 30
        )


def cached(prior: Prior) -> Prior:
    """Return the prior after two steps, which cache its table."""
    with torch.no_grad():
        for keys in (49, 50):
            attend(*inputs(keys), prior)
    return prior


def test_a_changed_prior_is_noticed() -> None:
    prior = GeneralizedGaussian(4, init="spread")
    cached(prior)
    with torch.no_grad(), general_path() as calls:
        attend(*inputs(), prior)
        assert not calls
        prior.theta_beta.data.add_(0.5)
        found = attend(*inputs(), prior)
        assert calls
        torch.testing.assert_close(found, attend(*inputs(), prior, backend="reference"))


@pytest.mark.parametrize(
    "options",
    [
        {"key_padding_mask": torch.arange(50).expand(2, -1) < 7},
        {"attn_mask": torch.arange(50).expand(1, 1, 1, -1) < 7},
        {"document_ids": (torch.arange(50) // 20).expand(2, -1)},
        {"query_positions": torch.tensor([60])},
        {"key_positions": 2 * torch.arange(50)},
        {"key_bias": torch.linspace(0, 3, 100).view(2, 1, 50).expand(2, 4, 50)},
        {"null_logit": torch.zeros(4)},
        {"causal": False},
        {"visible_keys": torch.tensor([80]), "logit_scale": SSMax(4)},
        {"dropout_p": 0.5},
        {"return_lse": True},
        {"backend": "blockwise"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_any_other_option_uses_the_general_path(options: dict[str, Any]) -> None:
    prior = cached(Laplace(4))
    with torch.no_grad(), general_path() as calls:
        found = attend(*inputs(), prior, **options)
        assert calls
        if "dropout_p" not in options:
            general: dict[str, Any] = options | {"backend": "reference"}
            expected = attend(*inputs(), prior, **general)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_steps_without_key_bounds_ignore_a_tolerance() -> None:
    prior = cached(Laplace(4))
    with torch.no_grad(), general_path() as calls:
        found = attend(*inputs(), prior, tolerance=1e-9)
        assert not calls
        torch.testing.assert_close(found, attend(*inputs(), prior, backend="reference"), rtol=1e-5, atol=1e-5)


def test_logit_scales_of_ones_own_need_not_take_an_integer() -> None:
    class Root(SSMax):
        def forward(self, visible_keys: torch.Tensor | int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            assert isinstance(visible_keys, torch.Tensor)
            return self.s.to(dtype).unsqueeze(-1) * visible_keys.to(dtype).sqrt()

    prior = cached(Laplace(4))
    with torch.no_grad():
        found = attend(*inputs(), prior, logit_scale=Root(4))
        expected = attend(*inputs(), prior, logit_scale=Root(4), backend="reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_observers_and_gradients_use_the_general_path() -> None:
    prior = cached(Laplace(4))
    seen: list[object] = []
    with torch.no_grad(), observed(seen.append):
        attend(*inputs(), prior)
    assert len(seen) == 1
    query, key, value = inputs()
    attend(query.requires_grad_(), key, value, prior).sum().backward()
    assert query.grad is not None


def test_a_window_still_hides_keys() -> None:
    with torch.no_grad():
        prior = cached(Window(4, 9))
        found = attend(*inputs(), prior)
        expected = attend(*inputs(), prior, backend="reference")
    torch.testing.assert_close(found, expected)


def test_log_priors_far_from_0_are_computed_exactly() -> None:
    prior = cached(Laplace(4, slopes=[1.0] * 4))
    scale = SSMax(4, init=-20.0)  # prefers the farthest key
    query, key, value = inputs()
    with torch.no_grad():
        found = attend(query, key, value, prior, logit_scale=scale)
        exact = attend(query.double(), key.double(), value.double(), prior, logit_scale=scale, backend="reference")
    torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda query, key, value: (query[:1], key, value), "batch"),
        (lambda query, key, value: (query[:, :2], key, value), "num_heads"),
        (lambda query, key, value: (query, key[..., :7], value), "head_dim"),
        (lambda query, key, value: (query, key, value[:, :, 1:]), "length"),
        (lambda query, key, value: (query, key.double(), value), "dtype"),
        (lambda query, key, value: (query, key[:, :, :0], value[:, :, :0]), "empty"),
    ],
)
def test_wrong_inputs_are_refused(wrong: Any, message: str) -> None:
    prior = cached(Laplace(4))
    query, key, value = wrong(*inputs())
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        attend(query, key, value, prior)


@pytest.mark.parametrize("softmax_scale", [0.0, -1.0, float("nan"), True, "1"])
def test_a_wrong_softmax_scale_is_refused(softmax_scale: Any) -> None:
    prior = cached(Laplace(4))
    with torch.no_grad(), pytest.raises(ValueError, match="softmax_scale"):
        attend(*inputs(), prior, softmax_scale=softmax_scale)
