"""Attention problems for Triton's kernels: on a CUDA device, or on the CPU by Triton's interpreter, in small blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from unittest import mock

import pytest
import torch
from attention_cases import Case
from attention_errors import Cotangents, Result, compute
from hypothesis import strategies as st
from torch import Tensor, nn

from attention_priors.attention import triton_backend
from attention_priors.attention.triton_backend import INSTALLED, Blocks, Configuration

ON_CUDA = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            ON_CUDA or not INSTALLED, reason="the interpreter is for machines without CUDA, and needs triton"
        ),
    ),
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device")]),
]
"""What every test of the kernels is run on."""


def place(case: Case, device: str) -> Case:
    """The same problem on a device."""
    moved = {}
    for part in fields(case):
        value = getattr(case, part.name)
        if isinstance(value, Tensor):
            moved[part.name] = value.to(device)
        elif isinstance(value, nn.Module):
            moved[part.name] = copy.deepcopy(value).to(device)
    return replace(case, **moved)


def compute_on(device: str, case: Case, cotangents: Cotangents | None = None) -> Result:
    """What the kernels give, back on the CPU."""
    if cotangents is not None:
        cotangents = Cotangents(cotangents.out.to(device), cotangents.lse.to(device))
    found = compute(place(case, device), "triton", cotangents)
    return Result(found.out.cpu(), found.lse.cpu(), {name: grad.cpu() for name, grad in found.grads.items()})


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    """Blocks so small that short sequences need several; rows and keys as many, or not."""

    def blocks() -> Blocks:
        return Blocks(draw(st.sampled_from([16, 32])), draw(st.sampled_from([16, 32])), 4, 2)

    rows, keys = draw(st.sampled_from([(16, 16), (32, 16), (32, 32), (64, 16)]))
    return Configuration(blocks(), blocks(), blocks(), Blocks(rows, keys, 4, 2))


@contextmanager
def configured(configuration: Configuration, slot: int = triton_backend.SLOT) -> Iterator[None]:
    """Kernels that work in these blocks."""
    with mock.patch.multiple(triton_backend, configuration=lambda width, dtype: configuration, SLOT=slot):
        yield
