"""Problems that are computed as one tile. `test_backends_against_reference.py` checks the results."""

from typing import Any
from unittest import mock

import pytest
import torch

from attention_priors import GeneralizedGaussian, SSMax, attend
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.tiles import backend, block_problem, forward, one_tile


def tiles(num_queries: int, num_keys: int, **options: Any) -> list[str]:
    """Record the passes that take all queries and keys as one tile."""
    found: list[str] = []
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, num_queries, 4, generator=generator, requires_grad=True)
    key = torch.randn(2, 2, num_keys, 4, generator=generator)
    prior = GeneralizedGaussian(2, init="laplace")

    def noted(module: Any, name: str, way: str) -> Any:
        whole = getattr(module, name)
        return mock.patch.object(module, name, lambda *args: found.append(way) or whole(*args))

    with (
        noted(forward, "_attend_part", "tiles forward"),
        noted(one_tile, "backward", "one backward"),
        # The fast path of plain problems does not apply to them.
        mock.patch.object(backend, "attend_bare", return_value=None),
    ):
        attend(query, key, key, prior, logit_scale=SSMax(2), backend="toeplitz", **options).sum().backward()
    return found


def test_short_contexts_are_one_tile() -> None:
    documents = torch.tensor([[0] * 50 + [1] * 78, [0] * 128])
    padding = torch.arange(128) < torch.tensor([[9], [0]])
    assert tiles(128, 128) == ["one backward"]
    assert tiles(128, 128, document_ids=documents) == ["one backward"]
    assert tiles(128, 128, key_padding_mask=padding) == ["one backward"]
    assert tiles(16, 600) == ["one backward"]


def test_one_query_is_one_tile() -> None:
    assert tiles(1, 100) == tiles(1, 40_000) == ["one backward"]


def test_long_contexts_are_several_tiles() -> None:
    assert tiles(256, 256)[0] == tiles(128, 512)[0] == "tiles forward"
    with mock.patch.object(block_problem, "FEW_NUMBERS", 4 * 128 * 128 - 1):
        assert tiles(128, 128)[0] == "tiles forward"


def test_pruned_contexts_are_several_tiles() -> None:
    assert tiles(16, 600, tolerance=1e-6)[0] == "tiles forward"


@pytest.mark.parametrize(
    ("documents", "offset"),
    [
        ([[0, 0, 1, 1, 2], [3, 3, 3, 7, 7]], 2),
        ([[2, 2, 1, 1, 0], [0, 0, 0, 0, 0]], 2),  # falling positions, yet each is one run
        ([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0]], None),
    ],
)
def test_documents_in_one_run_have_a_common_offset(documents: list[list[int]], offset: int | None) -> None:
    ids = torch.tensor(documents)
    geometry = Geometry(2, 1, 3, 5, ids.device, True, query_documents=ids[:, 2:], key_documents=ids)
    assert geometry.offset == offset
