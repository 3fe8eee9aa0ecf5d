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


def test_nested_observers_are_all_called() -> None:
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


def test_an_error_removes_the_observer() -> None:
    seen: list[Problem] = []
    with pytest.raises(RuntimeError, match="enough"), observed(seen.append):
        raise RuntimeError("enough")
    attend(X, X, X, PRIOR)
    assert not seen


def test_observers_do_not_see_other_threads() -> None:
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
def test_compiled_without_a_graph_break_with_and_without_observer(first_elsewhere: bool) -> None:
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
            del seen[number + 1 :]  # arguments of the reference
    compiled(X)
    assert len(seen) == 2
