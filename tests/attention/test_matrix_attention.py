"""Which problems are computed as one matrix. `test_backends_against_reference.py` tests that it is right."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from attention_priors import GeneralizedGaussian, SSMax, attend
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.tiles import backward, forward, short


def ways(num_queries: int, num_keys: int, **options: Any) -> list[str]:
    """Which modules compute the forward and the backward pass."""
    called: list[str] = []

    def noted(module: Any, name: str) -> Any:
        whole = getattr(module, name)

        def note(*arguments: Any) -> Any:
            called.append(f"{name} of {module.__name__.rpartition('.')[2]}")
            return whole(*arguments)

        return mock.patch.object(module, name, note)

    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, num_queries, 4, generator=generator, requires_grad=True)
    key = torch.randn(2, 2, num_keys, 4, generator=generator)
    prior = GeneralizedGaussian(2, init="laplace")
    with ExitStack() as stack:
        for module, name in ((short, "forward"), (short, "backward"), (forward, "forward"), (backward, "backward")):
            stack.enter_context(noted(module, name))
        attend(query, key, key, prior, logit_scale=SSMax(2), backend="toeplitz", **options).sum().backward()
    return called


MATRIX = ["forward of short", "backward of short"]
BLOCKS = ["forward of forward", "backward of backward"]


def test_short_contexts_are_one_matrix() -> None:
    documents = torch.tensor([[0] * 50 + [1] * 78, [0] * 128])
    assert ways(128, 128) == MATRIX
    assert ways(128, 128, document_ids=documents) == MATRIX
    assert ways(16, 128) == MATRIX


def test_long_ones_are_not() -> None:
    assert ways(256, 256) == BLOCKS
    assert ways(128, 512) == BLOCKS
    with mock.patch.object(short, "MOST_NUMBERS", 4 * 128 * 128 - 1):
        assert ways(128, 128) == BLOCKS


def test_neither_is_one_query() -> None:
    assert ways(1, 100) == BLOCKS


def test_nor_what_is_pruned() -> None:
    assert ways(16, 600) == MATRIX
    assert ways(16, 600, tolerance=1e-6) == BLOCKS


@pytest.mark.parametrize(
    ("documents", "offset"),
    [
        ([[0, 0, 1, 1, 2], [3, 3, 3, 7, 7]], 2),
        ([[2, 2, 1, 1, 0], [0, 0, 0, 0, 0]], 2),  # falling, yet each is one run
        ([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0]], None),
    ],
)
def test_documents_in_one_run_each_leave_an_offset(documents: list[list[int]], offset: int | None) -> None:
    ids = torch.tensor(documents)
    geometry = Geometry(2, 1, 3, 5, ids.device, True, query_documents=ids[:, 2:], key_documents=ids)
    assert geometry.offset == offset
