"""The product of several priors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.priors.base import Lanes, Prior, Structure, join_lanes


class Sum(Prior):
    """Product of several priors, made by ``a + b``: their log-priors add.

    Args:
        priors: at least one prior, all with equal ``num_heads``, and all over a line or all over a grid.
    """

    name = "sum"

    def __init__(self, priors: Sequence[Prior]) -> None:
        if not isinstance(priors, Sequence) or not all(isinstance(prior, Prior) for prior in priors):
            raise ValueError(f"priors must be a list of priors, got {priors!r}")
        if not priors:
            raise ValueError("priors must hold at least one prior, got none")
        heads = {prior.num_heads for prior in priors}
        if len(heads) > 1:
            raise ValueError(
                "added priors must have equal num_heads, got "
                + ", ".join(f"{type(prior).__name__}({prior.num_heads})" for prior in priors)
            )
        placed = [term for prior in priors for term in prior.terms() if term.over_grid is not None]
        if len({term.over_grid for term in placed}) > 1:
            got = (f"{type(term).__name__} (over a {'grid' if term.over_grid else 'line'})" for term in placed)
            raise ValueError(f"added priors must all be over a line or all over a grid, got {', '.join(got)}")
        super().__init__(heads.pop())
        self.priors = nn.ModuleList(priors)
        structure = Structure.STATIONARY | Structure.OF_KEYS | Structure.FACTORED
        for term in self.terms():
            structure &= term.structure
        self.structure = structure

    def terms(self) -> Iterator[Prior]:
        """Yield the summands."""
        for prior in self.priors:
            assert isinstance(prior, Prior)
            yield from prior.terms()

    def check(self, *, causal: bool) -> None:
        """Check every summand."""
        for term in self.terms():
            term.check(causal=causal)

    def log_prior_at(self, distance: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum of the log-priors; raise a TypeError if a summand is not stationary."""
        first, *others = (term.log_prior_at(distance, *args, **kwargs) for term in self.terms())
        return sum(others, first)

    def log_prior_of_key(self, key_positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum of the log-priors; raise a TypeError if a summand depends on more than the key."""
        first, *others = (term.log_prior_of_key(key_positions, *args, **kwargs) for term in self.terms())
        return sum(others, first)

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """Return the lanes of all summands, concatenated; raise a TypeError if a summand is not factored."""
        return join_lanes([term.lanes(query_positions, key_positions, dtype=dtype) for term in self.terms()])

    def visible_at(self, distance: Tensor) -> Tensor | None:
        """Return which distances every summand lets a query see, or None if no summand hides a key."""
        visible = None
        for term in self.terms():
            seen = term.visible_at(distance)
            if seen is not None:
                visible = seen if visible is None else visible & seen
        return visible

    def reset_parameters(self) -> None:
        """Reset every summand."""
        for term in self.terms():
            term.reset_parameters()

    def natural_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of all summands, with the summand's name as a prefix: ``laplace.slope``.

        Further summands of one kind are numbered: ``laplace_2.slope``.
        """
        parameters, seen = dict[str, Tensor](), Counter[str]()
        for term in self.terms():
            seen[term.name] += 1
            lead = term.name if seen[term.name] == 1 else f"{term.name}_{seen[term.name]}"
            parameters |= {f"{lead}.{name}": value for name, value in term.natural_parameters().items()}
        return parameters

    def to_config(self) -> dict[str, Any]:
        """Return ``{"name": "sum", "priors": [...]}``."""
        return {"name": self.name, "priors": [term.to_config() for term in self.terms()]}

    def extra_repr(self) -> str:
        """Return an empty string: the summands print themselves."""
        return ""
