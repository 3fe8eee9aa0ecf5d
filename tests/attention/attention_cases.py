"""Random attention problems, what they mean in float64, and how far from it a computation may be."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_priors import GeneralizedGaussian, Prior, SSMax, attend, prior_from_config
from attention_priors.attention import blocks, toeplitz
from attention_priors.attention import reference as dense
from attention_priors.attention.lanes import is_factored
from attention_priors.priors import CATALOGUE, Structure

PRIORS = ("none", *CATALOGUE, "sum")
"""What tests are run over. A prior that joins the catalogue joins the tests."""

Test = TypeVar("Test", bound=Callable[..., None])

LANES = Structure.FACTORED | Structure.FACTORED_IF_CAUSAL

ROUNDING = 2.0**-24
"""Relative error of one rounding to float32."""


def examples(number: int, salt: str = "") -> Callable[[Test], Test]:
    """So many examples, the same ones every time and however slow the machine is; other ones for another ``salt``.

    They are not made smaller when one fails: that takes minutes, and a failing example prints its shapes.
    """

    def decorate(test: Test) -> Test:
        chosen = settings(
            max_examples=number,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        return seed(zlib.crc32(salt.encode()))(chosen(test))

    return decorate


# ---- priors


@st.composite
def prior_descriptions(draw: st.DrawFn, name: str, causal: bool) -> dict[str, Any]:
    """A description of the named prior, all of whose parameters train where that is possible."""
    choices: dict[str, st.SearchStrategy[Any]] = {
        "train_length": st.sampled_from([8, 200]),
        "size": st.integers(1, 40),
        "num_frequencies": st.integers(1, 4),
        "num_buckets": st.sampled_from([4, 8, 32]),
        "max_distance": st.sampled_from([20, 128]),
        "bidirectional": st.booleans(),
        "max_offset": st.integers(1, 20),
        "keep_sign": st.booleans(),
    }
    description: dict[str, Any] = {"name": name}
    for argument, parameter in inspect.signature(CATALOGUE[name]).parameters.items():
        if argument in choices:
            description[argument] = draw(choices[argument])
        elif argument == "learn":
            description["learn"] = True
        elif argument != "num_heads":
            assert parameter.default is not parameter.empty, f"say how to draw {argument!r} of {name!r}"
    if description.get("keep_sign"):
        description["init"] = draw(st.sampled_from(GeneralizedGaussian.signed_inits))
    if name == "key_sink" and not causal:
        description["learn"] = ["gain", "bump", "mlp"]
    return description


RANGES = {
    "theta_beta": (-8.0, 8.0),
    "theta_alpha": (-4.0, 1.0),
    "theta_mu": (-1.0, 1.0),
    "log_slope": (-5.0, 0.5),
    "slope": (-0.5, 0.5),
    "weight": (-0.5, 0.5),
}
"""Where parameters are drawn from; those that are not named here are normal."""


@torch.no_grad()
def randomize(prior: Prior, generator: torch.Generator, ranges: dict[str, tuple[float, float]] = RANGES) -> None:
    """Move every trained parameter to a random place."""
    for name, parameter in prior.named_parameters():
        if not parameter.requires_grad:
            continue
        low, high = ranges.get(name.split(".")[-1], (None, None))
        if low is None or high is None:
            parameter.normal_(generator=generator)
        else:
            parameter.uniform_(low, high, generator=generator)


@st.composite
def priors(draw: st.DrawFn, name: str, heads: int, causal: bool, generator: torch.Generator) -> Prior | None:
    """The named prior with random parameters; ``none`` is None and ``sum`` a sum of two or three."""
    if name == "none":
        return None
    names = draw(st.lists(st.sampled_from(sorted(CATALOGUE)), min_size=2, max_size=3)) if name == "sum" else [name]
    descriptions = [draw(prior_descriptions(each, causal)) for each in names]
    prior = prior_from_config(descriptions if name == "sum" else descriptions[0], heads)
    randomize(prior, generator)
    return prior


# ---- problems


@dataclass(frozen=True)
class Case:
    """The arguments of one call of ``attend``."""

    query: Tensor
    key: Tensor
    value: Tensor
    prior: Prior | None = None
    causal: bool = True
    logit_scale: SSMax | None = None
    softmax_scale: float | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    document_ids: Tensor | None = None
    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    small_blocks: int | None = None
    """If set, backends work in blocks of so few queries that even short sequences need several."""

    def __repr__(self) -> str:
        """Shapes in place of numbers."""
        parts = []
        for part in fields(self):
            value = getattr(self, part.name)
            if value is not None:
                if isinstance(value, Tensor):
                    value = f"{value.dtype}{tuple(value.shape)}" if value.numel() > 24 else value.tolist()
                parts.append(f"{part.name}={value}")
        return f"Case({', '.join(parts)})"

    def options(self) -> dict[str, Any]:
        """The keyword arguments."""
        names = ("causal", "logit_scale", "softmax_scale", "query_positions", "key_positions", "document_ids")
        return {name: getattr(self, name) for name in (*names, "key_padding_mask", "attn_mask")}

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another dtype."""
        mask = self.attn_mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        return replace(
            self,
            query=self.query.detach().to(dtype),
            key=self.key.detach().to(dtype),
            value=self.value.detach().to(dtype),
            attn_mask=mask,
        )

    def leaves(self) -> dict[str, Tensor]:
        """What gradients are taken with respect to."""
        leaves = {"query": self.query, "key": self.key, "value": self.value}
        for owner, module in (("prior", self.prior), ("logit_scale", self.logit_scale)):
            if module is not None:
                leaves |= {f"{owner}.{n}": p for n, p in module.named_parameters() if p.requires_grad}
        return leaves

    def attend(self, backend: Any = "auto") -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        with in_blocks_of(self.small_blocks):
            return attend(
                self.query, self.key, self.value, self.prior, **self.options(), return_lse=True, backend=backend
            )

    def backends(self) -> list[str]:
        """Those that can compute it."""
        possible = ["auto", "toeplitz", "blockwise"]
        return [*possible, "lanes"] if is_factored(self.prior, causal=self.causal) else possible


