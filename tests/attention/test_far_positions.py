"""The applied log-prior, computed from the attention weights, at positions up to 2^20.

For every key within 30 nats of the best key of its row, it is within 1e-4 nats of float64. The limit is 1.6e-2 for
outputs in bfloat16 and 1e-2 in float16.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import PRIORS, RANGES, SUMMANDS, Case, examples, prior_descriptions, randomize
from attention_errors import Cotangents, compute, errors, gradient_scales
from attention_oracle import positions_of, visibility_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_priors import (
    GeneralizedGaussian,
    KeySink,
    Laplace,
    Prior,
    ResidualSSMax,
    Spectral,
    SSMax,
    Window,
    attend,
    prior_from_config,
)
from thoroughness import each_once, every_other_deep

pytestmark = pytest.mark.usefixtures("both_ways")

FAR = 2**20
REACH = 30.0
"""Largest distance in nats from the best key of a row at which keys count."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 4 * 2.0**-8, torch.float16: 1e-2}
"""Error of the difference of two weights. A weight in bfloat16 is rounded twice: in its tile, and where tiles are
merged.
"""
FAR_RANGES = RANGES | {"log_slope": (-12.0, 0.5), "theta_mu": (-6.0, 6.0)}
NAMES = [name for name in PRIORS if name != "none"]


# ---- computing log-priors from weights


def applied(case: Case) -> Tensor:
    """Return the scaled log-prior of each pair in float64, ``-inf`` where hidden, ``(B, H, Lq, Lk)``."""
    assert case.prior is not None
    with torch.no_grad():
        visible = visibility_of(case)
        bias = case.prior.log_prior(*positions_of(case), dtype=torch.float64)
        seen = visible & ~torch.isneginf(bias)
        bias = bias.masked_fill(torch.isneginf(bias), 0.0)
        if case.logit_scale is not None and case.logit_scale.include_prior:
            number = visible.sum(-1, keepdim=True).clamp(min=1).double()
            bias = bias * case.logit_scale.s.double()[:, None, None] * number.log()
        return bias.masked_fill(~seen, float("-inf"))


