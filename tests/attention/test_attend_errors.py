"""A wrong argument is a ValueError that names it."""

from typing import Any

import numpy as np
import pytest
import torch

from attention_priors import (
    ClippedOffsets,
    GeneralizedGaussian,
    KeySink,
    Laplace,
    ShawVectors,
    SSMax,
    Window,
    attend,
)
from attention_priors.attention import logit_scale_from_config
from attention_priors.priors import KeySink2d, Spectral2d

B, H, LENGTH, D = 2, 4, 6, 3


def arguments(**changes: Any) -> dict[str, Any]:
    x = torch.randn(B, H, LENGTH, D)
    return {"query": x, "key": x, "value": x} | changes


def shaped(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*size).to(dtype)


LONG = torch.int64
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "query of rank 3": ("query", {"query": shaped(H, LENGTH, D)}),
    "key of rank 3": ("key", {"key": shaped(H, LENGTH, D)}),
    "value of rank 5": ("value", {"value": shaped(1, B, H, LENGTH, D)}),
    "another batch": ("key", {"key": shaped(B + 1, H, LENGTH, D)}),
    "another head_dim": ("key", {"key": shaped(B, H, LENGTH, D + 1)}),
    "heads of key and value": ("value", {"value": shaped(B, 2, LENGTH, D)}),
    "length of key and value": ("value", {"value": shaped(B, H, LENGTH + 1, D)}),
    "H not a multiple": ("query", {"key": shaped(B, 3, LENGTH, D), "value": shaped(B, 3, LENGTH, D)}),
    "more key heads": ("query", {"key": shaped(B, 8, LENGTH, D), "value": shaped(B, 8, LENGTH, D)}),
    "no key heads": ("heads of key", {"key": shaped(B, 0, LENGTH, D), "value": shaped(B, 0, LENGTH, D)}),
    "no queries": ("query", {"query": shaped(B, H, 0, D)}),
    "no keys": ("key", {"key": shaped(B, H, 0, D), "value": shaped(B, H, 0, D)}),
    "dtype of key": ("key", {"key": shaped(B, H, LENGTH, D, dtype=torch.bfloat16)}),
    "dtype of value": ("value", {"value": shaped(B, H, LENGTH, D, dtype=torch.float64)}),
    "integer query": ("query", {"query": shaped(B, H, LENGTH, D, dtype=LONG)}),
    "counts without a scale": ("visible_keys", {"visible_keys": shaped(LENGTH, dtype=LONG)}),
    "float counts": ("visible_keys", {"visible_keys": shaped(LENGTH), "logit_scale": SSMax(H)}),
    "counts of other queries": (
        "visible_keys",
        {"visible_keys": shaped(LENGTH + 1, dtype=LONG), "logit_scale": SSMax(H)},
    ),
    "counts of another batch": (
        "visible_keys",
        {"visible_keys": shaped(3, LENGTH, dtype=LONG), "logit_scale": SSMax(H)},
    ),
    "a number of counts": ("visible_keys", {"visible_keys": torch.tensor(3), "logit_scale": SSMax(H)}),
    "padding shape": ("key_padding_mask", {"key_padding_mask": shaped(B, LENGTH + 1, dtype=torch.bool)}),
    "padding without batch": ("key_padding_mask", {"key_padding_mask": shaped(LENGTH, dtype=torch.bool)}),
    "float padding": ("key_padding_mask", {"key_padding_mask": shaped(B, LENGTH)}),
    "mask shape": ("attn_mask", {"attn_mask": shaped(LENGTH, LENGTH + 1)}),
    "mask of rank 3": ("attn_mask", {"attn_mask": shaped(B, LENGTH, LENGTH)}),
    "mask heads": ("attn_mask", {"attn_mask": shaped(B, 2, LENGTH, LENGTH)}),
    "integer mask": ("attn_mask", {"attn_mask": shaped(LENGTH, LENGTH, dtype=LONG)}),
    "document shape": ("document_ids", {"document_ids": shaped(LENGTH, dtype=LONG)}),
    "float documents": ("document_ids", {"document_ids": shaped(B, LENGTH)}),
    "more queries than documents": (
        "document_ids",
        {"query": shaped(B, H, LENGTH + 1, D), "document_ids": shaped(B, LENGTH, dtype=LONG)},
    ),
    "float positions": ("query_positions", {"query_positions": shaped(LENGTH)}),
    "boolean positions": ("key_positions", {"key_positions": shaped(LENGTH, dtype=torch.bool)}),
    "query positions' length": ("query_positions", {"query_positions": shaped(LENGTH + 1, dtype=LONG)}),
    "key positions' batch": ("key_positions", {"key_positions": shaped(B + 1, LENGTH, dtype=LONG)}),
    "scalar positions": ("key_positions", {"key_positions": torch.tensor(1)}),
    "a grid without places": ("key_positions", {"prior": Spectral2d(H, 2), "causal": False}),
    "a sum on grids without places": ("key_positions", {"prior": Spectral2d(H) + KeySink2d(H, 2, 3), "causal": False}),
    "a NumPy array": ("query must be a tensor", {"query": np.zeros((B, H, LENGTH, D))}),
    "complex numbers": ("query must be of one of", {"query": shaped(B, H, LENGTH, D, dtype=torch.complex64)}),
    "a prior's name": ("prior must be a Prior", {"prior": "laplace"}),
    "a logit scale's name": ("logit_scale must be a module", {"logit_scale": "ssmax"}),
    "a number for vectors": ("relative must be ShawVectors", {"relative": 3}),
    "a word for causal": ("causal must be", {"causal": "yes"}),
    "prior's heads": ("prior", {"prior": Laplace(H + 1)}),
    "sum's heads": ("prior", {"prior": Laplace(2) + Window(2, 3)}),
    "scale's heads": ("logit_scale", {"logit_scale": SSMax(1)}),
    "slope both ways": ("KeySink", {"prior": KeySink(H, 8, init="recency"), "causal": False}),
    "learned slope both ways": ("KeySink", {"prior": KeySink(H, 8, learn="slope"), "causal": False}),
    "slope in a sum": ("KeySink", {"prior": Laplace(H) + KeySink(H, 8, init="recency"), "causal": False}),
    "relative head_dim": ("relative", {"relative": ShawVectors(D + 1)}),
    "relative value dim": ("relative", {"relative": ShawVectors(D), "value": shaped(B, H, LENGTH, D + 1)}),
    "dropout of 1": ("dropout_p", {"dropout_p": 1.0}),
    "negative dropout": ("dropout_p", {"dropout_p": -0.1}),
    "a word for dropout": ("dropout_p", {"dropout_p": "a"}),
    "a list for a mask": ("attn_mask must be a tensor", {"attn_mask": [[True]]}),
    "softmax_scale 0": ("softmax_scale", {"softmax_scale": 0.0}),
    "negative softmax_scale": ("softmax_scale", {"softmax_scale": -1.0}),
    "infinite softmax_scale": ("softmax_scale", {"softmax_scale": float("inf")}),
    "softmax_scale nan": ("softmax_scale", {"softmax_scale": float("nan")}),
    "unknown backend": ("backend", {"backend": "flash"}),
    "lanes of a Generalized Gaussian": ("backend='lanes'", {"backend": "lanes", "prior": GeneralizedGaussian(H)}),
    "lanes of a table": ("backend='lanes'", {"backend": "lanes", "prior": ClippedOffsets(H)}),
    "lanes of a sum": ("backend='lanes'", {"backend": "lanes", "prior": Laplace(H) + Window(H, 3)}),
    "lanes of Laplace, both ways": ("backend='lanes'", {"backend": "lanes", "prior": Laplace(H), "causal": False}),
    "dropout in toeplitz": ("dropout_p", {"backend": "toeplitz", "dropout_p": 0.1}),
    "dropout in lanes": ("dropout_p", {"backend": "lanes", "dropout_p": 0.1}),
    "relative in toeplitz": ("relative", {"backend": "toeplitz", "relative": ShawVectors(D)}),
    "learned mask in toeplitz": (
        "attn_mask",
        {"backend": "toeplitz", "attn_mask": torch.zeros(LENGTH, LENGTH, requires_grad=True)},
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_names_the_argument(case: str) -> None:
    name, changes = BAD[case]
    with pytest.raises(ValueError, match=name):
        attend(**arguments(**changes))


def test_the_good_ones_pass() -> None:
    """What the cases above start from is right."""
    assert attend(**arguments()).shape == (B, H, LENGTH, D)


@pytest.mark.parametrize("prior", [None, Laplace(H), GeneralizedGaussian(H)])
def test_an_empty_batch_has_an_empty_output(prior: Any) -> None:
    empty = shaped(0, H, LENGTH, D).requires_grad_()
    out, lse = attend(empty, empty, empty, prior, return_lse=True)
    assert out.shape == (0, H, LENGTH, D)
    assert lse.shape == (0, H, LENGTH)
    out.sum().backward()


def test_unbroken_arguments_are_not_blamed() -> None:
    """A dimension of 1 in a mask expands, and so does a position without a batch."""
    attend(**arguments(attn_mask=shaped(1, 1, 1, 1)))
    attend(**arguments(query_positions=torch.arange(LENGTH), key_positions=torch.arange(LENGTH).expand(B, -1)))


@pytest.mark.parametrize("config", ["softmax", {"name": "ssmax", "scale": 1}, {"init": 1.0}])
def test_logit_scale_config(config: Any) -> None:
    with pytest.raises(ValueError, match="logit scale"):
        logit_scale_from_config(config, H)


@pytest.mark.parametrize("bad", [{"num_heads": 0}, {"num_heads": 2, "init": float("nan")}])
def test_ssmax_arguments(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="num_heads" if bad["num_heads"] == 0 else "init"):
        SSMax(**bad)