@contextmanager
def in_blocks_of(size: int | None) -> Iterator[None]:
    if size is None:
        yield
        return

    with (
        mock.patch.object(blocks, "BLOCK_ROWS", size),
        mock.patch.object(toeplitz, "BUFFER_NUMBERS", 40 * size),
        mock.patch.object(dense, "block_length", return_value=size),
    ):
        yield


@st.composite
def _positions(
    draw: st.DrawFn, batch: int, num_queries: int, num_keys: int, generator: torch.Generator
) -> tuple[Tensor | None, Tensor | None]:
    kind = draw(st.sampled_from(["default", "default", "shifted", "per_batch", "irregular"]))
    if kind == "default":
        return None, None
    if kind == "irregular":
        leading = draw(st.sampled_from([(), (1,), (batch,)]))
        top = 2 * max(num_queries, num_keys)
        queries = torch.randint(0, top, (*leading, num_queries), generator=generator)
        keys = torch.randint(0, top, (*leading, num_keys), generator=generator)
    else:
        start, ahead = draw(st.integers(-20, 60)), draw(st.integers(-10, 10))
        keys = torch.arange(num_keys) + start
        queries = torch.arange(num_queries) + start + num_keys - num_queries + ahead
        if kind == "per_batch":
            keys = keys + torch.randint(-15, 15, (batch, 1), generator=generator)
            queries = queries + torch.randint(-15, 15, (batch, 1), generator=generator)
    given = draw(st.sampled_from(["both", "both", "queries", "keys"]))
    return (None if given == "keys" else queries), (None if given == "queries" else keys)


@st.composite
def _documents(draw: st.DrawFn, batch: int, length: int, generator: torch.Generator) -> Tensor | None:
    kind = draw(st.sampled_from(["none", "none", "contiguous", "interleaved", "returning"]))
    if kind == "none":
        return None
    ids = torch.randint(0, draw(st.integers(1, 6)), (batch, length), generator=generator)
    if kind == "contiguous":
        return ids.sort(-1).values
    return ids if kind == "interleaved" else ids.sort(-1).values % 2


