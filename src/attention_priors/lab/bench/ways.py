"""The contenders: attention without a prior, this library, the dense formulas, and other people's code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_priors.attention import KeyBounds, SSMax, attend
from attention_priors.lab.bench import peers
from attention_priors.lab.bench.case import Case, Inputs, make_inputs
from attention_priors.lab.bench.grid_ways import GRID_WAYS
from attention_priors.lab.bench.way import CannotRunError, Need, Prepared, Way, expected_rows, learned, output_shape
from attention_priors.priors import (
    GeneralizedGaussian,
    KeySink,
    Laplace,
    Prior,
    RelativeBuckets,
    Spectral,
    Window,
    alibi_slopes,
)
from attention_priors.priors.generalized_gaussian import EPSILON

TOLERANCE = 1e-6
"""Of pruned attention: which share of its weight a query may lose."""
WINDOW = 1024
"""Tokens that the window shows."""
TRAIN_LENGTH = 2048
"""What the key sink's features are scaled with."""


# ---- the limit


def _plain(case: Case, inputs: Inputs) -> Prepared:
    def run() -> Tensor:
        # A single query is the last one and sees every key.
        return scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, is_causal=case.passing != "decode")

    leaves = (inputs.query, inputs.key, inputs.value)
    return Prepared(run, leaves, expected_rows(case, inputs), output_shape(inputs))


