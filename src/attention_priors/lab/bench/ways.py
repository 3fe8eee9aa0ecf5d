"""Contenders of a benchmark: attention without a prior, this library, dense formulas, and other packages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_priors.attention import KeyBounds, SSMax, attend
from attention_priors.lab.bench import peers
from attention_priors.lab.bench.way import CannotRunError, Case, Inputs, Prepared, Way, prepared
from attention_priors.lab.strict_yaml import read_yaml
from attention_priors.priors import (
    Axial,
    Fire,
    GeneralizedGaussian,
    KeySink,
    Laplace,
    Prior,
    Radial,
    RelativeBuckets,
    Spectral,
    Spectral2d,
    Window,
    alibi_slopes,
    grid_positions,
)
from attention_priors.priors.generalized_gaussian import EPSILON

TOLERANCE = 1e-6
"""Share of a query's attention weight that pruning may remove."""
WINDOW = 1024
"""Size of the window in tokens."""
TRAIN_LENGTH = 2048
"""Training length of the key sink, which scales its features."""

MakePrior = Callable[[int], Prior]
Bias = tuple[Callable[[], Tensor], Prior]
"""Function that returns the dense bias of a pass, and the prior of the bias."""


# ---- positions


def _line(case: Case) -> None:
    """Return None: positions count from 0, and attention is causal."""


def _grid(case: Case) -> Tensor:
    """Return rows and columns of a square grid of patches, for bidirectional attention."""
    side = isqrt(case.length)
    if case.passing == "decode":
        raise CannotRunError("grids have no decode pass; use forward or forward+backward")
    if side * side != case.length:
        raise CannotRunError(f"{case.length} patches do not form a square grid")
    return grid_positions(side, side, device=case.device)


Place = Callable[[Case], Tensor | None]


