"""Queries and keys on grids: tiles of a distance table, against the dense formula in float64."""

from typing import Any

import pytest
import torch
from attention_cases import RANGES, examples, in_blocks_of, randomize
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_priors import SSMax, attend
from attention_priors.attention.grids import Grids, Raster
from attention_priors.attention.problem import make_geometry
from attention_priors.priors import Axial, KeySink2d, Prior, Radial, Spectral2d, grid_positions, prior_from_config
from attention_priors.priors.grid import ROW
from thoroughness import every_other_deep

BACKENDS = ("auto", "toeplitz", "triton")
GGD = {"name": "generalized_gaussian", "init": "spread"}
PRIORS: dict[str, Any] = {
    "axial": {"name": "axial", "rows": GGD, "columns": {"name": "laplace", "learn": ["slope"]}},
    "spectral_2d": {"name": "spectral_2d", "num_frequencies": 3},
    "radial": {"name": "radial", "prior": GGD},
    "sum": [{"name": "axial", "rows": GGD}, {"name": "key_sink_2d", "rows": 4, "columns": 5, "num_frequencies": 2}],
    "buckets": {"name": "axial", "rows": {"name": "relative_buckets", "num_buckets": 8, "bidirectional": True}},
}


def made(name: str, heads: int, seed: int) -> Prior:
    prior = prior_from_config(PRIORS[name], heads)
    # If a query sees only its own place, steeper shapes leave no digits of the content.
    randomize(prior, torch.Generator().manual_seed(seed), RANGES | {"theta_beta": (-1.0, 3.0)})
    return prior


def results(
    prior: Prior, inputs: tuple[Tensor, ...], scale: SSMax | None, backend: Any, **options: Any
) -> list[Tensor]:
    """Compute output, log-sum-exp and all gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    parameters = [parameter for parameter in prior.parameters() if parameter.requires_grad]
    parameters += [] if scale is None else [scale.s]
    query, key, value = leaves
    out, lse = attend(query, key, value, prior, logit_scale=scale, backend=backend, return_lse=True, **options)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, lse)]
    seen = lse.isfinite()
    grads = torch.autograd.grad([out, lse.masked_fill(~seen, 0.0)], [*leaves, *parameters], given, allow_unused=True)
    return [out, lse.masked_fill(~seen, 0.0), *(g for g in grads if g is not None)]


@examples(20)
@given(
    st.sampled_from(sorted(PRIORS)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2)),
    st.integers(0, 999),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 3, 16]),
    st.data(),
)
def test_the_table_of_a_grid_matches_the_formula(
    name: str,
    sizes: tuple[int, int, int],
    seed: int,
    causal: bool,
    scaled: bool,
    blocks: int | None,
    data: st.DataObject,
) -> None:
    rows, columns, outside = sizes
    keys = grid_positions(rows, columns, outside=outside)
    # Queries are the whole grid, or some of its rows.
    first = data.draw(st.integers(0, rows - 1)) if data.draw(st.booleans()) else None
    queries = keys if first is None else keys[outside + first * columns :]
    generator = torch.Generator().manual_seed(seed)
    inputs = tuple(
        torch.randn(2, heads, len(positions), 8, generator=generator, dtype=torch.float64)
        for heads, positions in ((4, queries), (2, keys), (2, keys))
    )
    prior = made(name, 4, seed)
    scale = SSMax(4, init=0.4) if scaled else None
    options = {"causal": causal, "query_positions": queries, "key_positions": keys}
    expected = results(prior, inputs, scale, "reference", **options)
    with in_blocks_of(blocks):
        found = results(prior, inputs, scale, "toeplitz", **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "moved", every_other_deep([(0, 4), (0, 9), (3, 0), (-5, 2), (0, -4), (1, 0)], [(0, 4), (-5, 2), (0, -4)])
)
@pytest.mark.parametrize("causal", [True, False])
def test_one_part_of_an_image_attends_to_another(moved: tuple[int, int], causal: bool) -> None:
    """Both parts have tokens outside the grid. Their distance is 0, which may lie amid the grid's distances."""
    keys = grid_positions(4, 4, outside=2)
    queries = keys.clone()
    queries[2:] += moved[0] * ROW + moved[1]
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(2, heads, len(keys), 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    for name in PRIORS:
        prior = made(name, 4, 0)
        options = {"causal": causal, "query_positions": queries, "key_positions": keys}
        expected = results(prior, inputs, None, "reference", **options)
        with in_blocks_of(3):
            found = results(prior, inputs, None, "toeplitz", **options)
        for one, other in zip(found, expected, strict=True):
            # Gradients of parameters are float32, and sum over positions, not distances. Terms cancel.
            rounding = torch.finfo(other.dtype).eps * float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=3e-6, atol=max(1e-8, rounding))


def test_images_of_different_sizes_share_a_batch() -> None:
    large, small = grid_positions(4, 6, outside=1), grid_positions(3, 5, outside=1)
    positions = torch.stack([large, torch.cat([small, small.new_zeros(9)])])
    padding = torch.zeros(2, 25, dtype=torch.bool)
    padding[1, 16:] = True
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 25, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    prior = made("axial", 2, 0)
    options: dict[str, Any] = {"query_positions": positions, "key_positions": positions, "key_padding_mask": padding}
    found = attend(q, k, v, prior, causal=False, backend="toeplitz", **options)
    torch.testing.assert_close(found, attend(q, k, v, prior, causal=False, backend="reference", **options))
    q, k, v = (x[1:, :, :16] for x in (q, k, v))
    alone = attend(q, k, v, prior, causal=False, query_positions=small, key_positions=small)
    torch.testing.assert_close(found[1:, :, :16], alone)