def worst(case: Case, exact: Tensor, content: Tensor, columns: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """Return the largest error of the applied log-prior and of the log-sum-exp, in nats.

    Errors of the log-prior are relative to the best key of each row.

    Args:
        case: Case. Its output at place ``c`` is a multiple of the weight of key ``columns[c]``.
        exact: Result of :func:`applied`.
        content: Scaled products of queries and keys.
        columns: Keys of the read weights.
        dtype: Dtype of the case.
        backend: Backend under test.
    """
    out, lse = case.attend(backend)
    total = content + exact
    right = total.logsumexp(-1)
    # float16 ends at 6e-5. Content lifts keys only if the case has content.
    reach = 9.0 if dtype == torch.float16 and not content.any() else REACH
    read, sums = exact[..., columns], total[..., columns]
    inside = (
        torch.isfinite(read)
        & (read >= exact.amax(-1, keepdim=True) - REACH)
        & (sums >= sums.amax(-1, keepdim=True) - reach)
    )
    found = out.detach().double().log() - content[..., columns]
    difference = torch.where(inside, found - read, 0.0)
    best = torch.where(inside, sums, float("-inf")).argmax(-1, keepdim=True)
    error = torch.where(inside, difference - difference.gather(-1, best), 0.0).abs().amax()
    rounding = 2.0**-22 if dtype != torch.float64 else 2.0**-51
    blind = torch.isneginf(right)
    assert torch.equal(torch.isneginf(lse), blind)
    of_lse = ((lse.detach().double() - right).abs() - rounding * right.abs()).masked_fill(blind, 0.0).amax()
    return torch.maximum(error, of_lse)


def reading(case: Case, dtype: torch.dtype, lifted: bool) -> tuple[Case, Tensor, Tensor]:
    """Return the case with values that show weights. Content lifts all keys to the row's best key, or is zero."""
    batch, kv_heads, number, _ = case.key.shape
    exact = applied(case)
    content = torch.zeros_like(exact)
    if lifted:
        below = exact - exact.amax(-1, keepdim=True).clamp(min=-1e300)
        # Quarters up to 30 are exact in any dtype.
        content = torch.where(below >= -REACH, (-4 * below).round() / 4, 0.0)
    eye = torch.eye(number, dtype=dtype).expand(batch, kv_heads, number, number)
    # One dimension per key: query i's number in it is the content of that pair.
    case = replace(case, query=content.to(dtype), key=eye, value=eye, softmax_scale=1.0)
    return case, exact, content


# ---- random positions and parameters


@st.composite
def far_positions(draw: st.DrawFn, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys."""
    number, queries = draw(st.integers(1, 32)), draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["own", "behind", "clusters", "clusters", "per batch"]))
    start = draw(st.sampled_from([0, FAR // 3, FAR - 1]) | st.integers(0, FAR - 1))
    keys = (start + torch.arange(number)).clamp(max=FAR - 1)
    if start + number > FAR:
        keys = FAR - number + torch.arange(number)
    if kind == "own":
        return keys[-min(queries, number) :], keys
    if kind == "behind":
        ahead = draw(st.integers(0, FAR)) % (FAR - int(keys[-1]))
        first = min(int(keys[-1]) + ahead, FAR - queries)
        return first + torch.arange(queries), keys
    leading = (batch,) if kind == "per batch" else ()
    centres = torch.randint(0, FAR - 40, (*leading, 3), generator=generator)
    place = torch.randint(0, 3, (*leading, number), generator=generator)
    keys = centres.gather(-1, place) + torch.randint(0, 40, place.shape, generator=generator)
    if draw(st.booleans()):
        return torch.randint(0, FAR, (*leading, queries), generator=generator), keys
    own = torch.randint(0, number, (*leading, queries), generator=generator)
    return keys.gather(-1, own), keys


@st.composite
def far_priors(draw: st.DrawFn, name: str, heads: int, causal: bool, generator: torch.Generator) -> Prior:
    """Return the named prior. A Generalized Gaussian's scales reach 2^20; a sink has any training length."""
    names = draw(SUMMANDS) if name == "sum" else [name]
    descriptions = [draw(prior_descriptions(each, causal)) for each in names]
    for description in descriptions:
        if "train_length" in description:
            description["train_length"] = draw(st.sampled_from([8, 200, 2048, 2048]))
    prior = prior_from_config(descriptions if name == "sum" else descriptions[0], heads)
    randomize(prior, generator, FAR_RANGES)
    for term in prior.terms():
        if isinstance(term, GeneralizedGaussian) and draw(st.booleans()):
            with torch.no_grad():
                scale = torch.rand(heads, generator=generator) * math.log(FAR)
                term.theta_alpha.copy_(-term.beta * scale)
    return prior


@pytest.mark.parametrize(("name", "both_ways"), each_once(NAMES, ["in tiles", "in one tile"]), indirect=["both_ways"])
def test_log_priors_at_given_positions_are_exact(name: str) -> None:
    @examples(5, name)
    @given(st.data(), st.integers(0, 999), st.booleans())
    def check(data: st.DataObject, seed: int, causal: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads, kv_heads = data.draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
        batch = data.draw(st.integers(1, 2))
        prior = data.draw(far_priors(name, heads, causal, generator))
        queries, keys = data.draw(far_positions(batch, generator))
        scale = data.draw(st.sampled_from([None, None, SSMax(heads), SSMax(heads, include_prior=False)]))
        if scale is not None:
            with torch.no_grad():
                scale.s.uniform_(-1.5, 1.5, generator=generator)
        empty = torch.zeros(batch, heads, queries.shape[-1], 1)
        shape = torch.zeros(batch, kv_heads, keys.shape[-1], 1)
        case = Case(empty, shape, shape, prior, causal, scale, query_positions=queries, key_positions=keys)
        for dtype, tolerance in TOLERANCE.items():
            read, exact, content = reading(case, dtype, lifted=scale is None)
            for backend in ("reference", *case.backends()):
                columns = torch.arange(keys.shape[-1])
                error = float(worst(read, exact, content, columns, dtype, backend))
                assert error <= tolerance, f"{backend} in {dtype}: {error:.2e}"

    check()


# ---- default positions


def chosen_keys(exact: Tensor, number: int = 12) -> Tensor:
    """Return the best keys of a few rows, the next keys within reach, and the first and last keys."""
    best = exact.topk(min(number, exact.shape[-1]), dim=-1).indices.flatten()
    return torch.cat([best, torch.tensor([0, 1, exact.shape[-1] - 1])]).unique()


@pytest.mark.parametrize(("name", "both_ways"), each_once(NAMES, ["in one tile", "in tiles"]), indirect=["both_ways"])
def test_one_query_with_a_long_cache_is_exact(name: str) -> None:
    @examples(2, name)
    @given(st.data(), st.integers(0, 999), st.sampled_from([0.0, 0.3, -0.05]))
    def check(data: st.DataObject, seed: int, strength: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        prior = data.draw(far_priors(name, 2, True, generator))
        scale = SSMax(2, init=strength) if strength else None
        dtype = data.draw(st.sampled_from(list(TOLERANCE)))
        empty = torch.zeros(1, 2, 1, 1, dtype=dtype)
        key = torch.zeros(1, 1, 2**13, 1, dtype=dtype)
        case = Case(empty, key, key, prior, True, scale)
        exact = applied(case)
        columns = chosen_keys(exact)
        value = torch.zeros(1, 1, 2**13, len(columns), dtype=dtype)
        # Weights of many keys are too small for float16, so content lifts them.
        value[0, 0, columns, torch.arange(len(columns))] = 1024.0
        case = replace(case, value=value)
        for backend in case.backends():
            error = float(worst(case, exact, torch.zeros_like(exact), columns, dtype, backend))
            assert error <= TOLERANCE[dtype], f"{backend} in {dtype}: {error:.2e}"

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generalized_gaussian", "spectral", "key_sink"])
@pytest.mark.parametrize("both_ways", every_other_deep(["in one tile", "in tiles"], ["in one tile"]), indirect=True)
def test_a_cache_of_a_million_keys_is_exact(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    prior: Prior = {
        "generalized_gaussian": GeneralizedGaussian(1, init="laplace", learn=True) + Window(1, FAR - 5),
        "spectral": Spectral(1, num_frequencies=2),
        "key_sink": KeySink(1, 2048, num_frequencies=1, hidden_size=4, init="recency"),
    }[name]
    if name != "generalized_gaussian":
        randomize(prior, generator)
    key = torch.zeros(1, 1, FAR, 1)
    case = Case(key[:, :, :1], key, key, prior)
    exact = applied(case)
    columns = chosen_keys(exact)
    value = torch.zeros(1, 1, FAR, len(columns))
    value[0, 0, columns, torch.arange(len(columns))] = 1.0
    case = replace(case, value=value)
    assert float(worst(case, exact, torch.zeros_like(exact), columns, torch.float32, "auto")) <= 1e-4


def sloped(slope: float, heads: int = 1) -> KeySink:
    prior = KeySink(heads, 2048, init="recency")
    with torch.no_grad():
        prior.slope.fill_(slope)
        prior.gain.fill_(0.5)
    return prior


PREFILL: dict[str, tuple[Prior, float]] = {
    "sink with a slope": (sloped(1.7), 0.0),
    "sink with a falling slope": (sloped(-1.7), 0.0),
    "sink with a slope, laplace": (sloped(0.9) + Laplace(1, slopes=[1.37]), 0.0),
    "negative logit scale": (Laplace(1, slopes=[0.87]), -0.5),
    "negative logit scale, window": (Laplace(1, slopes=[2.1]) + Window(1, 400), -0.5),
    "logit scale": (Laplace(1, slopes=[1.37]) + sloped(1.3), 0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "both_ways"), each_once(PREFILL, ["in tiles", "in one tile"]), indirect=["both_ways"])
def test_prefill_is_exact(name: str) -> None:
    """Rows at the start, in the middle and at the end of one call. Linear parts are large at one end or the other."""
    prior, strength = PREFILL[name]
    length, rows = 1500, torch.tensor([1, 40, 700, 1040, 1499])
    key = torch.zeros(1, 1, length, 1)
    case = Case(key, key, key, prior, True, SSMax(1, init=strength) if strength else None)
    exact = applied(case)[:, :, rows]
    columns = chosen_keys(exact)
    value = torch.zeros(1, 1, length, len(columns))
    value[0, 0, columns, torch.arange(len(columns))] = 1.0
    case = replace(case, value=value)
    for backend in case.backends():
        out, lse = case.attend(backend)
        some: Any = mock.Mock(attend=lambda _, out=out, lse=lse: (out[:, :, rows], lse[:, :, rows]))
        error = float(worst(some, exact, torch.zeros_like(exact), columns, torch.float32, backend))
        assert error <= 1e-4, f"{backend}: {error:.2e}"


def test_a_logit_scale_of_both_signs_is_exact() -> None:
    """The scale falls with the number of keys, from 1 for one key, through 0."""
    length, generator = 100_000, torch.Generator().manual_seed(0)
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, :-1] = True
    query, key, value = (torch.randn(2, 1, n, 8, generator=generator) for n in (1, length, length))
    prior, scale = Laplace(1, slopes=[0.5]), ResidualSSMax(1, init=-0.12)
    with torch.no_grad():
        options: dict[str, Any] = {"logit_scale": scale, "key_padding_mask": padding}
        found = attend(query, key, value, prior, **options)
        expected = attend(query.double(), key.double(), value.double(), prior, backend="reference", **options)
    assert float((found - expected).abs().max()) < 5e-6


# ---- gradients with subtracted constants


RECENTRED: dict[str, tuple[Prior, dict[str, Any]]] = {
    "far keys": (Laplace(2, learn=True), {"query_positions": torch.arange(50) + FAR - 50}),
    "far keys, bidirectional": (
        GeneralizedGaussian(2, init="laplace", learn=True),
        {"query_positions": torch.arange(50) + 9000, "causal": False},
    ),
    "negative logit scale": (
        Laplace(2, slopes=[3.0, 40.0], learn=True) + Spectral(2),
        {"logit_scale": SSMax(2, init=-0.9)},
    ),
    "one head of each sign": (Laplace(2, slopes=[3.0, 40.0], learn=True), {"logit_scale": SSMax(2)}),
    "falling slope": (sloped(-20.0, 2), {}),
    "steep gaussian, negative logit scale": (
        GeneralizedGaussian(2, init="laplace", learn=True) + sloped(0.1, 2),
        {"logit_scale": SSMax(2, init=-9.0)},
    ),
    "two clusters": (
        Laplace(2, learn=True),
        {
            "query_positions": torch.arange(50) + FAR // 2 * (torch.arange(50) % 2),
            "key_positions": torch.arange(60) + FAR // 4 * (torch.arange(60) % 2),
            "causal": False,
        },
    ),
    "a sink far beyond its training length": (
        KeySink(2, 8) + Spectral(2),
        {"query_positions": torch.arange(50) + FAR - 50, "key_positions": torch.arange(60) + FAR - 60},
    ),
    "padding": (
        Laplace(2, slopes=[3.0, 40.0], learn=True),
        {"logit_scale": SSMax(2, init=-0.9), "key_padding_mask": torch.arange(60).unsqueeze(0) < 7},
    ),
    "logit scale that changes its sign": (
        Laplace(2, slopes=[3.0, 40.0], learn=True) + Spectral(2),
        {"logit_scale": ResidualSSMax(2, init=-0.3)},
    ),
    "documents": (
        Laplace(2, slopes=[30.0, 40.0], learn=True),
        {"logit_scale": SSMax(2, init=-0.9), "document_ids": torch.arange(60).unsqueeze(0) // 25},
    ),
}


@pytest.mark.parametrize("name", RECENTRED)
def test_gradients_are_exact(name: str) -> None:
    prior, options = deepcopy(RECENTRED[name])
    generator = torch.Generator().manual_seed(0)
    for term in prior.terms():
        if isinstance(term, KeySink):
            slope = float(term.slope.detach()[0])
            randomize(term, generator, {"slope": (slope, slope + 1e-3)})
        elif isinstance(term, Spectral):
            randomize(term, generator, {})
    if name == "one head of each sign":
        with torch.no_grad():
            options["logit_scale"].s.copy_(torch.tensor([0.7, -0.9]))
    query, key, value = (torch.randn(1, h, n, 6, generator=generator) for h, n in ((2, 50), (1, 60), (1, 60)))
    case = Case(query, key, value, prior, **options)
    expected = compute(case.to(torch.float64), "reference")
    cotangents = Cotangents.of(expected.out, expected.lse)
    scales = gradient_scales(case, cotangents)
    for backend in case.backends():
        found = errors(compute(case, backend, cotangents), expected, scales)
        for part, error in found.items():
            assert error <= 3e-5, f"{part} of {backend}: {error:.2e}"
