"""Priors on grids finer or coarser than their definition."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prior_samples import randomise

from attention_priors import attend
from attention_priors.priors import (
    Axial,
    GeneralizedGaussian,
    KeySink2d,
    Laplace,
    PatchArea,
    Prior,
    Radial,
    Spectral2d,
    at_spacing,
    grid_positions,
)
from attention_priors.priors.grid import places_of

GGD = {"name": "generalized_gaussian", "init": {"theta_alpha": [-1.0, 0.5], "beta": [1.5, 0.7], "mu": [1.0, -2.0]}}
MAKERS: dict[str, Any] = {
    "generalized gaussian": lambda: Axial(2, GGD, "laplace"),
    "spectral": lambda: randomise(Spectral2d(2, 3)),
    "radial": lambda: Radial(2, {"name": "generalized_gaussian", "init": "linear"}),
    "sink": lambda: randomise(KeySink2d(2, 3, 4)),
    "sum": lambda: randomise(Spectral2d(2, 3)) + randomise(KeySink2d(2, 3, 4)),
}


@pytest.mark.parametrize("name", MAKERS)
@given(factor=st.integers(2, 5), outside=st.integers(0, 2))
def test_places_at_equal_distances_have_equal_priors(name: str, factor: int, outside: int) -> None:
    """Every ``factor``-th place of a finer grid has the distances of the coarse grid's places."""
    prior: Prior = MAKERS[name]()
    rows, columns = 3, 4
    coarse = grid_positions(rows, columns, outside=outside)
    fine = grid_positions(rows * factor, columns * factor, outside=outside)
    # With an odd factor, the middle place of each patch lies on the coarse patch. Relative priors need no more.
    within = factor // 2
    stands = places_of(fine)
    chosen = stands.outside | ((stands.row % factor == within) & (stands.column % factor == within))
    if name in ("sink", "sum") and factor % 2 == 0:
        return
    finer = at_spacing(prior, 2, 1 / factor, 1 / factor).log_prior(fine[chosen], fine[chosen], torch.float64)
    on_grid = (~places_of(coarse).outside).double()
    expected = prior.log_prior(coarse, coarse, torch.float64) - 2 * math.log(factor) * on_grid
    torch.testing.assert_close(finer, expected, rtol=1e-9, atol=1e-9)


def test_each_axis_has_its_own_spacing() -> None:
    prior = Axial(2, GGD, "laplace").spaced(0.5, 0.25)
    positions = grid_positions(4, 8)
    found = prior.log_prior(positions[:1], positions, torch.float64)[:, 0]
    over_rows, over_columns = GeneralizedGaussian(2, init=GGD["init"]), Laplace(2)
    row, column = torch.arange(4).repeat_interleave(8), torch.arange(8).repeat(4)
    expected = over_rows.log_prior_at(-0.5 * row.double(), torch.float64)
    expected = expected + over_columns.log_prior_at(-0.25 * column.double(), torch.float64)
    torch.testing.assert_close(found, expected)


@given(
    factors=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    outside=st.integers(0, 2),
    seed=st.integers(0, 99),
    with_prior=st.booleans(),
)
def test_a_uniform_prior_is_equal_at_every_resolution(
    factors: tuple[int, int], outside: int, seed: int, with_prior: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 2, outside + 6, 8, generator=generator, dtype=torch.float64)
    prior = Spectral2d(2, 2) if with_prior else None  # the prior's weights are 0

    def finer(x: torch.Tensor) -> torch.Tensor:
        on_grid = x[:, :, outside:].unflatten(2, (2, 3))
        on_grid = on_grid.repeat_interleave(factors[0], 2).repeat_interleave(factors[1], 3)
        return torch.cat([x[:, :, :outside], on_grid.flatten(2, 3)], 2)

    coarse, fine = (grid_positions(2 * rows, 3 * columns, outside=outside) for rows, columns in ((1, 1), factors))
    expected = attend(q, k, v, prior, causal=False, query_positions=coarse, key_positions=coarse)
    spaced = at_spacing(prior, 2, 1 / factors[0], 1 / factors[1])
    found = attend(finer(q), finer(k), finer(v), spaced, causal=False, query_positions=fine, key_positions=fine)
    torch.testing.assert_close(found, finer(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MAKERS)
def test_spaced_priors_share_learned_parameters(name: str) -> None:
    prior: Prior = MAKERS[name]()
    spaced = at_spacing(prior, 2, 0.5, 0.5)
    assert {id(p) for p in spaced.parameters()} == {id(p) for p in prior.parameters()}
    positions = grid_positions(4, 4, outside=1)
    q, k, v = torch.randn(3, 1, 2, 17, 4, generator=torch.Generator().manual_seed(0))
    attend(q, k, v, spaced, causal=False, query_positions=positions, key_positions=positions).square().sum().backward()
    assert all(p.grad is not None for p in prior.parameters() if p.requires_grad)
    assert prior.log_prior(positions, positions).shape == (2, 17, 17)
    again = MAKERS[name]().log_prior(positions, positions) if name in ("generalized gaussian", "radial") else None
    if again is not None:  # the original prior is unchanged
        assert torch.equal(prior.log_prior(positions, positions), again)


def test_patches_weigh_as_much_as_their_area() -> None:
    positions = grid_positions(2, 2, outside=1)
    expected = math.log(0.25) * torch.tensor([0.0, 1, 1, 1, 1]).expand(3, 5, 5)
    torch.testing.assert_close(PatchArea(3, 0.25).log_prior(positions, positions), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: at_spacing(Laplace(2), 2, 0.5, 0.5), "prior must be over a grid, got 'laplace'"),
        (
            lambda: at_spacing(Axial(2, "uniform", {"name": "relative_buckets", "bidirectional": True}), 2, 0.5, 0.5),
            "columns: relative_buckets is defined at whole patches only",
        ),
        (
            lambda: at_spacing(Axial(2, "clipped_offsets"), 2, 0.5, 0.5),
            "rows: clipped_offsets is defined at whole patches",
        ),
        (lambda: Axial(2, "laplace").spaced(0.0, 1.0), "rows must be a finite number above 0, got 0.0"),
        (lambda: PatchArea(2, -1.0), "area must be a finite number above 0"),
    ],
)
def test_invalid_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_spaced_priors_have_no_config() -> None:
    prior = Spectral2d(2, 3)
    spaced = prior.spaced(0.5, 0.5)
    with pytest.raises(ValueError, match=r"at spacing \(0.5, 0.5\) has no description"):
        spaced.to_config()
    assert repr(spaced).startswith("Spectral2d(\n  spacing=(0.5, 0.5)") or "spacing=(0.5, 0.5)" in repr(spaced)
    assert prior.to_config()["num_frequencies"] == 3


def test_spaced_priors_cannot_be_spaced_again() -> None:
    prior = randomise(Spectral2d(2, 3))
    spaced = at_spacing(prior, 2, 0.5, 0.5)
    with pytest.raises(ValueError, match="prior must be at its own spacing, got Spectral2d"):
        at_spacing(spaced, 2, 0.5, 0.5)
    with pytest.raises(ValueError, match="prior must be at its own spacing, got PatchArea"):
        at_spacing(PatchArea(2, 0.25), 2, 0.5, 0.5)