@pytest.mark.parametrize("shape", [(17, 17), (1, 17), (2, 1, 17, 1), (2, 4, 17, 17)])
@pytest.mark.parametrize("scaled", [False, True])
def test_masks_follow_the_grid(shape: tuple[int, ...], scaled: bool) -> None:
    positions = grid_positions(4, 4, outside=1)
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(2, heads, 17, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    mask = torch.randn(shape, generator=generator, dtype=torch.float64)
    padding = torch.zeros(2, 17, dtype=torch.bool)
    padding[1, 11:] = True
    prior, scale = made("axial", 4, 0), SSMax(4, init=0.4) if scaled else None
    options = {"causal": False, "query_positions": positions, "key_positions": positions}
    options |= {"attn_mask": mask, "key_padding_mask": padding}
    expected = results(prior, inputs, scale, "reference", **options)
    for blocks in (None, 3, 16):
        with in_blocks_of(blocks):
            found = results(prior, inputs, scale, "toeplitz", **options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_subsets_of_patches_match_the_formula() -> None:
    kept = torch.tensor([0, 3, 4, 9, 11, 17, 20])
    positions = grid_positions(4, 5, outside=1)[kept]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 7, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    options: dict[str, Any] = {"causal": False, "query_positions": positions, "key_positions": positions}
    for name in PRIORS:
        prior = made(name, 2, 0)
        found = attend(q, k, v, prior, backend="toeplitz", **options)
        torch.testing.assert_close(found, attend(q, k, v, prior, backend="reference", **options))


@pytest.mark.parametrize(
    ("positions", "raster"),
    [
        (grid_positions(3, 4, outside=2), Raster(2, 0, 0, 3, 4)),
        (grid_positions(1, 1), Raster(0, 0, 0, 1, 1)),
        (grid_positions(5, 7)[14:28], Raster(0, 2, 0, 2, 7)),
        (grid_positions(3, 4)[1:], None),
        (grid_positions(3, 4)[:-1], None),
        (grid_positions(3, 4).flip(0), None),
        (grid_positions(3, 4, outside=1).roll(-1), None),
        (grid_positions(3, 4, outside=2)[:2], None),
        (torch.arange(12), Raster(0, 0, 0, 1, 12)),
    ],
)
def test_grids_are_recognised(positions: Tensor, raster: Raster | None) -> None:
    assert Raster.of(positions) == raster


def test_a_table_has_one_number_per_distance() -> None:
    positions = grid_positions(64, 48, outside=1)
    geometry = make_geometry((1, 1, len(positions), len(positions)), torch.device("cpu"), False, positions, positions)
    grids = Grids.of(geometry)
    assert grids is not None
    distances = grids.distances(geometry)
    assert bool((distances.diff() > 0).all())
    on_the_grid, to_and_from_outside = 127 * 95, 2 * 64 * 48
    assert len(distances) == on_the_grid + to_and_from_outside
    sample = positions[torch.randint(len(positions), (500,), generator=torch.Generator().manual_seed(0))]
    assert bool(torch.isin((sample[:, None] - sample).flatten(), distances).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prior", "backend"),
    [
        *((prior, "auto") for prior in (None, Axial(2, GGD), Radial(2, "laplace"))),
        *((Spectral2d(2) + KeySink2d(2, 3, 3), backend) for backend in BACKENDS),
    ],
    ids=lambda part: getattr(part, "name", str(part)),
)
@pytest.mark.parametrize("options", every_other_deep(["", "lse", "padding", "scale", "all"], ["all"]))
def test_compiled_grids_match_the_formula(prior: Prior | None, backend: Any, options: str) -> None:
    positions = grid_positions(3, 4, outside=1)
    if prior is not None:
        randomize(prior, torch.Generator().manual_seed(0))
    query, key, value = torch.randn(3, 2, 2, 13, 8, generator=torch.Generator().manual_seed(0))
    arguments: dict[str, Any] = {"causal": False, "query_positions": positions, "key_positions": positions}
    if options in ("lse", "all"):
        arguments["return_lse"] = True
    if options in ("padding", "all"):
        padding = torch.zeros(2, 13, dtype=torch.bool)
        padding[1, 9:] = True
        arguments["key_padding_mask"] = padding
    if options in ("scale", "all"):
        arguments["logit_scale"] = SSMax(2, init=0.3)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return attend(query, key, value, prior, backend=backend, **arguments)

    torch._dynamo.reset()
    found = torch.compile(call, backend="eager", fullgraph=True)(query, key, value)
    expected = attend(query, key, value, prior, backend="reference", **arguments)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prior", [Spectral2d(2), KeySink2d(2, 3, 3)], ids=lambda prior: prior.name)
def test_no_distances_are_listed_without_a_table(prior: Prior, monkeypatch: pytest.MonkeyPatch) -> None:
    def list_distances(*_: Any) -> Any:
        raise AssertionError("distances were listed")

    monkeypatch.setattr("attention_priors.attention.tiles.backend._list_distances", list_distances)
    monkeypatch.setattr(Grids, "distances", list_distances)
    own = torch.stack([grid_positions(3, 4, outside=1), grid_positions(2, 6, outside=1)])
    query, key, value = torch.randn(3, 2, 2, 13, 8)
    padding = torch.zeros(2, 13, dtype=torch.bool)
    padding[1, 9:] = True
    given: dict[str, Any] = {"causal": False, "query_positions": own, "key_positions": own, "key_padding_mask": padding}
    out = attend(query, key, value, prior, **given)
    torch.testing.assert_close(
        out, attend(query, key, value, prior, **given, backend="reference"), rtol=1e-4, atol=1e-5
    )
