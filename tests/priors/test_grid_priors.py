"""Priors on grids, pair by pair."""

import math
from typing import Any

import pytest
import torch
from prior_samples import randomise

from attention_priors.priors import (
    Axial,
    GeneralizedGaussian,
    KeySink2d,
    Laplace,
    Radial,
    RelativeBuckets,
    Spectral,
    Spectral2d,
    grid_positions,
)
from attention_priors.priors.grid import places_of

ROWS, COLUMNS, OUTSIDE = 3, 4, 2
POSITIONS = grid_positions(ROWS, COLUMNS, outside=OUTSIDE)
PLACES: list[tuple[int, int] | None] = [
    *[None] * OUTSIDE, *((row, column) for row in range(ROWS) for column in range(COLUMNS))
]  # fmt: skip


def test_positions_and_differences_encode_rows_and_columns() -> None:
    assert len(POSITIONS) == OUTSIDE + ROWS * COLUMNS
    places = places_of(POSITIONS)
    apart = places_of(POSITIONS[:, None] - POSITIONS)
    for i, mine in enumerate(PLACES):
        assert bool(places.outside[i]) == (mine is None)
        if mine is not None:
            assert (int(places.row[i]), int(places.column[i])) == mine
        for j, other in enumerate(PLACES):
            assert bool(apart.outside[i, j]) == ((mine is None) != (other is None))
            if mine is not None and other is not None:
                between = (mine[0] - other[0], mine[1] - other[1])
                assert (int(apart.row[i, j]), int(apart.column[i, j])) == between


def test_the_largest_grids_are_supported() -> None:
    corners = torch.stack([grid_positions(1, 2**22)[-1], grid_positions(2**22, 1)[-1], grid_positions(1, 1)[0]])
    apart = places_of(corners[:, None] - corners)
    assert apart.row[0].tolist() == [0, 1 - 2**22, 0]
    assert apart.column[0].tolist() == [0, 2**22 - 1, 2**22 - 1]
    assert not apart.outside.any()


@pytest.mark.parametrize("arguments", [{"rows": 0, "columns": 3}, {"rows": 2**23, "columns": 1}])
def test_invalid_grid_sizes_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match="rows"):
        grid_positions(**arguments)
    with pytest.raises(ValueError, match="outside must be a number of tokens, at least 0, got -1"):
        grid_positions(2, 2, outside=-1)


def pair_by_pair(formula: Any, at_home: Any) -> torch.Tensor:
    """Return ``(H, L, L)`` from a function of row and column differences, and a function for pairs outside the grid."""
    return torch.stack(
        [
            torch.stack(
                [
                    at_home() if mine is None and other is None
                    else torch.zeros(2, dtype=torch.float64) if mine is None or other is None
                    else formula(mine[0] - other[0], mine[1] - other[1])
                    for other in PLACES
                ]
            )
            for mine in PLACES
        ]
    ).permute(2, 0, 1)  # fmt: skip


AXES = {
    "generalized_gaussian": lambda: randomise(GeneralizedGaussian(2), 1),
    "laplace": lambda: Laplace(2, slopes=[0.5, 2.0]),
    "spectral": lambda: randomise(Spectral(2, 3), 2),
    "relative_buckets": lambda: randomise(RelativeBuckets(2, 8, bidirectional=True), 3),
}


@pytest.mark.parametrize("of_columns", AXES)
@pytest.mark.parametrize("of_rows", AXES)
def test_axial_sums_over_both_axes(of_rows: str, of_columns: str) -> None:
    rows, columns = AXES[of_rows](), AXES[of_columns]()
    prior = Axial(2, rows, columns)

    def formula(row: int, column: int) -> torch.Tensor:
        distances = torch.tensor([row]), torch.tensor([column])
        of_both = (
            part.log_prior_at(d, torch.float64)[:, 0] for part, d in zip((rows, columns), distances, strict=True)
        )
        return sum(of_both, torch.zeros(2, dtype=torch.float64))

    expected = pair_by_pair(formula, lambda: formula(0, 0))
    torch.testing.assert_close(prior.log_prior(POSITIONS, POSITIONS, torch.float64), expected)


