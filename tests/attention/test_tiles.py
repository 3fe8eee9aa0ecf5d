"""Tiles hold every visible pair of query and key exactly once, and few hidden pairs."""

from typing import Any

import pytest
import torch
from attention_cases import Case, cases, examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_priors.attention import attend
from attention_priors.attention.geometry import Geometry
from attention_priors.attention.problem import make_problem
from attention_priors.attention.tiles.tiling import Tile, Tiling, divide
from attention_priors.priors import GeneralizedGaussian


def geometry_of(case: Case) -> Geometry:
    options: dict[str, Any] = {**case.options(), "logit_scale": None, "visible_keys": None}
    return make_problem(case.query, case.key, case.value, None, **options, relative=None, dropout_p=0.0).geometry


def counted(geometry: Geometry, tiles: list[Tile]) -> Tensor:
    """Count the tiles that hold each pair."""
    count = torch.zeros(geometry.batch, geometry.num_queries, geometry.num_keys, dtype=torch.int64)
    for tile in tiles:
        count[tile.batches, tile.rows, tile.keys] += 1
    return count


def seen_by(geometry: Geometry, reach: tuple[int, int] | None) -> Tensor:
    shape = (geometry.batch, geometry.num_queries, geometry.num_keys)
    visible = geometry.visible()
    seen = torch.ones(shape, dtype=torch.bool) if visible is None else visible.any(1).expand(shape)
    if reach is not None:
        distance = geometry.query_positions.unsqueeze(-1) - geometry.key_positions.unsqueeze(-2)
        seen = seen & (distance >= reach[0]) & (distance <= reach[1])
    return seen


REACHES = st.sampled_from([None, None, (0, 3), (-2, 7), (-40, 40), (3, 9)])


@examples(50)
@given(cases("none", longest=60), REACHES, st.integers(1, 30), st.integers(1, 9), st.sampled_from([None, 5, 16]))
def test_row_blocks_cover_all_rows_once(
    case: Case, reach: tuple[int, int] | None, rows: int, diagonal: int, keys: int | None
) -> None:
    geometry = geometry_of(case)
    tiling = Tiling.of(geometry, reach)
    blocks = list(tiling.row_blocks(rows, diagonal, keys))
    tiles = [tile for block in blocks for strip in block.strips for tile in strip]
    count = counted(geometry, tiles)
    assert int(count.max()) <= 1
    assert bool((count[seen_by(geometry, reach)] == 1).all())
    rows_held = torch.zeros(geometry.batch, geometry.num_queries, dtype=torch.int64)
    for block in blocks:
        for strip in block.strips:
            assert [tile.start for tile in strip[1:]] == [tile.stop for tile in strip[:-1]]
            assert (strip[0].start, strip[-1].stop) == (block.whole.start, block.whole.stop)
            assert len(strip) == 1 or all(diagonal <= tile.shape[0] < 2 * diagonal for tile in strip)
            assert all(tile.batches == block.whole.batches for tile in strip)
        rows_held[block.whole.batches, block.whole.rows] += 1
    assert bool((rows_held == 1).all())


@examples(50)
@given(cases("none", longest=60), REACHES, st.integers(1, 30))
def test_blocks_cover_visible_pairs_once(case: Case, reach: tuple[int, int] | None, rows: int) -> None:
    geometry = geometry_of(case)
    tiling = Tiling.of(geometry, reach)
    tiles = list(tiling.blocks(rows))
    assert all(tile.shape[0] <= rows and tile.start // rows == (tile.stop - 1) // rows for tile in tiles)
    count = counted(geometry, tiles)
    assert int(count.max()) <= 1
    assert bool((count[seen_by(geometry, reach)] == 1).all())
    of_texts = [tile for text in range(geometry.batch) for tile in tiling.of_texts(slice(text, text + 1)).blocks(rows)]
    assert bool((counted(geometry, of_texts) == count).all())


@examples(100)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 6), st.integers(1, 50), st.booleans())
def test_parts_cover_all_texts_and_heads_once(batch: int, kv_heads: int, group: int, count: int, whole: bool) -> None:
    heads = kv_heads * group
    parts = divide(batch, heads, kv_heads, count, group if whole else 1)
    held = torch.zeros(batch, heads, dtype=torch.int64)
    for part in parts:
        held[part.batches, part.heads] += 1
        number = part.heads.stop - part.heads.start
        shared = {head // group for head in range(part.heads.start, part.heads.stop)}
        assert shared == set(range(part.kv_heads.start, part.kv_heads.stop))
        assert number % group == 0 or (len(shared) == 1 and not whole)
    assert bool((held == 1).all())
    assert len(parts) >= min(count, batch * (kv_heads if whole else heads)) / 4


@examples(60, "unmasked")
@given(cases("none", longest=300))
def test_tiles_without_masks_hide_by_distance_only(case: Case) -> None:
    geometry = geometry_of(case)
    tiling = Tiling.of(geometry, None)
    if not tiling.masked:
        allowed = geometry.allowed(slice(None), slice(None))
        held = counted(geometry, tiling.segments) > 0
        assert allowed is None or bool(allowed.any(1).expand_as(held)[held].all())


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, 1),
        ({"document_ids": torch.arange(600) // 150}, 4),
        ({"key_padding_mask": torch.arange(600) < 70}, 1),
        ({"document_ids": torch.arange(600) // 150, "key_padding_mask": torch.arange(600) >= 500}, 4),
    ],
)
def test_long_documents_and_padding_at_the_ends_need_no_masks(options: dict[str, Tensor], number: int) -> None:
    x = torch.zeros(2, 1, 600, 1)
    case = Case(x, x, x, **{name: value.expand(2, -1) for name, value in options.items()})  # pyright: ignore[reportArgumentType]
    tiling = Tiling.of(geometry_of(case), None)
    assert not tiling.masked
    assert len(tiling.segments) == number
    assert all(segment.batches == slice(0, 2) for segment in tiling.segments)


def test_short_documents_and_gaps_in_the_padding_need_masks() -> None:
    x = torch.zeros(1, 1, 600, 1)
    for options in (
        {"document_ids": torch.arange(600)[None] // 5},
        {"key_padding_mask": torch.arange(600)[None] % 7 == 3},
        {"document_ids": torch.arange(600)[None] % 2},
    ):
        tiling = Tiling.of(geometry_of(Case(x, x, x, **options)), None)  # pyright: ignore[reportArgumentType]
        assert tiling.masked


def test_a_window_computes_few_hidden_pairs() -> None:
    x = torch.zeros(1, 1, 20000, 1)
    tiling = Tiling.of(geometry_of(Case(x, x, x)), (0, 255))
    pairs = sum(
        rows * keys
        for block in tiling.row_blocks(1024, 128, None)
        for strip in block.strips
        for rows, keys in (tile.shape for tile in strip)
    )
    assert pairs <= 1.5 * 256 * 20000


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 4), (200, 300)])
def test_a_prior_learns_nothing_if_all_keys_are_in_the_future(queries: int, keys: int) -> None:
    prior, length = GeneralizedGaussian(2, learn=True), queries + keys
    query, key, value = (torch.randn(1, 2, number, 8) for number in (queries, keys, keys))
    positions = torch.arange(length).unsqueeze(0)
    options: dict[str, Any] = {"query_positions": positions[:, :queries], "key_positions": positions[:, queries:]}
    out = attend(query, key, value, prior, backend="toeplitz", **options)
    out.sum().backward()
    assert not out.any()
    for parameter in prior.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