def widened(head_dim: int) -> int:
    """The head dimension with the lanes of GOAT's prior, rounded up to a multiple of 8, as ``attend()`` does."""
    prior = _goat(1, torch.device("cpu"))
    one = torch.zeros(1, dtype=torch.int64)
    lanes = sum(term.lanes(one, one).key.shape[-1] for term in prior.terms())
    return -(-(head_dim + lanes) // 8) * 8


def _plain_wide(case: Case, inputs: Inputs) -> Prepared:
    return _plain(case, make_inputs(case, widened(case.head_dim)))


# ---- this library


def _laplace(heads: int, device: torch.device) -> Prior:
    return Laplace(heads).to(device)


def _local(heads: int, device: torch.device) -> Prior:
    """The steeper half of ALiBi's slopes, each twice."""
    slopes = alibi_slopes(heads).tolist()
    return Laplace(heads, slopes=[slopes[h // 2] for h in range(heads)]).to(device)


def _gaussian(heads: int, device: torch.device) -> GeneralizedGaussian:
    return GeneralizedGaussian(heads, init="spread", learn=True).to(device)


def _buckets(heads: int, device: torch.device) -> Prior:
    return RelativeBuckets(heads, init="normal").to(device)


def _window(heads: int, device: torch.device) -> Prior:
    return Window(heads, WINDOW).to(device)


def _goat(heads: int, device: torch.device) -> Prior:
    sink = KeySink(heads, TRAIN_LENGTH, init="recency")
    with torch.no_grad():
        # Both start at 0, where nobody would see whether they are computed.
        sink.gain.fill_(1.0)
        sink.bump.fill_(1.0)
    return (Spectral(heads, init="recency") + sink).to(device)


def _content_alone(heads: int, device: torch.device) -> SSMax:
    return SSMax(heads, init=0.2, include_prior=False).to(device)


def _content_and_prior(heads: int, device: torch.device) -> SSMax:
    return SSMax(heads, init=0.2).to(device)


def _attend(
    make_prior: Callable[[int, torch.device], Prior],
    make_scale: Callable[[int, torch.device], SSMax] | None = None,
    **options: Any,
) -> Callable[[Case, Inputs], Prepared]:
    """This library with a prior and perhaps a logit scale; ``options`` are further arguments of ``attend()``."""

    def prepare(case: Case, inputs: Inputs) -> Prepared:
        device = torch.device(case.device)
        torch.manual_seed(case.seed)
        prior = make_prior(case.heads, device)
        scale = None if make_scale is None else make_scale(case.heads, device)

        bounds = KeyBounds(inputs.key) if "tolerance" in options and case.passing == "decode" else None

        def run() -> Tensor:
            if bounds is not None:  # as for a token that was just added
                bounds.update(inputs.key)
            return attend(
                inputs.query, inputs.key, inputs.value, prior, logit_scale=scale, key_bounds=bounds, **options
            )

        leaves = (inputs.query, inputs.key, inputs.value, *learned(prior, scale))
        return Prepared(run, leaves, expected_rows(case, inputs, prior, logit_scale=scale), output_shape(inputs))

    return prepare


def _goat_inside(case: Case, inputs: Inputs) -> Prepared:
    """GOAT's prior where its package puts it: inside the head dimension, at the expense of the content."""
    content = case.head_dim - peers.goat_position_dimensions()
    if content < 1:
        raise CannotRunError(f"a head dimension of {case.head_dim} has no room for content beside GOAT's positions")
    torch.manual_seed(case.seed)
    prior = _goat(case.heads, torch.device(case.device))
    query, key = (x[..., :content].detach().clone() for x in (inputs.query, inputs.key))
    narrow = Inputs(query.requires_grad_(case.backward), key.requires_grad_(case.backward), inputs.value)

    def run() -> Tensor:
        return attend(narrow.query, narrow.key, narrow.value, prior)

    leaves = (narrow.query, narrow.key, narrow.value, *learned(prior))
    return Prepared(run, leaves, expected_rows(case, narrow, prior), output_shape(narrow))


# ---- the dense formulas


def _future(case: Case) -> Tensor:
    positions = torch.arange(case.length, device=case.device)
    return positions > positions.unsqueeze(-1)


def _distance(case: Case) -> Tensor:
    """``d = i - j`` in float32, ``(Lq, L)``; float32 holds these integers exactly."""
    positions = torch.arange(case.length, device=case.device, dtype=torch.float32)
    return positions[case.length - case.num_queries :].unsqueeze(-1) - positions


def _given_alibi(case: Case) -> tuple[Callable[[], Tensor], Prior]:
    """ALiBi's bias, made in the first pass and kept: its slopes are fixed."""
    prior = Laplace(case.heads).to(case.device)

    @cache
    @torch.no_grad()
    def bias() -> Tensor:
        dense = (-_distance(case) * prior.slope.unsqueeze(-1).unsqueeze(-1)).to(case.dtype).unsqueeze(0)
        return dense if case.passing == "decode" else dense.masked_fill_(_future(case), float("-inf"))

    return bias, prior


def _learned_gaussian(case: Case) -> tuple[Callable[[], Tensor], Prior]:
    """BAM's bias by its published formula, in float32, in every pass anew: its parameters are learned."""
    prior = _gaussian(case.heads, torch.device(case.device))
    distance = _distance(case)

    def bias() -> Tensor:
        theta, beta, mu = (x.view(-1, 1, 1) for x in (prior.theta_alpha, prior.beta, prior.mu))
        dense = -theta.exp() * ((-distance - mu).abs() + EPSILON).pow(beta)
        if case.passing != "decode":
            dense = dense.masked_fill(_future(case), float("-inf"))
        return dense.to(case.dtype).unsqueeze(0)

    return bias, prior


def _formula(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """``softmax(q kᵀ / sqrt(D) + bias) v``, as published implementations write it."""
    logits = query @ key.mT * query.shape[-1] ** -0.5 + bias
    return logits.softmax(-1) @ value


def _sdpa(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, attn_mask=bias)


def _dense(
    compute: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    make_bias: Callable[[Case], tuple[Callable[[], Tensor], Prior]],
) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        bias, prior = make_bias(case)
        leaves = (inputs.query, inputs.key, inputs.value)

        def run() -> Tensor:
            return compute(*leaves, bias())

        return Prepared(run, (*leaves, *learned(prior)), expected_rows(case, inputs, prior), output_shape(inputs))

    return prepare


def dense_need(*, kept: float, forward: float, backward: float) -> Callable[[Case], Need]:
    """Memory in matrices of queries by keys; ``kept`` ones are shared by the batch.

    The counts are measured ones (see the tests), not derived: they depend on when PyTorch lets go of what.
    """

    def need(case: Case) -> Need:
        if case.passing == "decode":
            return Need(0, 0)
        working = backward if case.backward else forward
        return Need(round(kept * case.bias_bytes), round(working * case.matrix_bytes))

    return need


_ATTEND = "attend(query, key, value, prior): the whole call, with what the prior needs"
_GIVEN = "the bias is made once, before, and kept: its slopes are fixed"
_LEARNED = "the bias is computed in each pass, in float32: its parameters are learned"

_CATALOGUE = (
    Way("plain", "plain SDPA, no prior", "limit", "scaled_dot_product_attention, is_causal=True; no prior", _plain),
    Way(
        "plain-wide",
        "plain SDPA, no prior, wider heads",
        "limit",
        "scaled_dot_product_attention, is_causal=True, as wide as GOAT's lanes make heads (88 for D = 64)",
        _plain_wide,
    ),
    Way("attend-alibi", "attend, ALiBi", "ours", _ATTEND, _attend(_laplace)),
    Way(
        "attend-alibi-pruned",
        "attend, ALiBi, tolerance 1e-6",
        "ours",
        f"{_ATTEND}, and the choice of blocks; in decoding with KeyBounds, updated for each token",
        _attend(_laplace, tolerance=TOLERANCE),
    ),
    Way(
        "attend-local-pruned",
        "attend, local heads, tolerance 1e-6",
        "ours",
        "the same with the steeper half of ALiBi's slopes, each twice: heads that reach less than 2048 tokens",
        _attend(_local, tolerance=TOLERANCE),
    ),
    Way("attend-ggd", "attend, GGD", "ours", f"{_ATTEND}; α, β and μ learn", _attend(_gaussian)),
    Way(
        "attend-ggd-ssmax-content",
        "attend, GGD + SSMax on content",
        "ours",
        f"{_ATTEND}; α, β, μ and SSMax's s learn",
        _attend(_gaussian, _content_alone),
    ),
    Way(
        "attend-ggd-ssmax",
        "attend, GGD + SSMax on both",
        "ours",
        f"{_ATTEND}; SSMax scales content and prior; α, β, μ and s learn",
        _attend(_gaussian, _content_and_prior),
    ),
    Way("attend-t5", "attend, T5 buckets", "ours", f"{_ATTEND}; the 32 numbers per head learn", _attend(_buckets)),
    Way(
        "attend-goat",
        "attend, GOAT in lanes",
        "ours",
        f"{_ATTEND}; spectral prior (8 frequencies) and key sink, all learned",
        _attend(_goat),
        baseline="plain-wide",
    ),
    Way(
        "attend-goat-inside",
        "attend, GOAT inside D",
        "ours",
        f"{_ATTEND}; GOAT's prior, with as much content as goat-attention has: D - 17 dimensions (47 for D = 64)",
        _goat_inside,
    ),
    Way("attend-window", f"attend, window of {WINDOW}", "ours", _ATTEND, _attend(_window)),
    Way(
        "formula-alibi",
        "dense formula, ALiBi",
        "others",
        f"softmax(q kᵀ / sqrt(D) + bias) v, one step after the other; {_GIVEN}",
        _dense(_formula, _given_alibi),
        need=dense_need(kept=1, forward=2.1, backward=3.2),
        counterpart="attend-alibi",
    ),
    Way(
        "formula-ggd",
        "dense formula, GGD",
        "others",
        f"softmax(q kᵀ / sqrt(D) + bias) v, one step after the other; {_LEARNED}",
        _dense(_formula, _learned_gaussian),
        need=dense_need(kept=0, forward=3.1, backward=9.6),
        counterpart="attend-ggd",
    ),
    Way(
        "sdpa-bias-alibi",
        "SDPA, dense ALiBi bias",
        "others",
        f"scaled_dot_product_attention, attn_mask=bias; {_GIVEN}",
        _dense(_sdpa, _given_alibi),
        need=dense_need(kept=1, forward=0.1, backward=0.4),
        counterpart="attend-alibi",
    ),
    Way(
        "sdpa-bias-ggd",
        "SDPA, dense GGD bias",
        "others",
        f"scaled_dot_product_attention, attn_mask=bias; {_LEARNED}",
        _dense(_sdpa, _learned_gaussian),
        need=dense_need(kept=0, forward=3.1, backward=9.6),
        counterpart="attend-ggd",
    ),
    Way(
        "flex-alibi",
        "FlexAttention, ALiBi",
        "others",
        "compiled flex_attention with a score_mod of the slopes and a causal block mask that is made once; "
        "compiled before, for each length (no dynamic shapes)",
        peers.flex(peers.flex_alibi),
        counterpart="attend-alibi",
        compiled=True,
    ),
    Way(
        "flex-ggd",
        "FlexAttention, GGD table",
        "others",
        "compiled flex_attention with a score_mod that reads the learned GGD's table of distances, computed in each "
        "pass; block mask and compiling as for ALiBi",
        peers.flex(peers.flex_gaussian),
        counterpart="attend-ggd",
        compiled=True,
    ),
    Way(
        "x-transformers",
        "x-transformers, ALiBi, default",
        "others",
        "x_transformers' Attend(flash=False), its default, without projections; its AlibiPositionalBias keeps the bias",
        peers.x_transformers(flash=False),
        need=dense_need(kept=1, forward=3.4, backward=3.4),
        counterpart="attend-alibi",
    ),
    Way(
        "x-transformers-flash",
        "x-transformers, ALiBi, flash",
        "others",
        "x_transformers' Attend(flash=True), without projections; its AlibiPositionalBias keeps the bias",
        peers.x_transformers(flash=True),
        need=dense_need(kept=1, forward=1.4, backward=1.4),
        counterpart="attend-alibi",
    ),
    Way(
        "bloom",
        "transformers, BLOOM's ALiBi",
        "others",
        "BloomAttention with its projections replaced by identities; mask and ALiBi numbers are made once, as its "
        "model does for all layers; decoding with a cache that keeps its size",
        peers.bloom,
        need=dense_need(kept=0.2, forward=3.2, backward=3.3),
        counterpart="attend-alibi",
    ),
    Way(
        "goat",
        "goat-attention",
        "others",
        "GoatAttention(need_weights=False) with its projections replaced by identities; positions take 17 of the D "
        "dimensions; decoding appends to its cache, as its code does",
        peers.goat(need_weights=False),
        counterpart="attend-goat-inside",
    ),
    Way(
        "goat-default",
        "goat-attention, default",
        "others",
        "GoatAttention(need_weights=True), its default, which computes every weight twice; else as goat-attention",
        peers.goat(need_weights=True),
        need=dense_need(kept=0, forward=2.8, backward=2.9),
        counterpart="attend-goat-inside",
    ),
)

WAYS: dict[str, Way] = {way.name: way for way in (*_CATALOGUE, *GRID_WAYS)}
"""Every contender, in the order of tables."""

LINE_WAYS = tuple(way.name for way in _CATALOGUE)
"""Those over texts, at any length."""
