"""Building blocks of a benchmark: a case, its tensors, and a way to compute attention."""

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
"""Prefix of torch.compile before the message of an error in the compiled code."""
LONGEST_REASON = 200


class CannotRunError(RuntimeError):
    """Error of a way that cannot run a case. The message names the reason."""


def in_short(error: BaseException) -> str:
    """Return the first informative line of an error, at most 200 characters long."""
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
    """Queries ``(B, H, Lq, D)``, keys and values ``(B, H, L, D)``, independent and of unit variance."""

    query: Tensor
    key: Tensor
    value: Tensor


def make_inputs(case: Case) -> Inputs:
    """Draw the tensors of a case from its seed; they require gradients if the pass has a backward half."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(length: int) -> Tensor:
        numbers = torch.randn(case.batch, case.heads, length, case.head_dim, generator=generator)
        return numbers.to(case.device, case.dtype).requires_grad_(case.backward)

    return Inputs(draw(case.num_queries), draw(case.length), draw(case.length))


class Prepared(NamedTuple):
    """A way that is ready to run in a case."""

    run: Callable[[], Tensor]
    """Function that runs one forward pass and returns the output in the way's own layout."""
    leaves: tuple[Tensor, ...]
    """Tensors whose gradients a backward pass computes."""
    expected: Callable[[slice], Tensor]
    """Function that returns output rows by the dense formula in float64, shape ``(B, H, rows, Dv)``."""
    shape: tuple[int, ...]
    """Shape of the output: ``(B, H, Lq, Dv)`` or, with flat heads, ``(B, Lq, H Dv)``."""


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
    forbidden: Tensor | None = None,
    **options: Any,
) -> Prepared:
    """Combine a forward pass with its leaves, its reference and the shape of its output.

    Args:
        case: Case of the pass.
        inputs: Tensors of the reference.
        run: Function that runs the forward pass.
        prior: Prior of the reference.
        leaves: Tensors that get gradients. By default, the inputs and trainable parameters of ``prior`` and
            ``logit_scale``.
        flat: Whether ``run`` returns ``(B, Lq, H D)`` instead of ``(B, H, Lq, D)``.
        positions: Positions of queries and keys. By default, they are counted from 0.
        logit_scale: Logit scale of the reference.
        forbidden: Pairs that packed documents hide from the reference, boolean ``(B, 1, Lq, L)``.
        options: Other options of :func:`attend` for the reference.
    """
    query, key, value = inputs
    keys = torch.arange(case.length, device=case.device) if positions is None else positions

    @torch.no_grad()
    def expected(rows: slice) -> Tensor:
        hidden: dict[str, Any] = {} if forbidden is None else {"attn_mask": forbidden[:, :, rows]}
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
            **hidden,
        )

    shape = (case.batch, case.num_queries, case.heads * case.head_dim) if flat else (*query.shape[:-1], value.shape[-1])
    return Prepared(run, leaves or (*inputs, *learned(prior, logit_scale)), expected, shape)


def learned(*modules: nn.Module | None) -> tuple[Tensor, ...]:
    """Return the trainable parameters of modules."""
    return tuple(p for module in modules if module is not None for p in module.parameters() if p.requires_grad)


class Need(NamedTuple):
    """Memory in bytes that grows with the square of the length."""

    kept: int = 0
    """Bytes held between runs, by biases that are made once."""
    working: int = 0
    """Additional bytes during a run."""


@dataclass(frozen=True)
class Way:
    """A way to compute attention: one contender of a benchmark."""

    name: str
    """Name in ``--ways`` and recipes."""
    prepare: Callable[[Case, Inputs], Prepared]
    kind: Literal["limit", "ours", "others"]
    label: str
    """Label in tables and figures."""
    times: str
    """Description of the timed code."""
    baseline: str = "plain"
    """Name of the way by whose time this way's time is divided in each repetition."""
    counterpart: str | None = None
    """Name of this library's way that computes an equal function."""
    compiled: bool = False
    """Whether the first run at each length compiles."""
    kept: float = 0.0
    """Number of query-by-key matrices that are held between runs and shared by the batch."""
    forward: float = 0.0
    """Number of additional matrices during a forward pass."""
    backward: float = 0.0
    """Number of additional matrices during a forward and backward pass."""
    per_sequence: bool = True
    """Whether each sequence of the batch has its own ``forward`` and ``backward`` matrices."""

    def need(self, case: Case) -> Need:
        """Estimate the memory of a case; zero for a single query.

        The numbers of matrices depend on when PyTorch frees memory. They are measured in the tests, not derived.
        """
        if case.passing == "decode":
            return Need()
        working = (self.backward if case.backward else self.forward) * (case.batch if self.per_sequence else 1)
        return Need(round(self.kept * case.bias_bytes), round(working * case.bias_bytes))
