"""The priors of a trained model as numbers and curves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypedDict

import torch
from torch import Tensor, nn

from attention_priors.attention import SSMax
from attention_priors.hf.heads import ScaleOnHeads
from attention_priors.priors import Prior
from attention_priors.priors.base import check_over_line


class PriorRow(TypedDict):
    """One head's prior."""

    layer: int
    head: int
    prior: str
    """Its name in the catalogue; ``a + b`` for sums."""
    parameters: dict[str, float | None]
    """Natural parameters that are one number per head; None where undefined, and for heads without a prior."""
    distance: list[int]
    """Tokens between query and key."""
    log_prior: list[float | None]
    """``K``, in nats, as it was learned: no logit scale is in it. None where the prior hides the key."""


class LogitScaleRow(TypedDict):
    """One head's SSMax scale."""

    layer: int
    head: int
    s: float


def curve_distances(length: int, every: int = 16) -> list[int]:
    """0, every distance up to ``every``, then about eight per doubling, the last of them ``length - 1``."""
    if length < 1:
        raise ValueError(f"length must be a positive number of tokens, got {length}")
    doublings = math.log2(max(length - 1, 1))
    spaced = torch.logspace(0, doublings, 1 + round(8 * doublings), base=2.0, dtype=torch.float64).round()
    return sorted(d for d in {0, length - 1, *range(every + 1), *map(int, spaced)} if d < length)


@torch.no_grad()
def prior_rows(layers: list[nn.Module], *, length: int) -> list[PriorRow]:
    """The prior of every head, as seen by the last query of a text, before any logit scale.

    Args:
        layers: one module per layer; the first :class:`Prior` in each is described. A prior that is shared
            by all layers is given as a single layer.
        length: of the text, in tokens.
    """
    rows: list[PriorRow] = []
    for layer, prior, device in priors_of(layers):
        distances = torch.tensor(curve_distances(length), device=device)
        last = torch.tensor([length - 1], device=device)
        curves = prior.log_prior(last, last - distances, torch.float64)[:, 0]
        parameters = _scalars(prior)
        for head in range(prior.num_heads):
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "prior": " + ".join(term.name for term in prior.terms()),
                    "parameters": {name: finite(values[head]) for name, values in parameters.items()},
                    "distance": distances.tolist(),
                    "log_prior": [finite(value) for value in curves[head]],
                }
            )
    return rows


@torch.no_grad()
def logit_scale_rows(layers: list[nn.Module]) -> list[LogitScaleRow]:
    """SSMax's ``s`` of every head that has one; ``layers`` as in :func:`prior_rows`."""
    rows: list[LogitScaleRow] = []
    for layer, module in enumerate(layers):
        for scale in logit_scales_of(module):
            some = isinstance(scale, ScaleOnHeads)
            values = (scale.scale if some else scale).s
            heads = scale.heads if some else range(len(values))
            for head, value in sorted(zip(heads, values.tolist(), strict=True)):
                rows.append({"layer": layer, "head": head, "s": value})
    return rows


def logit_scales_of(module: nn.Module) -> list[SSMax | ScaleOnHeads]:
    """The logit scales in a module; one of some heads as the whole layer has it."""
    within = {part.scale for part in module.modules() if isinstance(part, ScaleOnHeads)}
    return [part for part in module.modules() if isinstance(part, SSMax | ScaleOnHeads) and part not in within]


def priors_of(layers: list[nn.Module]) -> Iterator[tuple[int, Prior, torch.device]]:
    """The first :class:`Prior` in each layer that has one: the layer's number, the prior and where it lives.

    Raises:
        ValueError: one is over a grid: what is said of it would be of a line.
    """
    for layer, module in enumerate(layers):
        prior = next((part for part in module.modules() if isinstance(part, Prior)), None)
        if prior is not None:
            check_over_line(prior)
            yield layer, prior, next((parameter.device for parameter in prior.parameters()), torch.device("cpu"))


def _scalars(prior: Prior) -> dict[str, Tensor]:
    values = {name: x for name, x in prior.natural_parameters().items() if x.dim() == 1}
    if "theta_alpha" in values:
        values["theta_beta"] = values["beta"]  # BAM's name for it
    return values


def finite(value: Tensor) -> float | None:
    """A number, or None for what JSON has no number for."""
    return float(value) if bool(torch.isfinite(value)) else None
