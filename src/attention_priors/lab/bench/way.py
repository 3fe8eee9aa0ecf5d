"""The parts of a benchmark: a case, its tensors, and the ways to compute attention in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from attention_priors.attention import SSMax, attend
from attention_priors.priors import Prior

Pass = Literal["forward", "forward+backward", "decode"]
PASSES: tuple[Pass, ...] = get_args(Pass)
PACKAGES = {"x_transformers": "x-transformers", "goat": "goat-attention", "transformers": "transformers"}
"""PyPI name of each package of a peer, by the name of its module."""
COMPILER_PREFIX = "Developer debug context: raised exception "
"""Words of torch.compile before an error in the code that it compiles."""
LONGEST_REASON = 200


class CannotRunError(RuntimeError):
    """The way cannot run the case; the message says why."""


def in_short(error: BaseException) -> str:
    """Return the first informative line of an error, 200 characters at most."""
    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        return f"{PACKAGES[error.name]} is not installed"
    inner = str(error).partition(COMPILER_PREFIX)[2]
    text = next((line.strip() for line in (inner or str(error)).splitlines() if line.strip()), "no message")
    if not inner and not isinstance(error, CannotRunError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


@dataclass(frozen=True)
class Case:
    """Self-attention over ``length`` tokens, or one query against ``length`` cached keys (decode)."""

    passing: Pass
    length: int
    batch: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: str
    seed: int

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self.passing == "forward+backward"

    @property
    def num_queries(self) -> int:
        """Number of queries: 1 in decoding, else the number of keys."""
        return 1 if self.passing == "decode" else self.length

    @property
    def offset(self) -> int:
        """Position of the first query."""
        return self.length - self.num_queries

    @property
    def bias_bytes(self) -> int:
        """Bytes of one matrix of queries by keys per head, shared by the batch."""
        return self.heads * self.num_queries * self.length * self.dtype.itemsize


class Inputs(NamedTuple):
    """Queries ``(B, H, Lq, D)``, keys and values ``(B, H, L, D)``: independent, of unit variance."""

    query: Tensor
    key: Tensor
    value: Tensor


def make_inputs(case: Case, head_dim: int | None = None) -> Inputs:
    """Draw the tensors of a case from its seed, with gradients where the pass has a backward half.

    Args:
        case: the case.
        head_dim: replaces the head dimension of the case.
    """
    generator = torch.Generator().manual_seed(case.seed)

    def draw(length: int) -> Tensor:
        numbers = torch.randn(case.batch, case.heads, length, head_dim or case.head_dim, generator=generator)
        return numbers.to(case.device, case.dtype).requires_grad_(case.backward)

    return Inputs(draw(case.num_queries), draw(case.length), draw(case.length))


class Prepared(NamedTuple):
    """A way, ready to run in a case."""

    run: Callable[[], Tensor]
    """One forward pass; the output in the way's own layout."""
    leaves: tuple[Tensor, ...]
    """Tensors whose gradients a backward pass computes."""
    expected: Callable[[slice], Tensor]
    """Rows of the output by the dense formula in float64, ``(B, H, rows, Dv)``."""
    shape: tuple[int, ...]
    """Shape of the output: ``(B, H, Lq, Dv)`` or, heads side by side, ``(B, Lq, H Dv)``."""


def prepared(
    case: Case,
    inputs: Inputs,
    run: Callable[[], Tensor],
    prior: Prior | None = None,
    *,
    leaves: tuple[Tensor, ...] | None = None,
    flat: bool = False,
    positions: Tensor | None = None,
    logit_scale: SSMax | None = None,
    **options: Any,
) -> Prepared:
    """Combine a forward pass with its leaves, its reference and the shape of its output.

    Args:
        case: the case.
        inputs: the tensors of the reference.
        run: the forward pass.
        prior: the prior of the reference.
        leaves: by default the inputs and the parameters of ``prior`` and ``logit_scale`` that train.
        flat: whether ``run`` returns heads side by side, as wide as the heads of the case.
        positions: of queries and keys; counted from 0 by default.
        logit_scale: the logit scale of the reference.
        options: other options of :func:`attend` for the reference.
    """
    query, key, value = inputs
    keys = torch.arange(case.length, device=case.device) if positions is None else positions

    @torch.no_grad()
    def expected(rows: slice) -> Tensor:
        return attend(
            query[:, :, rows].double(),
            key.double(),
            value.double(),
            prior,
            logit_scale=logit_scale,
            query_positions=keys[case.offset :][rows],
            key_positions=keys,
            backend="reference",
            **options,
        )

    shape = (case.batch, case.num_queries, case.heads * case.head_dim) if flat else (*query.shape[:-1], value.shape[-1])
    return Prepared(run, leaves or (*inputs, *learned(prior, logit_scale)), expected, shape)


def learned(*modules: nn.Module | None) -> tuple[Tensor, ...]:
    """Return the parameters of modules that train."""
    return tuple(p for module in modules if module is not None for p in module.parameters() if p.requires_grad)


class Need(NamedTuple):
    """Memory in bytes that grows with the square of the length."""

    kept: int = 0
    """Between runs: biases that are made once."""
    working: int = 0
    """During a run, above ``kept``."""


@dataclass(frozen=True)
class Way:
    """One contender."""

    name: str
    """Name in ``--ways`` and recipes."""
    prepare: Callable[[Case, Inputs], Prepared]
    kind: Literal["limit", "ours", "others"]
    label: str
    """Label in tables and figures."""
    times: str
    """Description of the timed code."""
    baseline: str = "plain"
    """Name of the way that its times are divided by, repetition by repetition."""
    counterpart: str | None = None
    """Name of the way of this library that computes the same function."""
    compiled: bool = False
    """Whether the first run at each length compiles."""
    kept: float = 0.0
    """Matrices of queries by keys between runs, shared by the batch: biases that are made once."""
    forward: float = 0.0
    """Further matrices during a forward pass."""
    backward: float = 0.0
    """Further matrices during a forward and backward pass."""
    per_sequence: bool = True
    """Whether each sequence of the batch has its own ``forward`` and ``backward`` matrices."""

    def need(self, case: Case) -> Need:
        """Estimate the memory of a case; a single query needs none.

        The numbers of matrices are measured (see the tests), not derived: they depend on when PyTorch frees memory.
        """
        if case.passing == "decode":
            return Need()
        working = (self.backward if case.backward else self.forward) * (case.batch if self.per_sequence else 1)
        return Need(round(self.kept * case.bias_bytes), round(working * case.bias_bytes))
