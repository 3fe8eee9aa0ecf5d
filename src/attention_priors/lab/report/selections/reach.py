"""How many heads look near, and how many far, by their priors alone, as texts grow."""

from __future__ import annotations

from typing import Literal, NamedTuple

from attention_priors.lab.report.selections.results import Results, rows

NEAR = 8
"""Tokens: half of a near-sighted head's prior is no farther away."""
FAR = 1 / 8
"""Of the text: half of a far-sighted head's prior is farther away."""

Sight = Literal["near-sighted", "far-sighted", "between"]


class Reach(NamedTuple):
    """How far one head's prior looks."""

    halves: dict[int, int]
    """By length of the text: the distance that holds half of the prior. The first length is that of training."""

    def sight(self, length: int) -> Sight:
        """What a head is called that looks so far in a text of a length."""
        if self.halves[length] <= NEAR:
            return "near-sighted"
        return "far-sighted" if self.halves[length] >= FAR * length else "between"

    @property
    def trained(self) -> Sight:
        """What it is called at the training length."""
        return self.sight(next(iter(self.halves)))


def reaches(results: Results, scheme: str) -> list[Reach]:
    """The heads of all layers and seeds of a scheme."""
    return [
        Reach({int(length): half for length, half in row["half"].items()})
        for row in rows(results, "prior_reach", scheme)
    ]


def still(heads: list[Reach], sight: Sight, length: int) -> int:
    """How many heads are called so at the training length, and at another."""
    return sum(head.trained == sight and head.sight(length) == sight for head in heads)


def lengths_of(results: Results) -> list[int]:
    """All lengths of texts that reaches were measured at, rising."""
    return sorted({int(length) for row in rows(results, "prior_reach") for length in row["half"]})