@st.composite
def _padding(draw: st.DrawFn, batch: int, length: int, generator: torch.Generator) -> Tensor | None:
    kind = draw(st.sampled_from(["none", "none", "left", "right", "anywhere", "all of one"]))
    if kind == "none":
        return None
    if kind == "anywhere":
        return torch.rand(batch, length, generator=generator) < 0.4
    counts = torch.randint(0, length + 1, (batch, 1), generator=generator)
    if kind == "left":
        return torch.arange(length) < counts
    padding = torch.arange(length) >= counts
    if kind == "all of one":
        padding[0] = True
    return padding


@st.composite
def _attn_masks(draw: st.DrawFn, shape: tuple[int, int, int, int], generator: torch.Generator) -> Tensor | None:
    kind = draw(st.sampled_from(["none", "none", "none", "boolean", "float", "float with -inf"]))
    if kind == "none":
        return None
    if draw(st.booleans()):
        size: Sequence[int] = shape[2:]
    else:
        size = [draw(st.sampled_from([1, full])) for full in shape]
    if kind == "boolean":
        return torch.rand(*size, generator=generator) < 0.3
    mask = torch.randn(*size, generator=generator)
    hidden = torch.rand(*size, generator=generator) < 0.3
    return mask if kind == "float" else mask.masked_fill(hidden, float("-inf"))


@st.composite
def cases(draw: st.DrawFn, prior_name: str, longest: int = 300, masks: bool = True, scaled: bool = True) -> Case:
    """A problem in float32. ``masks`` and ``scaled``: whether it may have dense masks and a logit scale."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    lengths = st.one_of(st.integers(1, 9), st.integers(1, 9), st.integers(10, 60), st.integers(100, 300))
    num_queries, num_keys = (min(draw(lengths), longest) for _ in "qk")
    if draw(st.booleans()):
        num_queries = num_keys
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (6, 2)]))
    batch = draw(st.integers(1, 3))
    if max(num_queries, num_keys) > 99:  # for the tests' time
        batch, heads, kv_heads = 1, min(heads, 2), 1
    head_dim, value_dim = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    causal = draw(st.booleans())
    prior = draw(priors(prior_name, heads, causal, generator))

    logit_scale = None
    if scaled and draw(st.booleans()):
        logit_scale = SSMax(heads, include_prior=draw(st.booleans()))
        with torch.no_grad():
            logit_scale.s.uniform_(-1.5, 1.5, generator=generator)
    documents = draw(_documents(batch, num_keys, generator)) if num_queries <= num_keys else None
    query_positions, key_positions = draw(_positions(batch, num_queries, num_keys, generator))
    case = Case(
        query=normal(batch, heads, num_queries, head_dim),
        key=normal(batch, kv_heads, num_keys, head_dim),
        value=normal(batch, kv_heads, num_keys, value_dim),
        prior=prior,
        causal=causal,
        logit_scale=logit_scale,
        softmax_scale=draw(st.sampled_from([None, None, 0.3, 1.5])),
        query_positions=query_positions,
        key_positions=key_positions,
        document_ids=documents,
        key_padding_mask=draw(_padding(batch, num_keys, generator)),
        attn_mask=draw(_attn_masks((batch, heads, num_queries, num_keys), generator)) if masks else None,
        small_blocks=draw(st.sampled_from([None, 2 + num_queries // 4])),
    )
    return replace(case, logit_scale=None) if _counts_once(case) else case


def _counts_once(case: Case) -> bool:
    """Whether every query of a head sees the same keys by a mask without a dimension for queries.

    There the number of visible keys has no such dimension either, which the logit scale does not survive.
    """
    mask = case.attn_mask
    per_query = case.causal or case.document_ids is not None or (mask is not None and mask.shape[-2] > 1)
    return not per_query and (mask is not None or case.key_padding_mask is not None)


# ---- the oracle: the formula, written without the library's attention code


def positions_of(case: Case) -> tuple[Tensor, Tensor]:
    """Query positions ``(B, Lq)`` and key positions ``(B, Lk)``, defaults filled in."""
    batch, num_queries, num_keys = len(case.query), case.query.shape[2], case.key.shape[2]
    if case.key_positions is not None:
        keys = case.key_positions.expand(batch, -1)
    elif case.document_ids is not None:
        rows = []
        for ids in case.document_ids.tolist():
            rows.append([ids[:slot].count(ids[slot]) for slot in range(num_keys)])
        keys = torch.tensor(rows)
    else:
        keys = torch.arange(num_keys).expand(batch, -1)
    if case.query_positions is not None:
        return case.query_positions.expand(batch, -1), keys
    if num_queries <= num_keys:
        return keys[:, num_keys - num_queries :], keys
    return torch.stack([row[-1] - torch.arange(num_queries - 1, -1, -1) for row in keys]), keys


def visibility_of(case: Case) -> Tensor:
    """``(B, H, Lq, Lk)``: causal mask, documents, padding and dense mask; not the prior's window."""
    batch, heads, num_queries, _ = case.query.shape
    num_keys = case.key.shape[2]
    queries, keys = positions_of(case)
    visible = torch.ones(batch, heads, num_queries, num_keys, dtype=torch.bool)
    if case.causal:
        visible &= (queries[:, :, None] >= keys[:, None, :])[:, None]
    if case.document_ids is not None:
        own = case.document_ids[:, num_keys - num_queries :]
        visible &= (own[:, :, None] == case.document_ids[:, None, :])[:, None]
    if case.key_padding_mask is not None:
        visible &= ~case.key_padding_mask[:, None, None, :]
    mask = case.attn_mask
    if mask is not None:
        visible &= ~mask if mask.dtype == torch.bool else ~torch.isneginf(mask)
    return visible


