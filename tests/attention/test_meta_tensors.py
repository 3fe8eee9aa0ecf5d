"""On meta tensors, ``attend`` returns shapes and dtypes, and computes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention_priors import (
    Axial,
    GeneralizedGaussian,
    KeySink,
    Laplace,
    Prior,
    RelativeBuckets,
    ShawVectors,
    Spectral,
    SSMax,
    Window,
    attend,
    grid_positions,
)
from attention_priors.attention import attend_with_weights
from thoroughness import every_other_deep

B, H, D = 2, 4, 8
PRIORS: dict[str, Callable[[], Prior | None]] = {
    "none": lambda: None,
    "laplace": lambda: Laplace(H),
    "learned laplace": lambda: Laplace(H, learn=True),
    "ggd": lambda: GeneralizedGaussian(H),
    "buckets in a window": lambda: RelativeBuckets(H) + Window(H, 5),
    "spectral": lambda: Spectral(H),
    "sink": lambda: KeySink(H, 8, init="recency"),
    "sink and ggd": lambda: KeySink(H, 8) + GeneralizedGaussian(H),
}


def options_of(num_queries: int, num_keys: int) -> dict[str, dict[str, Any]]:
    slots, padding = torch.arange(num_keys), torch.zeros(B, num_keys, dtype=torch.bool)
    return {
        "": {},
        "padding": {"key_padding_mask": padding},
        "documents": {"document_ids": slots.expand(B, -1)},
        "mask": {"attn_mask": padding[:1].expand(num_queries, -1)},
        "float mask": {"attn_mask": torch.zeros(B, 1, num_queries, num_keys)},
        "positions": {"query_positions": slots[num_keys - num_queries :], "key_positions": slots},
        "scale": {"logit_scale": SSMax(H), "key_padding_mask": padding},
        "counts": {"logit_scale": SSMax(H, include_prior=False), "visible_keys": slots[:num_queries] + 1},
        "tolerance": {"tolerance": 1e-3},
        "dropout": {"dropout_p": 0.1},
        "relative": {"relative": ShawVectors(D)},
    }


LENGTHS_AND_DTYPES = every_other_deep(
    itertools.product([(20, 20), (1, 30), (5, 700)], [torch.float32, torch.bfloat16, torch.float64]),
    [((20, 20), torch.float32), ((1, 30), torch.bfloat16), ((5, 700), torch.float64)],
)


@pytest.mark.parametrize("lengths_and_dtype", LENGTHS_AND_DTYPES, ids=str)
@pytest.mark.parametrize("name", every_other_deep(PRIORS, ["none", "key_sink", "sum"]))
def test_shapes_and_dtypes(name: str, lengths_and_dtype: tuple[tuple[int, int], torch.dtype]) -> None:
    (num_queries, num_keys), dtype = lengths_and_dtype
    made = PRIORS[name]()
    prior = None if made is None else made.to("meta")
    for kind, options in options_of(num_queries, num_keys).items():
        given: dict[str, Any] = {k: x.to("meta") if hasattr(x, "to") else x for k, x in options.items()}
        query = torch.empty(B, H, num_queries, D, device="meta", dtype=dtype)
        key, value = (
            torch.empty(B, 2, num_keys, width, device="meta", dtype=dtype)
            for width in (D, D if kind == "relative" else 6)
        )
        for grad in (False, True):
            query.requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                out = attend(query, key, value, prior, **given)
                both = attend(query, key, value, prior, **given, return_lse=True)
            assert [x.device.type for x in (out, *both)] == ["meta"] * 3
            assert out.shape == both[0].shape == (B, H, num_queries, value.shape[-1])
            assert out.dtype == both[0].dtype == dtype
            assert both[1].shape == (B, H, num_queries)
            assert both[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            if grad:
                out.sum().backward()
                assert query.grad is not None
                assert query.grad.shape == query.shape


@pytest.mark.parametrize("name", ["none", "laplace", "spectral"])
def test_bidirectional_calls_have_shapes(name: str) -> None:
    made = PRIORS[name]()
    prior = None if made is None else made.to("meta")
    x = torch.empty(B, H, 20, D, device="meta")
    assert attend(x, x, x, prior, causal=False).shape == x.shape
    assert attend_with_weights(x, x, x, prior, causal=False)[1].shape == (B, H, 20, 20)


def test_priors_on_grids_have_shapes() -> None:
    prior = Axial(H, {"name": "laplace"}).to("meta")
    places = grid_positions(4, 5).to("meta")
    x = torch.empty(B, H, 20, D, device="meta", requires_grad=True)
    out = attend(x, x, x, prior, causal=False, query_positions=places, key_positions=places)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad is not None


def test_meta_tables_are_not_kept() -> None:
    """A meta table must not serve a later call."""
    prior = Window(H, 5)  # without parameters, it works on every device
    x = torch.randn(B, H, 20, D)
    with torch.no_grad():
        attend(x.to("meta"), x.to("meta"), x.to("meta"), prior)
        torch.testing.assert_close(attend(x, x, x, prior), attend(x, x, x, prior, backend="reference"))
