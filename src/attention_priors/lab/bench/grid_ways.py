"""Contenders over a square grid of patches: attention in both directions, and a prior over rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_priors.attention import attend
from attention_priors.lab.bench.case import Case, Inputs
from attention_priors.lab.bench.way import CannotRunError, Need, Prepared, Way, learned, output_shape
from attention_priors.priors import Axial, Prior, Radial, Spectral2d, grid_positions

MakePrior = Callable[[int], Prior]


def _gaussian(heads: int) -> Prior:
    return Axial(heads, {"name": "generalized_gaussian", "init": "spread", "learn": True})


def _spectral(heads: int) -> Prior:
    return Spectral2d(heads, init="recency")


def _radial(heads: int) -> Prior:
    return Radial(heads, {"name": "generalized_gaussian", "init": "spread"})


def _positions(case: Case) -> Tensor:
    side = isqrt(case.length)
    if case.passing == "decode":
        raise CannotRunError("a grid is read at once: there is nothing to decode")
    if side * side != case.length:
        raise CannotRunError(f"{case.length} patches are no square")
    return grid_positions(side, side, device=case.device)


def _expected(inputs: Inputs, positions: Tensor, prior: Prior | None) -> Callable[[slice], Tensor]:
    """Rows of the dense formula in float64."""

    def rows(some: slice) -> Tensor:
        with torch.no_grad():
            return attend(
                inputs.query[:, :, some].double(),
                inputs.key.double(),
                inputs.value.double(),
                prior,
                causal=False,
                query_positions=positions[some],
                key_positions=positions,
                backend="reference",
            )

    return rows


def _plain(case: Case, inputs: Inputs) -> Prepared:
    positions = _positions(case)

    def run() -> Tensor:
        return scaled_dot_product_attention(inputs.query, inputs.key, inputs.value)

    leaves = (inputs.query, inputs.key, inputs.value)
    return Prepared(run, leaves, _expected(inputs, positions, None), output_shape(inputs))


def _attend(make_prior: MakePrior) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        positions = _positions(case)
        torch.manual_seed(case.seed)
        prior = make_prior(case.heads).to(case.device)

        def run() -> Tensor:
            return attend(
                inputs.query,
                inputs.key,
                inputs.value,
                prior,
                causal=False,
                query_positions=positions,
                key_positions=positions,
            )

        leaves = (inputs.query, inputs.key, inputs.value, *learned(prior))
        return Prepared(run, leaves, _expected(inputs, positions, prior), output_shape(inputs))

    return prepare


def _dense(make_prior: MakePrior) -> Callable[[Case, Inputs], Prepared]:
    """The whole bias, made in each pass, as its parameters learn."""

    def prepare(case: Case, inputs: Inputs) -> Prepared:
        positions = _positions(case)
        torch.manual_seed(case.seed)
        prior = make_prior(case.heads).to(case.device)

        def run() -> Tensor:
            bias = prior.log_prior(positions, positions, case.dtype)
            return scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, attn_mask=bias)

        leaves = (inputs.query, inputs.key, inputs.value, *learned(prior))
        return Prepared(run, leaves, _expected(inputs, positions, prior), output_shape(inputs))

    return prepare


def _dense_need(case: Case) -> Need:
    # In float64, row and column apart, and what its gradient keeps of them.
    return Need(0, round(case.bias_bytes * (30 if case.backward else 13)))


GRID_WAYS: tuple[Way, ...] = (
    Way(
        "grid-plain",
        "plain attention over patches",
        "limit",
        "scaled_dot_product_attention in both directions, without a prior",
        _plain,
        baseline="grid-plain",
    ),
    Way(
        "grid-ggd",
        "attend, GGD on both axes",
        "ours",
        "attend() with Axial over learned generalized Gaussians, from the grid's positions",
        _attend(_gaussian),
        baseline="grid-plain",
    ),
    Way(
        "grid-radial",
        "attend, GGD of the distance",
        "ours",
        "attend() with Radial over a learned generalized Gaussian",
        _attend(_radial),
        baseline="grid-plain",
    ),
    Way(
        "grid-spectral",
        "attend, Spectral2d",
        "ours",
        "attend() with GOAT's prior for images, in lanes",
        _attend(_spectral),
        baseline="grid-plain",
    ),
    Way(
        "grid-bias-ggd",
        "SDPA, dense GGD bias of a grid",
        "others",
        "scaled_dot_product_attention, attn_mask=bias; the bias is computed in each pass, as its parameters learn",
        _dense(_gaussian),
        need=_dense_need,
        baseline="grid-plain",
        counterpart="grid-ggd",
    ),
)
