"""Regression tests of counts, log-sum-exps and precision in corner cases."""

from typing import Any

import pytest
import torch

from attention_priors import KeySink, Laplace, SSMax, attend
from attention_priors.attention.geometry import Geometry

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.mark.parametrize(
    "extra",
    [
        {"query_positions": torch.arange(9) * 2, "key_positions": torch.arange(9) * 2},
        {"attn_mask": torch.zeros(1, 9)},
    ],
    ids=["positions", "mask"],
)
def test_ssmax_counts_keys_under_a_shared_mask(extra: dict[str, Any]):
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, :2] = True
    torch.manual_seed(0)
    x = torch.randn(2, 2, 9, 4, dtype=torch.float64, requires_grad=True)
    scale, prior = SSMax(2), Laplace(2, learn=True)
    grads = []
    for backend in ("reference", "toeplitz"):
        options: dict[str, Any] = {"causal": False, "key_padding_mask": padding, "logit_scale": scale}
        out = attend(x, x, x, prior, backend=backend, **options, **extra)
        grads.append(torch.autograd.grad(out.square().sum(), [x, scale.s, prior.log_slope]))
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_texts_with_different_padding_share_parts(kv_heads: int):
    """Each tile then holds one text, and each part several."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, n, 200, 8, requires_grad=True) for n in (4, kv_heads, kv_heads)]
    padding = torch.zeros(2, 200, dtype=torch.bool)
    padding[0, :60] = True
    padding[1, -50:] = True
    grads = []
    for backend in ("reference", "toeplitz"):
        query, key, value = inputs
        out = attend(query, key, value, Laplace(4), key_padding_mask=padding, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), inputs))
    torch.testing.assert_close(grads[1], grads[0])


def test_ssmax_counts_keys_of_more_rows_than_a_block():
    x = torch.randn(1, 2, 300, 4)
    options: dict[str, Any] = {"causal": False, "logit_scale": SSMax(2), "attn_mask": torch.zeros(1, 300)}
    torch.testing.assert_close(
        attend(x, x, x, Laplace(2), **options), attend(x, x, x, Laplace(2), backend="reference", **options)
    )


def test_a_slice_of_rows_counts_as_in_the_whole():
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 2:5] = True
    whole = Geometry(2, 1, 7, 9, padding.device, True, key_padding_mask=padding)
    middle = whole.rows(slice(3, 6))
    assert middle.num_queries == 3
    torch.testing.assert_close(middle.visible_keys, whole.visible_keys[..., 3:6])


@pytest.mark.parametrize("prior", [Laplace(2, learn=True), KeySink(2, 8, init="recency")], ids=["laplace", "key_sink"])
def test_the_lse_of_a_row_without_visible_keys_has_no_gradient(prior: Any):
    x = torch.randn(1, 2, 4, 3)
    _, lse = attend(
        x,
        x,
        x,
        prior,
        key_padding_mask=torch.ones(1, 4, dtype=torch.bool),
        query_positions=torch.arange(1, 5),
        return_lse=True,
        backend="toeplitz",
    )
    assert (lse == float("-inf")).all()
    slope = prior.slope if isinstance(prior, KeySink) else prior.log_slope
    (grad,) = torch.autograd.grad(lse, slope, torch.ones_like(lse))
    assert (grad == 0).all()


def test_a_backward_pass_inside_autocast_is_as_exact_as_outside():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 40, 8).bfloat16()
    grads = []
    for inside in (True, False):
        prior = Laplace(2, learn=True)
        loss = attend(x, x, x, prior).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        grads.append(prior.log_slope.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_documents_with_far_apart_positions_are_exact(dtype: torch.dtype) -> None:
    """Positions as in a shard of a packed sequence whose first document began long before."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 9, 4, dtype=dtype)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
    positions = torch.tensor([70, 71, 72, 0, 1, 2, 3, 20, 21])
    prior = Laplace(2) + KeySink(2, train_length=8)
    options: dict[str, Any] = {"document_ids": documents, "query_positions": positions, "key_positions": positions}
    with torch.no_grad():
        expected = attend(query, key, value, prior, **options, backend="reference")
        for backend in ("auto", "toeplitz"):
            out = attend(query, key, value, prior, backend=backend, **options)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
