"""Random priors and random attention problems."""

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
from torch import Tensor, nn

import thoroughness
from attention_priors import Fire, GeneralizedGaussian, Laplace, Prior, SSMax, attend, prior_from_config
from attention_priors.attention import reference as dense
from attention_priors.attention.plan import Backend, why_not
from attention_priors.attention.problem import make_problem
from attention_priors.attention.tiles import backward, bare, block_problem, forward, plain_backward, scaled, tiling
from attention_priors.priors import CATALOGUE, Axial, Radial, Structure
from attention_priors.priors.base import Lanes

PRIORS = ("none", *(name for name, prior in CATALOGUE.items() if name == "axial" or not prior.over_grid), "sum")
"""Priors under test. Every prior of the catalogue is included, with one prior on grids; ``test_grids.py`` has the
others.
"""

NETWORKS = [name for name, prior in CATALOGUE.items() if Structure.SCALED_DISTANCE in prior.structure]
WITHOUT_NETWORKS = tuple(name for name in PRIORS if name not in NETWORKS)
"""Priors that FlexAttention and Triton's kernels refuse: networks of a scaled distance."""

SUMMANDS = st.sampled_from(
    [
        [name for name, prior in sorted(CATALOGUE.items()) if prior.over_grid in (None, kind) and name not in NETWORKS]
        for kind in (False, True)
    ]
).flatmap(lambda names: st.lists(st.sampled_from(names), min_size=2, max_size=3))
"""Names of priors that form a sum: all over a line, or all on a grid."""

Test = TypeVar("Test", bound=Callable[..., None])