@dataclass(frozen=True)
class Dense:
    """A problem as dense matrices ``(B, H, Lq, Lk)`` in float64."""

    logits: Tensor
    """Finite; only those that are ``seen`` have a meaning."""
    seen: Tensor
    weights: Tensor
    value: Tensor
    prior_scale: Tensor
    """What multiplies the log-prior: the logit scale, or 1 where it leaves the prior out, ``(B, H, Lq, 1)``."""

    @property
    def out(self) -> Tensor:
        """``(B, H, Lq, Dv)``."""
        return self.weights @ self.value

    @property
    def lse(self) -> Tensor:
        """``(B, H, Lq)``."""
        return torch.where(self.seen, self.logits, float("-inf")).logsumexp(-1)


def oracle(case: Case) -> Dense:
    """``z = c (<q, k> · softmax_scale + K)``, masks, softmax: from the definition."""
    heads, head_dim = case.query.shape[1], case.query.shape[3]
    key, value = (
        torch.stack([tensor[:, h * tensor.shape[1] // heads] for h in range(heads)], dim=1).double()
        for tensor in (case.key, case.value)
    )
    softmax_scale = head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    visible = visibility_of(case)
    scale = torch.ones(*case.query.shape[:3], 1, dtype=torch.float64)
    if case.logit_scale is not None:
        number = visible.sum(-1, keepdim=True).clamp(min=1).double()
        scale = case.logit_scale.s.double()[:, None, None] * number.log()
    logits = torch.einsum("bhid,bhjd->bhij", case.query.double(), key) * softmax_scale
    seen = visible
    bias: Tensor | float = 0.0
    if case.prior is not None:
        bias = case.prior.log_prior(*positions_of(case), dtype=torch.float64)
        seen = visible & ~torch.isneginf(bias)
        bias = bias.masked_fill(torch.isneginf(bias), 0.0)
    if case.logit_scale is None or case.logit_scale.include_prior:
        logits = scale * (logits + bias)
    else:
        logits = scale * logits + bias
    if case.attn_mask is not None and case.attn_mask.is_floating_point():
        logits = logits + case.attn_mask.double().masked_fill(torch.isneginf(case.attn_mask), 0.0)
    highest = torch.where(seen, logits, float("-inf")).amax(-1, keepdim=True).clamp(min=-1e300).detach()
    exponentials = torch.where(seen, logits - highest, float("-inf")).exp()
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)
    alone = case.logit_scale is not None and not case.logit_scale.include_prior
    return Dense(logits, seen, weights, value, torch.ones_like(scale) if alone else scale)


# ---- results and their errors


@dataclass(frozen=True)
class Result:
    """What a computation gave."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]


@dataclass(frozen=True)
class Cotangents:
    """What the gradients of output and log-sum-exp are."""

    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, out: Tensor, lse: Tensor) -> Cotangents:
        """Random ones.

        A key at distance 0 may lower a log-sum-exp by up to 1e30 nats. The gradient of such a number would
        drown all others, so it is divided by its size.
        """
        generator = torch.Generator().manual_seed(0)
        size = 1 + lse.detach().double().clamp(min=-1e38).abs().masked_fill(torch.isneginf(lse), 0.0)
        normal = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
        normal = (normal / size).masked_fill(torch.isneginf(lse), 0.0)
        return cls(torch.randn(out.shape, generator=generator, dtype=torch.float64), normal)


def compute(case: Case, backend: str, cotangents: Cotangents | None = None) -> Result:
    """Output, log-sum-exp and every gradient, the gradients through both (random ones, if none are given)."""
    case = replace(case, **{n: getattr(case, n).detach().requires_grad_() for n in ("query", "key", "value")})
    leaves = case.leaves()
    with in_blocks_of(case.small_blocks):
        out, lse = case.attend(backend)
        cotangents = Cotangents.of(out, lse) if cotangents is None else cotangents
        grads = torch.autograd.grad(
            [out, lse],
            list(leaves.values()),
            [cotangents.out.to(out.dtype), cotangents.lse.to(lse.dtype)],
            allow_unused=True,
        )
    found = zip(leaves, leaves.values(), grads, strict=True)
    return Result(out.detach(), lse.detach(), {n: torch.zeros_like(x) if g is None else g for n, x, g in found})


def gradient_scales(case: Case, cotangents: Cotangents) -> dict[str, Tensor]:
    """The size of what is added up to make each gradient.

    A gradient is a sum over pairs ``(i, j)``, and its terms may cancel: the gradient of a bias that is the same
    for all keys is 0, yet every float32 computation of it leaves rounding errors of its terms behind. So errors
    are measured against the size of the terms: the gradient that comes out when each logit's gradient
    ``p (dp - Σ p dp + dlse)`` is replaced by the sum of its parts' absolute values, with a random sign. (Random
    signs, because rounding errors have such.)
    """
    case = case.to(torch.float64)
    case = replace(case, **{n: getattr(case, n).requires_grad_() for n in ("query", "key", "value")})
    leaves = case.leaves()
    exact = oracle(case)
    with torch.no_grad():
        weights_grad = cotangents.out.abs() @ exact.value.abs().mT
        mean = (exact.weights * weights_grad).sum(-1, keepdim=True)
        all_parts = exact.weights * (weights_grad + mean + cotangents.lse.abs().unsqueeze(-1))
        # Where a row sees one key alone its weight is 1 whatever the logit is, and a log-prior of -1e30 nats has
        # no part in anything but the log-sum-exp.
        alone = (exact.weights == 1.0).any(-1, keepdim=True)
        parts = torch.where(alone, exact.weights * cotangents.lse.abs().unsqueeze(-1), all_parts)
    content = [name for name in leaves if not name.startswith("prior.")]
    positional = [name for name in leaves if name.startswith("prior.")]
    sums = [(exact.logits, all_parts, content), (exact.logits, parts, positional)]
    for term in () if case.prior is None else case.prior.terms():
        if term.structure & LANES:
            # Lanes may cancel each other. They count keys from the last one, and a constant per row makes up for it.
            lanes = term.lanes(*positions_of(case), dtype=torch.float64)
            scale = exact.prior_scale.detach().abs()
            products = lanes.query.unsqueeze(-2) * lanes.key[..., None, None, :, :]
            sums.append((products, (scale * parts).unsqueeze(-1).expand(*parts.shape, products.shape[-1]), positional))
            if lanes.row_offset is not None:
                row_parts = scale.squeeze(-1) * cotangents.lse.abs()
                sums.append((lanes.row_offset, row_parts, positional))
    generator = torch.Generator().manual_seed(0)
    scales = {name: torch.zeros((), dtype=torch.float64) for name in leaves}
    for total, sizes, names in sums:
        for _ in range(3 if total.requires_grad and names else 0):
            signs = torch.randint(0, 2, sizes.shape, generator=generator) * 2 - 1
            chosen = [leaves[name] for name in names]
            grads = torch.autograd.grad(total, chosen, signs * sizes, allow_unused=True, retain_graph=True)
            for name, grad in zip(names, grads, strict=True):
                if grad is not None:
                    scales[name] = torch.maximum(scales[name], grad.double().abs().max())
    value_grad = exact.weights.detach().mT @ cotangents.out.abs()
    group = case.query.shape[1] // case.value.shape[1]
    scales["value"] = value_grad.unflatten(1, (-1, group)).sum(2).abs().max()
    return scales


def float32_tolerance(case: Case, *, lanes: bool = False) -> float:
    """What relative error a float32 computation may have: 1e-5, and more where rounding alone makes more.

    A logit ``z`` in float32 is wrong by up to ``2^-24 |z|``, which moves its weight by ``p (1 - p)`` times as
    much. A logit scale of 8 on a log-prior of -50 nats that is nearly the same for all keys is such a case: no
    float32 bias can do better. In lanes (of priors that are not stationary, or of all if ``lanes``) the numbers
    that are rounded count from the last key and not from the query.
    """
    exact = oracle(case.to(torch.float64))
    with torch.no_grad():
        size = exact.logits.abs()
        offset = torch.zeros(())
        for term in () if case.prior is None else case.prior.terms():
            if Structure.STATIONARY in term.structure and not (lanes and term.structure & LANES):
                continue
            parts = term.lanes(*positions_of(case), dtype=torch.float64)
            size = size + exact.prior_scale.abs() * (parts.query @ parts.key.unsqueeze(-3).mT).abs()
            if parts.row_offset is not None:
                offset = offset + (exact.prior_scale.squeeze(-1) * parts.row_offset).abs()
        moved = (exact.weights * (1 - exact.weights) * size).sum(-1) + offset
        return 1e-5 + 2 * ROUNDING * float(moved.max())


def errors(result: Result, expected: Result, scales: dict[str, Tensor]) -> dict[str, float]:
    """Error of each part, relative to its size: largest number of the tensor, or (for gradients) of its terms."""
    found: dict[str, float] = {}
    for name, tensor in (("out", result.out), ("lse", result.lse)):
        assert torch.isfinite(tensor[~torch.isneginf(tensor)]).all(), name
    found["out"] = _relative(result.out, expected.out, torch.zeros(()))
    blind = torch.isneginf(expected.lse)
    assert torch.equal(torch.isneginf(result.lse), blind), "other rows see nothing"
    assert (result.out[blind] == 0).all(), "a row that sees nothing gives zeros"
    # A log-sum-exp is an absolute thing in nats, as long as it is not huge.
    error = (result.lse.double() - expected.lse.double()).abs() / expected.lse.double().abs().clamp(min=1)
    found["lse"] = float(error.masked_fill(blind, 0.0).max())
    assert set(result.grads) == set(expected.grads)
    for name, grad in result.grads.items():
        assert torch.isfinite(grad).all(), name
        assert grad.shape == expected.grads[name].shape, name
        found[name] = _relative(grad, expected.grads[name], scales[name])
    return found


def _relative(tensor: Tensor, expected: Tensor, scale: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    error = (tensor.double() - expected.double()).abs().max()
    size = torch.maximum(expected.double().abs().max(), scale.double())
    return 0.0 if error == 0 else float(error / size.clamp(min=1e-30))