def _packed(case: Case) -> Tensor:
    """Return the document of each key, ``(B, L)``: a third of a row is one document, the rest another."""
    if case.passing == "decode":
        raise CannotRunError("packed documents have no decode pass; use forward or forward+backward")
    return (torch.arange(case.length, device=case.device) >= case.length // 3).long().expand(case.batch, -1)


def _between(documents: Tensor) -> Tensor:
    """Return which pairs of tokens are of different documents, ``(B, 1, L, L)``."""
    return (documents.unsqueeze(-1) != documents.unsqueeze(-2)).unsqueeze(1)


# ---- the limit


def _plain(case: Case, inputs: Inputs, place: Place = _line) -> Prepared:
    positions = place(case)
    # A single query is the last token and sees every key.
    causal = positions is None and case.passing != "decode"
    run = partial(scaled_dot_product_attention, *inputs, is_causal=causal)
    return prepared(case, inputs, run, positions=positions, causal=positions is None)


def _plain_packed(case: Case, inputs: Inputs) -> Prepared:
    forbidden = _between(_packed(case))
    seen = ~(forbidden | torch.ones_like(forbidden).triu(1))
    return prepared(case, inputs, partial(scaled_dot_product_attention, *inputs, attn_mask=seen), forbidden=forbidden)


def _plain_by(backend: SDPBackend, case: Case, inputs: Inputs) -> Prepared:
    if not case.device.startswith("cuda"):
        raise CannotRunError("runs on CUDA alone")
    plain = _plain(case, inputs)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return plain.run()

    return plain._replace(run=run)


# ---- this library


def _local(heads: int) -> Prior:
    """Return a prior with the steeper half of ALiBi's slopes, each for two heads."""
    slopes = alibi_slopes(heads).tolist()
    return Laplace(heads, slopes=[slopes[h // 2] for h in range(heads)])


def _gaussian(heads: int) -> GeneralizedGaussian:
    return GeneralizedGaussian(heads, init="spread", learn=True)


def _goat(heads: int) -> Prior:
    sink = KeySink(heads, TRAIN_LENGTH, init="recency")
    with torch.no_grad():
        # At their initial value 0, both terms would be invisible in the check of the output.
        sink.gain.fill_(1.0)
        sink.bump.fill_(1.0)
    return Spectral(heads, init="recency") + sink


def _axial_gaussian(heads: int) -> Prior:
    return Axial(heads, {"name": "generalized_gaussian", "init": "spread", "learn": True})


def _radial_gaussian(heads: int) -> Prior:
    return Radial(heads, {"name": "generalized_gaussian", "init": "spread"})


def _attend(
    make_prior: MakePrior,
    make_scale: Callable[[int], SSMax] | None = None,
    *,
    place: Place = _line,
    packed: bool = False,
    **options: Any,
) -> Callable[[Case, Inputs], Prepared]:
    """Return the function that prepares ``attend()`` for a prior and a logit scale; ``options`` go to ``attend()``."""

    def prepare(case: Case, inputs: Inputs) -> Prepared:
        positions, documents = place(case), _packed(case) if packed else None
        causal = positions is None
        torch.manual_seed(case.seed)
        prior = make_prior(case.heads).to(case.device)
        scale = None if make_scale is None else make_scale(case.heads).to(case.device)
        bounds = KeyBounds(inputs.key) if "tolerance" in options and case.passing == "decode" else None
        call = partial(attend, *inputs, prior, causal=causal, query_positions=positions, key_positions=positions)
        forbidden = None if documents is None else _between(documents)

        def run() -> Tensor:
            if bounds is not None:  # as after a new token
                bounds.update(inputs.key)
            return call(logit_scale=scale, key_bounds=bounds, document_ids=documents, **options)

        return prepared(
            case, inputs, run, prior, logit_scale=scale, positions=positions, causal=causal, forbidden=forbidden
        )

    return prepare


def _gates(case: Case, inputs: Inputs, **options: Any) -> Prepared:
    """Prepare ``attend()`` with random forget gates: a mean ``ln f`` of -0.1 in half of the heads, 0 in the others."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (len(inputs.query), case.heads, inputs.key.shape[2])
    steps = 0.2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    steps[:, case.heads // 2 :] = 0
    bias = steps.cumsum(-1).to(case.device).requires_grad_(case.backward)
    causal = case.passing != "decode"
    run = partial(attend, *inputs, key_bias=bias, causal=causal, **options)
    return prepared(case, inputs, run, leaves=(*inputs, bias), key_bias=bias, causal=causal)


def _goat_inside(case: Case, inputs: Inputs) -> Prepared:
    """Prepare GOAT's prior inside the head dimension, as its package does; content gets fewer dimensions."""
    content = peers.goat_content(case)
    torch.manual_seed(case.seed)
    prior = _goat(case.heads).to(case.device)
    query, key = (x[..., :content].detach().clone().requires_grad_(case.backward) for x in inputs[:2])
    narrow = Inputs(query, key, inputs.value)
    return prepared(case, narrow, partial(attend, *narrow, prior), prior)


# ---- the dense formulas


def _distance(case: Case) -> tuple[Tensor, Tensor | None]:
    """Return ``d = i - j`` in float32, which is exact here, and the mask of negative distances, both ``(Lq, L)``."""
    positions = torch.arange(case.length, device=case.device, dtype=torch.float32)
    distance = positions[case.offset :].unsqueeze(-1) - positions
    return distance, None if case.passing == "decode" else distance < 0


def _fixed_alibi(case: Case, positions: Tensor | None) -> Bias:
    """Return a function that makes ALiBi's bias once, because the slopes are fixed."""
    prior = Laplace(case.heads).to(case.device)

    @cache
    @torch.no_grad()
    def bias() -> Tensor:
        distance, future = _distance(case)
        dense = (-distance * prior.slope.unsqueeze(-1).unsqueeze(-1)).to(case.dtype).unsqueeze(0)
        return dense if future is None else dense.masked_fill_(future, float("-inf"))

    return bias, prior


def _learned_gaussian(case: Case, positions: Tensor | None) -> Bias:
    """Return a function that makes BAM's bias in every pass, by its published formula in float32."""
    prior = _gaussian(case.heads).to(case.device)
    distance, future = _distance(case)

    def bias() -> Tensor:
        theta, beta, mu = (x.view(-1, 1, 1) for x in (prior.theta_alpha, prior.beta, prior.mu))
        dense = -theta.exp() * ((-distance - mu).abs() + EPSILON).pow(beta)
        if future is not None:
            dense = dense.masked_fill(future, float("-inf"))
        return dense.to(case.dtype).unsqueeze(0)

    return bias, prior


def _learned_axial(case: Case, positions: Tensor | None) -> Bias:
    """Return a function that makes the dense bias of a grid in every pass."""
    assert positions is not None
    torch.manual_seed(case.seed)
    prior = _axial_gaussian(case.heads).to(case.device)
    return partial(prior.log_prior, positions, positions, case.dtype), prior


def _formula(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
    """Return ``softmax(q kᵀ / sqrt(D) + bias) v``, as published implementations compute it."""
    return (query @ key.mT * query.shape[-1] ** -0.5 + attn_mask).softmax(-1) @ value


def _dense(
    compute: Callable[..., Tensor], make_bias: Callable[[Case, Tensor | None], Bias], place: Place = _line
) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        positions = place(case)
        bias, prior = make_bias(case, positions)
        run = lambda: compute(*inputs, attn_mask=bias())  # noqa: E731
        return prepared(case, inputs, run, prior, positions=positions, causal=positions is None)

    return prepare


_PREPARE: dict[str, Callable[[Case, Inputs], Prepared]] = {
    "plain": _plain,
    "cuda-flash": partial(_plain_by, SDPBackend.FLASH_ATTENTION),
    "cuda-cudnn": partial(_plain_by, SDPBackend.CUDNN_ATTENTION),
    "attend-alibi": _attend(Laplace),
    "attend-alibi-pruned": _attend(Laplace, tolerance=TOLERANCE),
    "attend-local-pruned": _attend(_local, tolerance=TOLERANCE),
    "attend-ggd": _attend(_gaussian),
    "attend-ggd-ssmax-content": _attend(_gaussian, partial(SSMax, init=0.2, include_prior=False)),
    "attend-ggd-ssmax": _attend(_gaussian, partial(SSMax, init=0.2)),
    "attend-t5": _attend(partial(RelativeBuckets, init="normal")),
    "attend-goat": _attend(_goat),
    "attend-goat-inside": _goat_inside,
    "attend-window": _attend(partial(Window, size=WINDOW)),
    "attend-fire": _attend(Fire),
    "attend-gates": _gates,
    "attend-gates-pruned": partial(_gates, tolerance=TOLERANCE),
    "formula-alibi": _dense(_formula, _fixed_alibi),
    "formula-ggd": _dense(_formula, _learned_gaussian),
    "sdpa-bias-alibi": _dense(scaled_dot_product_attention, _fixed_alibi),
    "sdpa-bias-ggd": _dense(scaled_dot_product_attention, _learned_gaussian),
    "flex-alibi": partial(peers.flex, make_score=peers.flex_alibi),
    "flex-ggd": partial(peers.flex, make_score=peers.flex_gaussian),
    "x-transformers": partial(peers.x_transformers, flash=False),
    "x-transformers-flash": partial(peers.x_transformers, flash=True),
    "bloom": peers.bloom,
    "goat": partial(peers.goat, need_weights=False),
    "goat-default": partial(peers.goat, need_weights=True),
    "packed-plain": _plain_packed,
    "packed-alibi": _attend(Laplace, packed=True),
    "packed-ggd": _attend(_gaussian, packed=True),
    "grid-plain": partial(_plain, place=_grid),
    "grid-ggd": _attend(_axial_gaussian, place=_grid),
    "grid-radial": _attend(_radial_gaussian, place=_grid),
    "grid-spectral": _attend(partial(Spectral2d, init="recency"), place=_grid),
    "grid-bias-ggd": _dense(scaled_dot_product_attention, _learned_axial, _grid),
}

WAYS: dict[str, Way] = {
    name: Way(name, prepare=_PREPARE[name], **description)
    for name, description in read_yaml(Path(__file__).with_suffix(".yaml")).items()
}
"""All contenders, in the order of tables; ``ways.yaml`` describes them."""

LINE_WAYS = tuple(name for name in WAYS if not name.startswith(("packed-", "grid-", "cuda-")))
"""Names of the contenders on sequences, which run at any length and on any device."""