def examples(number: int, salt: str = "") -> Callable[[Test], Test]:
    """Draw ``number`` examples, or ten times as many in a deep run. Examples depend only on ``salt``.

    The first example is the simplest, so a test draws at random only from the second example on.

    Failing examples are not shrunk. Shrinking takes minutes, and a failing example prints its shapes.
    """

    def decorate(test: Test) -> Test:
        chosen = settings(
            max_examples=thoroughness.examples(number),
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        return seed(zlib.crc32(salt.encode()))(chosen(test))

    return decorate


# ---- priors


class Waves(Prior):
    """Prior that has only lanes: ``K(i, j) = a_h sin(i / 9) cos(j / 7) + b_h cos(j / 5)`` in nats."""

    structure = Structure.FACTORED

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.heights = nn.Parameter(torch.ones(2, num_heads))

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        own, their = query_positions.double()[..., None, :, None], key_positions.double().unsqueeze(-1)
        features = torch.cat([(own / 9).sin(), torch.ones_like(own)], -1)
        heights = self.heights.double().T.unsqueeze(-2)
        return Lanes((heights * features).to(dtype), torch.cat([(their / 7).cos(), (their / 5).cos()], -1).to(dtype))


class Gap(Laplace):
    """ALiBi that hides distances from 4 to 20, and not those beyond."""

    def visible_at(self, distance: Tensor) -> Tensor:
        return (distance < 4) | (distance > 20)


@st.composite
def prior_descriptions(draw: st.DrawFn, name: str, causal: bool) -> dict[str, Any]:
    """Return the config of the named prior. All of its parameters train where that is possible."""
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
    if name == "key_sink_2d":
        choices |= {"rows": st.integers(1, 9), "columns": st.integers(1, 9)}
    elif name in ("axial", "radial"):
        over = Axial.axes if name == "axial" else Radial.over
        part = st.sampled_from(sorted(over)).flatmap(lambda each: prior_descriptions(each, causal))
        choices |= {"rows": part, "columns": st.none() | part, "prior": part}
    # Arguments that are not drawn are those of an example, or the defaults.
    example = CATALOGUE[name].examples(1)[0].to_config()
    description: dict[str, Any] = {"name": name}
    for argument, parameter in inspect.signature(CATALOGUE[name]).parameters.items():
        if argument in choices:
            description[argument] = draw(choices[argument])
        elif argument == "learn":
            description["learn"] = True
        elif argument != "num_heads" and parameter.default is parameter.empty:
            description[argument] = example[argument]
    if description.get("keep_sign"):
        description["init"] = draw(st.sampled_from(GeneralizedGaussian.signed_inits))
    if name == "radial":
        over = description["prior"]
        over["learn"] = [each for each in Radial.over[over["name"]].learnable if each != "mu"]
        if over.get("init") in ("neighbours", "previous", "phrases"):
            over["init"] = "spread"  # a distance has neither sign nor location
    if name == "key_sink" and not causal:
        description["learn"] = ["gain", "bump", "mlp"]
    return description


OWN = ("lanes alone", "lanes and a table", "a network and all others", "a gap")
"""Priors that are not in the catalogue."""
RANGES = {
    "theta_beta": (-8.0, 8.0),
    "theta_alpha": (-4.0, 1.0),
    "theta_mu": (-1.0, 1.0),
    "log_slope": (-5.0, 0.5),
    "slope": (-0.5, 0.5),
    "weight": (-0.5, 0.5),
}
"""Ranges of drawn parameters. All other parameters are normal."""


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
    """Return the named prior with random parameters. ``none`` is None, and ``sum`` is a sum of two or three."""
    if name == "none":
        return None
    if name in OWN:
        own = Waves(heads) if name == OWN[0] else Waves(heads) + Laplace(heads, learn=True)
        if name == "a gap":
            own = Gap(heads, learn=True)
        if name == OWN[2]:
            own = Fire(heads, 9) + own + prior_from_config({"name": "key_sink", "train_length": 20}, heads)
        randomize(own, generator)
        return own
    names = draw(SUMMANDS) if name == "sum" else [name]
    descriptions = [draw(prior_descriptions(each, causal)) for each in names]
    prior = prior_from_config(descriptions if name == "sum" else descriptions[0], heads)
    randomize(prior, generator)
    return prior


def places(prior: Prior | None, num_keys: int) -> dict[str, Any]:
    """Return the argument of :func:`attend` that places keys on a grid, in one row. For other priors, return no
    argument.
    """
    is_on_grids = prior is not None and any(term.over_grid for term in prior.terms())
    return {"key_positions": torch.arange(num_keys)} if is_on_grids else {}


# ---- problems


@dataclass(frozen=True)
class Case:
    """Arguments of one call of ``attend``."""

    query: Tensor
    key: Tensor
    value: Tensor
    prior: Prior | None = None
    causal: bool = True
    logit_scale: SSMax | None = None
    visible_keys: Tensor | None = None
    softmax_scale: float | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    document_ids: Tensor | None = None
    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    key_bias: Tensor | None = None
    tolerance: float = 0.0
    small_blocks: int | None = None
    """Number of queries per block, so small that even short sequences need several blocks. None is the default of
    ``attend``, which takes short sequences as one tile.
    """

    def __post_init__(self) -> None:
        if self.key_positions is None:
            for name, positions in places(self.prior, self.key.shape[2]).items():
                object.__setattr__(self, name, positions)

    def __repr__(self) -> str:
        """Print shapes in place of numbers."""
        parts = []
        for part in fields(self):
            value = getattr(self, part.name)
            if value is not None:
                if isinstance(value, Tensor):
                    value = f"{value.dtype}{tuple(value.shape)}" if value.numel() > 24 else value.tolist()
                parts.append(f"{part.name}={value}")
        return f"Case({', '.join(parts)})"

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments."""
        names = ("causal", "logit_scale", "visible_keys", "softmax_scale", "query_positions", "key_positions")
        names += ("document_ids", "key_padding_mask", "attn_mask", "key_bias", "tolerance")
        return {name: getattr(self, name) for name in names}

    def to(self, dtype: torch.dtype) -> Case:
        """Return the case with numbers of another dtype."""
        mask = self.attn_mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        return replace(
            self,
            query=self.query.detach().to(dtype),
            key=self.key.detach().to(dtype),
            value=self.value.detach().to(dtype),
            attn_mask=mask,
            key_bias=None if self.key_bias is None else self.key_bias.detach(),
        )

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that receive gradients, by name."""
        leaves = {name: getattr(self, name) for name in self.given()}
        for owner, module in (("prior", self.prior), ("logit_scale", self.logit_scale)):
            if module is not None:
                leaves |= {f"{owner}.{n}": p for n, p in module.named_parameters() if p.requires_grad}
        return leaves

    def given(self) -> tuple[str, ...]:
        """Return the names of the tensors that receive gradients."""
        return ("query", "key", "value", *(() if self.key_bias is None else ("key_bias",)))

    def attend(self, backend: Any = "auto") -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp."""
        with in_blocks_of(self.small_blocks):
            return attend(
                self.query, self.key, self.value, self.prior, **self.options(), return_lse=True, backend=backend
            )

    def backends(self, need_lse: bool = True) -> list[str]:
        """Return the backends that can compute the case."""
        problem = make_problem(self.query, self.key, self.value, self.prior, **self.options())
        names: tuple[Backend, ...] = "auto", "toeplitz", "blockwise", "lanes"
        return [name for name in names if name == "auto" or why_not(problem, name, need_lse=need_lse) is None]


@contextmanager
def in_blocks_of(size: int | None) -> Iterator[None]:
    if size is None:
        yield
        return

    with (
        # PAIRS splits texts and heads into parts, as threads do.
        mock.patch.multiple(
            forward, ROWS=2 * size, DIAGONAL_ROWS=max(1, size // 2), KEYS_IN_MEMORY=size, BIAS_NUMBERS=8 * size, PAIRS=0
        ),
        mock.patch.multiple(backward, ROWS=size, MOST_KEYS=size + 3, NUMBERS=40 * size, PAIRS=0),
        mock.patch.object(plain_backward, "PAIRS", 0),
        mock.patch.object(dense, "block_length", return_value=size),
        mock.patch.object(block_problem, "FEW_PAIRS", 0),
        mock.patch.object(tiling, "FEW_PAIRS", 0),
        mock.patch.object(bare, "SHORT_PAIRS", 0),
        mock.patch.object(scaled, "KEPT_NUMBERS", 0),
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
def _laid_out(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """Copy a tensor into another memory layout: heads after tokens, columns before rows, or with gaps."""
    kind = draw(st.sampled_from(["rows", "rows", "tokens first", "columns", "gaps"]))
    if kind == "tokens first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "columns":
        return tensor.mT.contiguous().mT
    return tensor.repeat_interleave(2, dim=-1)[..., ::2] if kind == "gaps" else tensor


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
def _key_biases(
    draw: st.DrawFn, shape: tuple[int, int, int], padding: Tensor | None, generator: torch.Generator
) -> Tensor | None:
    """Draw numbers near 0, or the sums of a forget gate: ``-Σ ln f``, with gates of 0 floored at -10^4."""
    kind = draw(st.sampled_from(["none", "none", "none", "normal", "gates", "slow gates", "gates of 0 and 1"]))
    if kind == "none":
        return None
    if kind == "normal":
        return torch.randn(shape, generator=generator, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    gates = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind != "gates":
        gates = 0.9 + 0.1 * gates if kind == "slow gates" else (gates < 0.7).double()
    numbers = -gates.log().clamp(min=-1e4).cumsum(-1)
    # The bias of hidden keys has no effect.
    return numbers if padding is None else numbers.masked_fill(padding.unsqueeze(1), 1e20)


@st.composite
def cases(
    draw: st.DrawFn,
    prior_name: str,
    longest: int = 300,
    largest_batch: int = 3,
    masks: bool = True,
    scaled: bool = True,
    keyed: bool = True,
) -> Case:
    """Draw a problem in float32, with dense ``masks``, a logit scale (``scaled``) and a key bias (``keyed``) if
    allowed.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    lengths = st.one_of(st.integers(1, 9), st.integers(1, 9), st.integers(10, 60), st.integers(100, 300))
    num_queries, num_keys = (min(draw(lengths), longest) for _ in "qk")
    if draw(st.booleans()):
        num_queries = num_keys
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (6, 2)]))
    batch = draw(st.integers(1, largest_batch))
    if max(num_queries, num_keys) > 99:  # saves test time
        batch, heads, kv_heads = 1, min(heads, 2), 1
    head_dim, value_dim = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    causal = draw(st.booleans())
    prior = draw(priors(prior_name, heads, causal, generator))

    logit_scale = None
    if scaled and draw(st.booleans()):
        logit_scale = SSMax(heads, include_prior=draw(st.booleans()))
        with torch.no_grad():
            logit_scale.s.uniform_(-1.5, 1.5, generator=generator)
    visible_keys = None
    if logit_scale is not None:
        shape = draw(st.sampled_from([None, None, (num_queries,), (batch, num_queries), (batch, heads, num_queries)]))
        # Queries that see almost no keys and have a scale near 0 leave nothing to prune.
        fewest = draw(st.sampled_from([1, 200, 200]))
        visible_keys = None if shape is None else torch.randint(fewest, 500, shape, generator=generator)
    documents = draw(_documents(batch, num_keys, generator)) if num_queries <= num_keys else None
    query_positions, key_positions = draw(_positions(batch, num_queries, num_keys, generator))
    padding = draw(_padding(batch, num_keys, generator))
    shape = batch, draw(st.sampled_from([heads, kv_heads])), num_keys
    return Case(
        query=draw(_laid_out(normal(batch, heads, num_queries, head_dim))),
        key=draw(_laid_out(normal(batch, kv_heads, num_keys, head_dim))),
        value=draw(_laid_out(normal(batch, kv_heads, num_keys, value_dim))),
        prior=prior,
        causal=causal,
        logit_scale=logit_scale,
        visible_keys=visible_keys,
        softmax_scale=draw(st.sampled_from([None, None, 0.3, 1.5])),
        query_positions=query_positions,
        key_positions=key_positions,
        document_ids=documents,
        key_padding_mask=padding,
        key_bias=draw(_key_biases(shape, padding, generator)) if keyed else None,
        attn_mask=draw(_attn_masks((batch, heads, num_queries, num_keys), generator)) if masks else None,
        small_blocks=draw(st.sampled_from([None, 2 + num_queries // 4])),
    )
