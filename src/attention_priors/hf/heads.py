"""Priors and logit scales on some heads of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.attention import SSMax
from attention_priors.priors import Prior, Sum
from attention_priors.priors.base import Lanes, ScaledDistance


def on_heads(num_heads: int, prior: Prior, heads: Sequence[int]) -> Prior:
    """Return a prior that applies to some heads of a layer.

    Args:
        num_heads: number of heads of the whole layer, ``H``.
        prior: a prior with ``len(heads)`` heads. A prior that hides keys (a :class:`Window`) is not supported.
        heads: the layer's heads that get the prior, in the prior's order.

    Raises:
        ValueError: the prior hides keys.
    """
    terms = list(prior.terms())
    for term in terms:
        if term.visible_at(torch.zeros(1, dtype=torch.int64)) is not None:
            raise ValueError(
                f"heads must be None for a {type(term).__name__}, which hides keys from all heads of a layer"
            )
    parts = [OnHeads(num_heads, term, heads) for term in terms]
    return parts[0] if len(parts) == 1 else Sum(parts)


class OnHeads(Prior):
    """Prior on some heads, and log-prior 0 on the others.

    This class has no description: :func:`attach` builds it from the prior's description and ``heads``.
    """

    def __init__(self, num_heads: int, prior: Prior, heads: Sequence[int]) -> None:
        super().__init__(num_heads)
        self.prior = prior
        self.heads = tuple(heads)
        self.structure = prior.structure
        self.name, self.over_grid = prior.name, prior.over_grid  # a sum prefixes parameters by the names of its terms

    def spread(self, numbers: Tensor, dim: int, others: float = 0.0) -> Tensor:
        """Expand a tensor from the prior's heads to all heads of the layer, along ``dim``."""
        shape = list(numbers.shape)
        shape[dim] = self.num_heads
        index = torch.tensor(self.heads, device=numbers.device)
        return numbers.new_full(shape, others).index_copy(dim, index, numbers)

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the prior's log-prior, and 0 on the other heads."""
        return self.spread(self.prior.log_prior_at(distance, dtype), 0)

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """Return the prior's lanes, with query features of 0 on the other heads."""
        found = self.prior.lanes(query_positions, key_positions, dtype=dtype)
        return Lanes(self.spread(found.query, -3), found.key)

    def log_prior_of_key(self, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the prior's log-prior, and 0 on the other heads."""
        return self.spread(self.prior.log_prior_of_key(key_positions, dtype), 0)

    def scaled_distance(self, query_positions: Tensor, distance: Tensor) -> ScaledDistance:
        """Return the prior's network, with output weights of 0 on the other heads."""
        found = self.prior.scaled_distance(query_positions, distance)
        return found._replace(outer=self.spread(found.outer, 0))

    def check(self, *, causal: bool) -> None:
        """Run the prior's check."""
        self.prior.check(causal=causal)

    def natural_parameters(self) -> dict[str, Tensor]:
        """Return the prior's parameters, and nan on the other heads."""
        return {name: self.spread(x, 0, torch.nan) for name, x in self.prior.natural_parameters().items()}

    def to_config(self) -> dict[str, Any]:
        """Raise a TypeError: the model's config describes the prior and its heads."""
        raise TypeError("a prior on some heads has no description; see attached_priors in the model's config")

    def extra_repr(self) -> str:
        """Return the heads that have the prior."""
        return f"heads={list(self.heads)} of {self.num_heads}"


class ScaleOnHeads(nn.Module):
    """Logit scale on some heads, and 1 on the others. The interface is that of :class:`SSMax`."""

    def __init__(self, num_heads: int, scale: SSMax, heads: Sequence[int]) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = scale
        self.heads = tuple(heads)
        self.include_prior = scale.include_prior

    def forward(self, visible_keys: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the logit scale ``c``, ``(..., H, Lq)``."""
        index = torch.tensor(self.heads, device=visible_keys.device)
        some = visible_keys if visible_keys.shape[-2] == 1 else visible_keys.index_select(-2, index)
        found = self.scale(some, dtype)
        ones = found.new_ones((*found.shape[:-2], self.num_heads, found.shape[-1]))
        return ones.index_copy(-2, index, found)
