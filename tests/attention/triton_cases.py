"""Attention problems for Triton's kernels, in small blocks: on a CUDA device, or on the CPU by Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from attention_cases import Case
from attention_errors import Cotangents, Result, compute
from hypothesis import strategies as st
from torch import Tensor, nn

from attention_priors.attention.triton import backend
from attention_priors.attention.triton.backend import INSTALLED, Blocks, Configuration

ON_CUDA = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            ON_CUDA or not INSTALLED, reason="the interpreter is for machines without CUDA, and needs triton"
        ),
    ),
    pytest.param("cuda", marks=pytest.mark.cuda),
]
"""Devices of the kernels' tests."""


def place(case: Case, device: str) -> Case:
    """Move a problem to a device."""
    moved = {}
    for part in fields(case):
        value = getattr(case, part.name)
        if isinstance(value, Tensor):
            moved[part.name] = value.to(device)
        elif isinstance(value, nn.Module):
            moved[part.name] = copy.deepcopy(value).to(device)
    return replace(case, **moved)


def compute_on(device: str, case: Case, cotangents: Cotangents | None = None) -> Result:
    """Compute a problem by the kernels, and return the results on the CPU."""
    if cotangents is not None:
        cotangents = Cotangents(cotangents.out.to(device), cotangents.lse.to(device))
    found = compute(place(case, device), "triton", cotangents)
    return Result(found.out.cpu(), found.lse.cpu(), {name: grad.cpu() for name, grad in found.grads.items()})


@st.composite
def configurations(draw: st.DrawFn, slot: int = backend.SLOT) -> Configuration:
    """Draw blocks that divide a slot. They are so small that short sequences need several, square or not."""
    sizes = [size for size in (16, 32, 64) if size <= slot]

    def blocks() -> Blocks:
        return Blocks(draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes)), 4, 2)

    return Configuration(blocks(), blocks(), blocks())


def same(blocks: Blocks) -> Configuration:
    """Return one block size for all kernels."""
    return Configuration(blocks, blocks, blocks)


@contextmanager
def configured(configuration: Configuration, slot: int = backend.SLOT) -> Iterator[None]:
    """Run kernels with these blocks. The interpreter also checks that every address lies inside a tensor."""
    with (
        mock.patch.multiple(backend, configuration=lambda *_: configuration, SLOT=slot),
        nullcontext() if ON_CUDA else guarded_memory(),
        nullcontext() if ON_CUDA else fast_interpreter(),
    ):
        yield


class Guard:
    """Check every address that the interpreter accesses."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.starts = np.empty(0, dtype=np.uint64)
        self.ends = self.starts

    def allow(self, tensors: list[Tensor]) -> None:
        last = [sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in tensors]
        starts = [x.data_ptr() for x in tensors]
        ends = [x.data_ptr() + (place + 1) * x.element_size() for x, place in zip(tensors, last, strict=True)]
        order = np.argsort(starts)
        self.starts, self.ends = (np.array(numbers, dtype=np.uint64)[order] for numbers in (starts, ends))

    def check(self, addresses: np.ndarray, mask: np.ndarray) -> None:
        used = np.asarray(addresses)[np.asarray(mask)].ravel()
        if len(used):
            place = np.searchsorted(self.starts, used, side="right") - 1
            assert (place >= 0).all(), "an address before every tensor"
            assert (used < self.ends[place]).all(), "an address outside of every tensor"

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        self.check(addresses, mask)
        return self.memory.load(addresses, mask, other, dtype)

    def atomic_rmw(self, kind: Any, addresses: np.ndarray, numbers: np.ndarray, mask: np.ndarray, order: Any) -> Any:
        self.check(addresses, mask)
        return self.memory.atomic_rmw(kind, addresses, numbers, mask, order)

    def store(self, addresses: np.ndarray, numbers: np.ndarray, mask: np.ndarray) -> None:
        self.check(addresses, mask)
        self.memory.store(addresses, numbers, mask)


@contextmanager
def guarded_memory() -> Iterator[None]:
    from triton.runtime import interpreter

    guard = Guard(interpreter._interpreter)
    launch = backend.launch

    def allowed(*how: Any, **arguments: Any) -> None:
        guard.allow([x for x in arguments.values() if isinstance(x, Tensor)])
        launch(*how, **arguments)

    with (
        mock.patch.object(interpreter, "_interpreter", guard),
        mock.patch.object(backend, "launch", allowed),
    ):
        yield


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Halve the interpreter's work.

    It would patch ``triton.language`` at each call of a function; once per launch and module is enough. It would also
    look for overflows in every sum and product of integers, and then drop what it found, as it does not debug.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    run = interpreter.GridExecutor.__call__
    unchecked = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patched: dict[int, Any] = {}

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in patched:
            patched[module] = patch(function)
        return patched[module]

    def launch(executor: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        run(executor, *arguments, **options)

    with (
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch),
        mock.patch.object(interpreter.interpreter_builder, "options", unchecked),
    ):
        yield
