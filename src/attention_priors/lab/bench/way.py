"""What a contender is: a way to compute attention in a case, and how to tell that it computes what it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attention_priors.attention import SSMax, attend
from attention_priors.lab.bench.case import Case, Inputs
from attention_priors.priors import Prior

Kind = Literal["limit", "ours", "others"]


class CannotRunError(RuntimeError):
    """The way cannot run the case; the message says why."""


class Prepared(NamedTuple):
    """A way, ready to run in a case."""

    run: Callable[[], Tensor]
    """One forward pass; the output in the way's own layout."""
    leaves: tuple[Tensor, ...]
    """What a backward pass computes gradients of."""
    expected: Callable[[slice], Tensor]
    """Rows of the output by the dense formula in float64, ``(B, H, rows, Dv)``."""
    shape: tuple[int, ...]
    """Of the output: ``(B, H, Lq, Dv)`` or, heads side by side, ``(B, Lq, H Dv)``."""


class Need(NamedTuple):
    """Memory in bytes that grows with the square of the length."""

    kept: int
    """Between runs: biases that are made once."""
    working: int
    """During a run, above that."""


def no_matrices(case: Case) -> Need:
    """Of a way whose memory is linear in length."""
    return Need(0, 0)


@dataclass(frozen=True)
class Way:
    """One contender."""

    name: str
    """As ``--ways`` takes it."""
    label: str
    """As tables and figures show it."""
    kind: Kind
    times: str
    """What exactly is timed."""
    prepare: Callable[[Case, Inputs], Prepared]
    need: Callable[[Case], Need] = no_matrices
    baseline: str = "plain"
    """The way that its times are divided by, repetition by repetition."""
    counterpart: str | None = None
    """The way of this library that computes the same function."""
    compiled: bool = False
    """Whether the first run at each length compiles."""


def expected_rows(
    case: Case,
    inputs: Inputs,
    prior: Prior | None = None,
    *,
    logit_scale: SSMax | None = None,
    attn_mask: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Callable[[slice], Tensor]:
    """Rows of ``attend()``'s dense formula in float64.

    Args:
        case: the case.
        inputs: its tensors.
        prior: as in :func:`attend`.
        logit_scale: as in :func:`attend`.
        attn_mask: added to the logits; ``(1, H, 1, L)``.
        softmax_scale: as in :func:`attend`.
    """

    def rows(some: slice) -> Tensor:
        stop = some.stop + case.length - case.num_queries
        with torch.no_grad():
            return attend(
                inputs.query[:, :, some].double(),
                inputs.key[:, :, :stop].double(),
                inputs.value[:, :, :stop].double(),
                prior,
                logit_scale=logit_scale,
                attn_mask=None if attn_mask is None else attn_mask[..., :stop],
                softmax_scale=softmax_scale,
                backend="reference",
            )

    return rows


def output_shape(inputs: Inputs) -> tuple[int, ...]:
    """Of an output with the heads first, ``(B, H, Lq, Dv)``."""
    return (*inputs.query.shape[:-1], inputs.value.shape[-1])


def learned(*modules: nn.Module | None) -> tuple[Tensor, ...]:
    """The parameters of modules that train."""
    return tuple(p for module in modules if module is not None for p in module.parameters() if p.requires_grad)
