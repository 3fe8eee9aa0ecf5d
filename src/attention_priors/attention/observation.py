"""Seeing what attention is asked while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attention_priors.attention.problem import Problem

See = Callable[[Problem], None]

OBSERVERS: list[See] = []
"""Those that are told. Whoever computes attention looks whether there are any: that costs nothing."""


@contextmanager
def observed(see: See) -> Iterator[None]:
    """Within this block, ``see`` is told every problem that :func:`attend` is asked, before it is computed.

    Args:
        see: what is called, in the order in which attention is computed; its errors end the computation.
    """
    OBSERVERS.append(see)
    try:
        yield
    finally:
        OBSERVERS.remove(see)


def tell(problem: Problem) -> None:
    """Tell a problem to all who want to know."""
    for see in OBSERVERS:
        see(problem)
