"""The product of several priors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.priors.base import Lanes, Prior, Structure, join_lanes


class Sum(Prior):
    """The product of several priors, made by ``a + b``: their log-priors add.

    Args:
        priors: at least one prior; all with the same ``num_heads``, and all over a line or all on a grid.
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
                "priors that are added must have the same num_heads, got "
                + ", ".join(f"{type(prior).__name__}({prior.num_heads})" for prior in priors)
            )
        placed = [term for prior in priors for term in prior.terms() if term.over_grid is not None]
        if len({term.over_grid for term in placed}) > 1:
            got = (f"{type(term).__name__} ({'on a grid' if term.over_grid else 'over a line'})" for term in placed)
            raise ValueError(f"priors that are added must all be over a line or all on a grid, got {', '.join(got)}")
        super().__init__(heads.pop())
        self.priors = nn.ModuleList(priors)
        structure = Structure.STATIONARY | Structure.OF_KEYS | Structure.FACTORED
        for term in self.terms():
            structure &= term.structure
        self.structure = structure

    def terms(self) -> Iterator[Prior]:
        """The summands."""
        for prior in self.priors:
            assert isinstance(prior, Prior)
            yield from prior.terms()

    def check(self, *, causal: bool) -> None:
        """Check every summand."""
        for term in self.terms():
            term.check(causal=causal)

    def log_prior_at(self, distance: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The sum of the summands' log-priors; an error if one of them is not stationary."""
        first, *others = (term.log_prior_at(distance, *args, **kwargs) for term in self.terms())
        return sum(others, first)

    def log_prior_of_key(self, key_positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The sum of the summands' log-priors; an error if one of them depends on more than the key."""
        first, *others = (term.log_prior_of_key(key_positions, *args, **kwargs) for term in self.terms())
        return sum(others, first)

    def lanes(self, query_positions: Tensor, key_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Lanes:
        """The summands' lanes side by side; an error if one of them is not factored."""
        return join_lanes([term.lanes(query_positions, key_positions, dtype=dtype) for term in self.terms()])

    def visible_at(self, distance: Tensor) -> Tensor | None:
        """Return whether every summand lets a query see a key at each distance; None if all do everywhere."""
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
        """Each summand's parameters, their names led by the summand's: ``laplace.slope``.

        Further summands of the same kind are numbered: ``laplace_2.slope``.
        """
        parameters, seen = dict[str, Tensor](), Counter[str]()
        for term in self.terms():
            seen[term.name] += 1
            lead = term.name if seen[term.name] == 1 else f"{term.name}_{seen[term.name]}"
            parameters |= {f"{lead}.{name}": value for name, value in term.natural_parameters().items()}
        return parameters

    def to_config(self) -> dict[str, Any]:
        """``{"name": "sum", "priors": [...]}``."""
        return {"name": self.name, "priors": [term.to_config() for term in self.terms()]}

    def extra_repr(self) -> str:
        """Nothing: the summands print themselves."""
        return ""
