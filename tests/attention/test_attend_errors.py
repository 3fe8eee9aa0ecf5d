"""Every wrong argument raises a ValueError that names the argument."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from attention_priors import (
    ClippedOffsets,
    GeneralizedGaussian,
    KeySink,
    Laplace,
    Prior,
    ShawVectors,
    Spectral,
    SSMax,
    Window,
    attend,
)
from attention_priors.attention import logit_scale_from_config
from attention_priors.priors import KeySink2d, Lanes, Spectral2d, Structure

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
    "a count of 0": ("visible_keys", {"visible_keys": shaped(LENGTH, dtype=LONG), "logit_scale": SSMax(H)}),
    "a negative count": (
        "visible_keys must be at least 1, got -2",
        {"visible_keys": torch.arange(-2, LENGTH - 2).expand(B, -1), "logit_scale": SSMax(H)},
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
    "complex numbers": (
        "query must have dtype torch.float16",
        {"query": shaped(B, H, LENGTH, D, dtype=torch.complex64)},
    ),
    "a prior's name": (r"prior_from_config\('laplace', num_heads=...\)", {"prior": "laplace"}),
    "a prior's description": (r"prior_from_config\(\{'name': 'laplace'\}", {"prior": {"name": "laplace"}}),
    "a prior's class": (r"the class Laplace; build a prior .* Laplace\(num_heads\)", {"prior": Laplace}),
    "another module with heads": ("got MultiheadAttention;", {"prior": torch.nn.MultiheadAttention(H, H)}),
    "a logit scale for a prior": ("SSMax.* pass it as logit_scale=", {"prior": SSMax(H)}),
    "a logit scale's name": ("logit_scale must be a module", {"logit_scale": "ssmax"}),
    "a prior for a logit scale": ("Laplace.* pass it as prior=", {"logit_scale": Laplace(H)}),
    "a prior elsewhere": (
        r"Laplace is on meta, but query and key are on cpu; call prior.to\('cpu'\)",
        {"prior": Laplace(H).to("meta")},
    ),
    "a prior in lanes elsewhere": ("Spectral is on meta", {"prior": Spectral(H).to("meta"), "backend": "lanes"}),
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
    "NumPy's nan": ("softmax_scale", {"softmax_scale": np.float32("nan")}),
    "softmax_scales": ("softmax_scale", {"softmax_scale": np.ones(1)}),
    "a tensor of a softmax_scale": ("softmax_scale.* multiply query", {"softmax_scale": torch.tensor(0.1)}),
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


def test_valid_arguments_pass() -> None:
    """The cases above start from valid arguments."""
    assert attend(**arguments()).shape == (B, H, LENGTH, D)


@pytest.mark.parametrize("prior", [None, Laplace(H), GeneralizedGaussian(H)])
def test_an_empty_batch_has_an_empty_output(prior: Any) -> None:
    empty = shaped(0, H, LENGTH, D).requires_grad_()
    out, lse = attend(empty, empty, empty, prior, return_lse=True)
    assert out.shape == (0, H, LENGTH, D)
    assert lse.shape == (0, H, LENGTH)
    out.sum().backward()


def test_arguments_that_broadcast_pass() -> None:
    """A mask dimension of 1 and positions without a batch dimension broadcast."""
    attend(**arguments(attn_mask=shaped(1, 1, 1, 1)))
    attend(**arguments(query_positions=torch.arange(LENGTH), key_positions=torch.arange(LENGTH).expand(B, -1)))


@pytest.mark.parametrize("scale", [np.float32(0.25), np.float64(0.25), np.array(0.25), Fraction(1, 4)])
def test_softmax_scale_is_any_real_number(scale: Any) -> None:
    given = arguments()
    assert torch.equal(attend(**given, softmax_scale=scale), attend(**given, softmax_scale=0.25))
    whole: Any = np.int64(1)
    assert torch.equal(attend(**given, softmax_scale=whole), attend(**given, softmax_scale=1))


def test_jit_traces_are_refused() -> None:
    x = torch.randn(B, H, LENGTH, D)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace.* use torch\.compile or torch\.export"):
        torch.jit.trace(lambda query: attend(query, query, query), (x,))


# ---- custom priors


class Own(Prior):
    """Prior that returns a given tensor."""

    name = "own"

    def __init__(self, structure: Structure, make: Any) -> None:
        super().__init__(H)
        self.structure = structure
        self.make = make
        self.height = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def log_prior_at(self, distance: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
        numbers = self.make(distance)
        return numbers + self.height.to(dtype) if isinstance(numbers, torch.Tensor) else numbers

    def lanes(
        self, query_positions: torch.Tensor, key_positions: torch.Tensor, *, dtype: torch.dtype = torch.float32
    ) -> Any:
        return self.make(query_positions, key_positions, dtype)


def table(distance: torch.Tensor) -> torch.Tensor:
    return (-0.1 * distance.abs()).expand(H, *distance.shape)


def lanes(query_positions: torch.Tensor, key_positions: torch.Tensor, dtype: torch.dtype) -> Lanes:
    features = query_positions.sin().to(dtype)[..., None, :, None].expand(*query_positions.shape[:-1], H, -1, 2)
    return Lanes(features, torch.stack([key_positions.cos(), key_positions.sin()], -1).to(dtype))


BAD_TABLES: dict[str, tuple[str, Any]] = {
    "without heads": (r"result of Own.log_prior_at .* \(4, .* got shape \([^4]", lambda d: table(d)[0]),
    "of one head": (r"got shape \(1, ", lambda d: table(d)[:1]),
    "of a number": (r"got shape \(4,\)", lambda d: torch.zeros(H)),
    "nothing": ("got NoneType", lambda d: None),
    "NaN at a short distance": (r"Own.log_prior_at returned nan at distance", lambda d: table(d) + (d - 2.5).log()),
    "minus infinity": (
        "returned -inf at distance 3; a log-prior must be finite.* visible_at",
        lambda d: table(d).masked_fill(d == 3, float("-inf")),
    ),
}
BAD_LANES: dict[str, tuple[str, Any]] = {
    "without heads": ("query of Own.lanes", lambda *x: lanes(*x)._replace(query=lanes(*x).query[..., 0, :, :])),
    "keys for each head": ("key of Own.lanes", lambda *x: lanes(*x)._replace(key=lanes(*x).key.unsqueeze(-3))),
    "another width": ("query of Own.lanes", lambda *x: lanes(*x)._replace(query=lanes(*x).query[..., :1])),
    "a tuple": ("Own.lanes must return Lanes, got tuple", lambda *x: tuple(lanes(*x))),
    "NaN": ("key of Own.lanes must be finite", lambda *x: lanes(*x)._replace(key=lanes(*x).key / 0)),
}


@pytest.mark.parametrize("backend", ["auto", "toeplitz", "blockwise", "reference"])
@pytest.mark.parametrize("case", BAD_TABLES)
def test_tables_of_custom_priors_are_checked(case: str, backend: Any) -> None:
    message, make = BAD_TABLES[case]
    with pytest.raises(ValueError, match=message):
        attend(**arguments(prior=Own(Structure.STATIONARY, make), backend=backend))
    with pytest.raises(ValueError, match=message), torch.no_grad():
        attend(**arguments(prior=Own(Structure.STATIONARY, make), backend=backend))


@pytest.mark.parametrize("backend", ["auto", "lanes", "reference"])
@pytest.mark.parametrize("case", BAD_LANES)
def test_lanes_of_custom_priors_are_checked(case: str, backend: Any) -> None:
    message, make = BAD_LANES[case]
    with pytest.raises(ValueError, match=message):
        attend(**arguments(prior=Own(Structure.FACTORED, make), backend=backend))


@pytest.mark.parametrize("backend", ["auto", "toeplitz", "reference"])
def test_valid_custom_priors_pass(backend: Any) -> None:
    attend(**arguments(prior=Own(Structure.FACTORED, lanes), backend=backend))
    # The terms are finite, but their sum is not.
    steep = Own(Structure.STATIONARY, lambda d: table(d).masked_fill(d == 3, torch.finfo(torch.float32).min))
    assert attend(**arguments(prior=steep, backend=backend)).isfinite().all()


def test_a_table_of_another_dtype_is_cast() -> None:
    """In tiles, PyTorch's kernel accepts a bias only in the dtype of the queries."""
    x = torch.randn(1, H, 300, D)
    prior = Own(Structure.STATIONARY, lambda d: table(d).double())
    found, expected = (attend(x, x, x, prior, backend=backend) for backend in ("toeplitz", "reference"))
    torch.testing.assert_close(found, expected)


def test_diverged_parameters_do_not_blame_the_prior() -> None:
    prior = Own(Structure.STATIONARY, table)
    prior.height.fill_(float("nan"))
    assert attend(**arguments(prior=prior)).isnan().all()


@pytest.mark.parametrize("config", ["softmax", {"name": "ssmax", "scale": 1}, {"init": 1.0}])
def test_logit_scale_configs_are_checked(config: Any) -> None:
    with pytest.raises(ValueError, match="logit scale"):
        logit_scale_from_config(config, H)


@pytest.mark.parametrize("bad", [{"num_heads": 0}, {"num_heads": 2, "init": float("nan")}])
def test_ssmax_arguments_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="num_heads" if bad["num_heads"] == 0 else "init"):
        SSMax(**bad)