def test_radial_depends_on_the_euclidean_distance() -> None:
    over = GeneralizedGaussian(2, init={"theta_alpha": [0.0, 0.5], "beta": [-0.5, 1.5]})
    prior = Radial(2, over)

    def formula(row: int, column: int) -> torch.Tensor:
        return torch.stack(
            [
                torch.tensor(-math.exp(alpha) * (math.hypot(row, column) + 1e-5) ** beta, dtype=torch.float64)
                for alpha, beta in ((0.0, -0.5), (0.5, 1.5))
            ]
        )

    expected = pair_by_pair(formula, lambda: formula(0, 0))
    torch.testing.assert_close(prior.log_prior(POSITIONS, POSITIONS, torch.float64), expected)
    # Rotating the grid changes nothing.
    turned = grid_positions(COLUMNS, ROWS)[torch.arange(12).view(COLUMNS, ROWS).T.flatten()]
    torch.testing.assert_close(
        prior.log_prior(turned, turned, torch.float64), prior.log_prior(POSITIONS[2:], POSITIONS[2:], torch.float64)
    )


def test_spectral_2d_lanes_match_the_log_prior() -> None:
    prior = randomise(Spectral2d(2, 3, shortest_period=3.0))
    lanes = prior.lanes(POSITIONS, POSITIONS, dtype=torch.float64)
    assert lanes.key.shape == (14, 2 * 2 * 3 + 1)
    torch.testing.assert_close(lanes.query @ lanes.key.mT, prior.log_prior(POSITIONS, POSITIONS, torch.float64))
    axes = [
        Spectral(2, 3, base=100.0, shortest_period=3.0, init=part.natural_parameters())
        for part in (prior.over_rows, prior.over_columns)
    ]
    expected = Axial(2, *axes)
    torch.testing.assert_close(expected.log_prior(POSITIONS, POSITIONS), prior.log_prior(POSITIONS, POSITIONS))


def test_a_sink_is_equal_for_all_queries_and_lifts_outside_tokens() -> None:
    prior = randomise(KeySink2d(2, ROWS, COLUMNS))
    log_prior = prior.log_prior(POSITIONS, POSITIONS, torch.float64).detach()
    assert torch.equal(log_prior, log_prior[:, :1].expand_as(log_prior))
    by_place = log_prior[:, 0]
    assert torch.equal(by_place[:, 0], by_place[:, 1])
    first = prior.log_prior(POSITIONS, POSITIONS[2:3], torch.float64).detach()[:, 0, 0]
    torch.testing.assert_close(by_place[:, 0] - first, prior.bump.detach().double())
    assert len({round(float(x), 6) for x in by_place[0, 2:]}) == ROWS * COLUMNS  # the MLP distinguishes all places


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Axial(2, {"name": "window", "size": 3}),
            "rows: unknown prior 'window'; expected one of uniform, laplace",
        ),
        (lambda: Axial(2, "laplace", {"name": "laplace", "slope": 1}), "columns: .*no argument 'slope'"),
        (lambda: Axial(2, Laplace(3)), "rows has num_heads=3, expected 2"),
        (
            lambda: Radial(2, "spectral"),
            "prior: unknown prior 'spectral'; expected one of laplace, generalized_gaussian",
        ),
        (lambda: Radial(2, {"name": "generalized_gaussian", "init": "neighbours"}), "μ = 0 in all heads"),
        (lambda: Radial(2, {"name": "generalized_gaussian", "learn": ["mu"]}), "μ = 0 in all heads"),
        (lambda: KeySink2d(2, 0, 3), "rows must be a positive integer"),
        (lambda: KeySink2d(2, 3, 3, init={"slope": 1.0}), "init must not set 'slope' on a grid"),
    ],
)
def test_invalid_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_priors_on_grids_and_lines_cannot_be_summed() -> None:
    with pytest.raises(ValueError, match=r"Axial \(over a grid\), Laplace \(over a line\)"):
        _ = Axial(2, "laplace") + Laplace(2)
