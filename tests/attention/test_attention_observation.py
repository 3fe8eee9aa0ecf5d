"""Observers of calls of attention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_priors import Laplace, attend
from attention_priors.attention.attend import attend_with_weights
from attention_priors.attention.observe import observed
from attention_priors.attention.problem import Problem

X = torch.randn(1, 2, 8, 4)
PRIOR = Laplace(2)


def in_another_thread(call: Callable[[], Any]) -> None:
    found: list[Any] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not found


def test_blocks_in_blocks_are_told_each() -> None:
    outer: list[Problem] = []
    inner: list[Problem] = []
    with observed(outer.append):
        attend(X, X, X, PRIOR)
        with observed(inner.append):
            attend_with_weights(X, X, X, PRIOR)
        attend(X, X, X, PRIOR)
    attend(X, X, X, PRIOR)
    assert len(outer) == 3
    assert outer[1:2] == inner


def test_a_block_that_ends_with_an_error_is_over() -> None:
    seen: list[Problem] = []
    with pytest.raises(RuntimeError, match="enough"), observed(seen.append):
        raise RuntimeError("enough")
    attend(X, X, X, PRIOR)
    assert not seen


def test_other_threads_are_not_told_of() -> None:
    here: list[Problem] = []
    there: list[Problem] = []

    def observe() -> None:
        with observed(there.append):
            attend(X, X, X, PRIOR)

    with observed(here.append):
        in_another_thread(lambda: attend(X, X, X, PRIOR))
        assert not here
        in_another_thread(observe)
        assert not here
        attend(X, X, X, PRIOR)
    assert (len(here), len(there)) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("first_elsewhere", [False, True])
def test_compiled_without_a_graph_break_for_those_who_watch_and_those_who_do_not(first_elsewhere: bool) -> None:
    def call(x: Tensor) -> Tensor:
        return attend(x, x, x, PRIOR) * 2

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    if not first_elsewhere:
        compiled(X)
    seen: list[Problem] = []
    with observed(seen.append):
        for number in range(2):
            in_another_thread(lambda: compiled(X))
            assert len(seen) == number
            torch.testing.assert_close(compiled(X), attend(X, X, X, PRIOR, backend="reference") * 2)
            del seen[number + 1 :]  # what the reference was asked
    compiled(X)
    assert len(seen) == 2
