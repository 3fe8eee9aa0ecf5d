"""Priors and logit scales of some heads: the others keep plain attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.attention import SSMax
from attention_priors.priors import Prior, Sum
from attention_priors.priors.base import Lanes, ScaledDistance


def on_heads(num_heads: int, prior: Prior, heads: Sequence[int]) -> Prior:
    """A prior of some heads of a layer.

    Args:
        num_heads: ``H``, of the whole layer.
        prior: with as many heads as ``heads`` has entries; one that hides keys (a :class:`Window`) has no such form.
        heads: which of the layer's heads have it, in the prior's order.

    Raises:
        ValueError: if the prior hides keys.
    """
    terms = list(prior.terms())
    for term in terms:
        if term.visible_at(torch.zeros(1, dtype=torch.int64)) is not None:
            raise ValueError(f"a {type(term).__name__} hides keys from all heads of a layer; heads must be None")
    parts = [OnHeads(num_heads, term, heads) for term in terms]
    return parts[0] if len(parts) == 1 else Sum(parts)


class OnHeads(Prior):
    """A prior of some heads, and the uniform one of the others: their log-prior is 0.

    It has no description of its own: :func:`attach` makes it from the prior's and its ``heads``.
    """

    def __init__(self, num_heads: int, prior: Prior, heads: Sequence[int]) -> None:
        super().__init__(num_heads)
        self.prior = prior
        self.heads = tuple(heads)
        self.structure = prior.structure
        self.name, self.over_grid = prior.name, prior.over_grid  # parameters of a sum are named after its terms

    def spread(self, numbers: Tensor, dim: int, others: float = 0.0) -> Tensor:
        """Numbers of the prior's heads, which stand along ``dim``, among those of the whole layer."""
        shape = list(numbers.shape)
        shape[dim] = self.num_heads
        index = torch.tensor(self.heads, device=numbers.device)
        return numbers.new_full(shape, others).index_copy(dim, index, numbers)

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The prior's, and 0 on the other heads."""
        return self.spread(self.prior.log_prior_at(distance, dtype), 0)

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """The prior's, with features of 0 on the other heads."""
        found = self.prior.lanes(query_positions, key_positions, dtype=dtype)
        return Lanes(self.spread(found.query, -3), found.key)

    def log_prior_of_key(self, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The prior's, and 0 on the other heads."""
        return self.spread(self.prior.log_prior_of_key(key_positions, dtype), 0)

    def scaled_distance(self, query_positions: Tensor, distance: Tensor) -> ScaledDistance:
        """Return the network of the prior, with weights of 0 on the other heads."""
        found = self.prior.scaled_distance(query_positions, distance)
        return found._replace(outer=self.spread(found.outer, 0))

    def check(self, *, causal: bool) -> None:
        """Call the method of the prior."""
        self.prior.check(causal=causal)

    def reset_parameters(self) -> None:
        """Call the method of the prior."""
        self.prior.reset_parameters()

    def natural_parameters(self) -> dict[str, Tensor]:
        """The prior's, and nan on the other heads, which have none."""
        return {name: self.spread(x, 0, torch.nan) for name, x in self.prior.natural_parameters().items()}

    def to_config(self) -> dict[str, Any]:
        """None: an error."""
        raise TypeError("a prior of some heads has no description of its own; see the model's config")

    def extra_repr(self) -> str:
        """Which heads."""
        return f"heads={list(self.heads)} of {self.num_heads}"


class ScaleOnHeads(nn.Module):
    """A logit scale of some heads; the others' is 1. It is called as :class:`SSMax` is."""

    def __init__(self, num_heads: int, scale: SSMax, heads: Sequence[int]) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = scale
        self.heads = tuple(heads)
        self.include_prior = scale.include_prior

    def forward(self, visible_keys: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``c``, ``(..., H, Lq)``."""
        index = torch.tensor(self.heads, device=visible_keys.device)
        some = visible_keys if visible_keys.shape[-2] == 1 else visible_keys.index_select(-2, index)
        found = self.scale(some, dtype)
        ones = found.new_ones((*found.shape[:-2], self.num_heads, found.shape[-1]))
        return ones.index_copy(-2, index, found)
