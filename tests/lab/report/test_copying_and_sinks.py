"""Figures and tables of the copy-mixture task, of the summands of priors, and of sinks."""

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_priors.lab.intervals import over_seeds
from attention_priors.lab.report.figures import copying, prior_parts
from attention_priors.lab.report.figures.drawing import NothingToShowError
from attention_priors.lab.report.selections.copying import KINDS as WORDS
from attention_priors.lab.report.selections.copying import excess_losses
from attention_priors.lab.report.tables.comparison import result_grids

SCHEMES = ("GOAT", "RoPE")
LENGTHS = (64, 128)
FACTORS = (0.0, 1.0, 8.0)
KINDS = ("first", "previous", "noise", "all")


@pytest.fixture
def results() -> dict[str, Any]:
    made: dict[str, Any] = {
        "format": 1,
        "recipe": {"name": "Copies", "training": {"context_length": 64}},
        "seeds": [0, 1],
        "schemes": [{"name": name, "context_length": 64} for name in SCHEMES],
        "copying": [],
        "sink_mass": [],
        "prior_terms": [],
        "prior_mass": [],
    }
    for place, scheme in enumerate(SCHEMES):
        for seed in (0, 1):
            own = {"scheme": scheme, "seed": seed}
            for length in LENGTHS:
                made["copying"] += [
                    own | {"length": length, "kind": kind, "expected_nll": 2.0, "tokens": 100}
                    | {"optimal_nll": 2.1, "nll": 2.1 + 0.1 * (index - 1) + 0.01 * seed + place}
                    for index, kind in enumerate(KINDS)
                ]  # fmt: skip
            for head in (0, 1):
                made["sink_mass"] += [
                    own | {"layer": 0, "head": head, "factor": factor, "signal": factor * (1 + head)}
                    | {"mass": 0.9 / (1 + factor + seed + head)}
                    for factor in FACTORS
                ]  # fmt: skip
                if scheme == "GOAT":
                    here = own | {"layer": 0, "head": head, "places": list(range(6))}
                    near = [-3.0, 0.0, *(-5.0 - head for _ in range(4))]
                    made["prior_terms"] += [
                        here
                        | {"prior": "spectral", "over": "distance", "log_prior": near}
                        | {"ahead": [-3.0, 1.0, 2.0, 3.0, 4.0, None]},
                        here | {"prior": "key_sink", "over": "key", "log_prior": [2.0 + seed, 0.0, 0.0, 0.0, 0.0, 0.0]},
                    ]
                    made["prior_mass"].append(
                        own
                        | {"layer": 0, "head": head}
                        | {"first": 0.2 + 0.5 * head, "previous": 0.5, "itself": 0.1 + seed / 5}
                    )
    return made


def _line(axes: Axes, gid: str) -> tuple[list[float], list[float]]:
    (line,) = (line for line in axes.lines if line.get_gid() == gid)
    return [float(x) for x in np.asarray(line.get_xdata())], [float(y) for y in np.asarray(line.get_ydata())]


def _panel(figure: Figure, title: str) -> Axes:
    (axes,) = (axes for axes in figure.axes if axes.get_title(loc="left") == title or axes.get_title() == title)
    return axes


@pytest.mark.parametrize(("kind", "place"), [("all", 3), ("first", 0), ("previous", 1), ("noise", 2)])
def test_losses_are_drawn_above_the_optimum(results, kind, place):
    axes = _panel(copying.copying_by_length(results), WORDS[kind])
    for index, scheme in enumerate(SCHEMES):
        x, y = _line(axes, f"copying:{kind}:{scheme}")
        assert x == list(LENGTHS)
        assert y == pytest.approx([0.1 * (place - 1) + 0.005 + index] * 2)
    bottom, top = axes.get_ylim()
    assert bottom < 0 < top


def test_excess_has_students_interval_over_seeds(results):
    found = excess_losses(results, "GOAT", "all")
    assert found[64] == pytest.approx(over_seeds([0.2, 0.21]))


def test_wide_bands_do_not_squash_the_curves(results):
    for row in results["copying"]:
        row["nll"] += 50 * row["seed"] - 25
    axes = _panel(copying.copying_by_length(results), "all tokens")
    assert axes.get_ylim()[1] < 2


def test_bands_are_named_only_where_there_are_any(results):
    assert "bands: 95 % interval" in copying.copying_by_length(results).axes[0].get_ylabel()
    results["copying"] = [row for row in results["copying"] if row["seed"] == 0]
    assert "bands" not in copying.copying_by_length(results).axes[0].get_ylabel()


def test_the_table_has_the_optimum_and_intervals(results):
    (grid,) = (grid for grid in result_grids(results) if grid.stem == "copying")
    optimum, goat, rope = grid.groups
    assert [line[:3] for line in optimum] == [
        ["the optimum" if index == 0 else "", words, "2.000"] for index, words in enumerate(WORDS.values())
    ]
    mean, low, high = over_seeds([0.2, 0.21])
    assert goat[0][2] == (f"{mean:.3f}", f"[{low:.3f}, {high:.3f}]")
    assert str(goat[1][2][0]).startswith("−0.0")  # first: 0.1 below the optimum
    assert rope[0][0] == "RoPE"


def test_the_table_of_masses_has_the_head_that_gives_most(results):
    (grid,) = (grid for grid in result_grids(results) if grid.stem == "prior_mass")
    (line,) = grid.groups[0]  # of one layer, so there is no line of any
    assert line[:3] == ["GOAT", "0", "2"]
    assert [cell[0] for cell in line[3:]] == ["70", "50", "20"]
    assert line[5][1] == "[0, 100]"  # cut


def test_summands_are_drawn_below_their_maximum(results):
    axes = _panel(prior_parts.prior_terms(results, "GOAT"), "key_sink, layer 0, seed 1")
    assert _line(axes, "term:key_sink:1") == ([0, 1, 2, 3, 4, 5], [0, -3, -3, -3, -3, -3])
    with pytest.raises(NothingToShowError, match=r"prior_terms.*of the scheme 'RoPE'"):
        prior_parts.prior_terms(results, "RoPE")


def test_maps_are_of_the_prior_as_it_is_multiplied(results):
    """Two keys are ``e^Δ`` apart by the log-prior, and ``e^(c Δ)`` by the product."""
    scale = [0.0, 0.5, 1.0, -1.0, 2.0, 3.0]
    for row in results["prior_terms"]:
        row["scale"] = scale
        row["log_prior"] = [None if place == 5 else value for place, value in enumerate(row["log_prior"])]
    axes = _panel(prior_parts.prior_weights(results, "GOAT"), "layer 0, head 1\nfirst 70 %,\nprevious 50 %")
    weights = np.ma.filled(np.ma.asarray(axes.images[0].get_array()).astype(float), math.nan)
    # K(1) - K(0) = 3 between neighbours, and key 0 has 2 more.
    for query in range(2, 5):
        assert weights[query, query - 1] / weights[query, query] == pytest.approx(math.exp(3 * scale[query]))
    assert weights[1, 0] / weights[1, 1] == pytest.approx(math.exp(5 * scale[1]))
    assert weights[5, 5] == 0  # hidden by the sink that ends there
    assert np.nansum(weights, 1) == pytest.approx(1)


def test_a_prior_that_is_one_table_has_maps_and_no_summands(results):
    results["prior_terms"] = [row for row in results["prior_terms"] if row["over"] == "distance"]
    axes = _panel(prior_parts.prior_weights(results, "GOAT"), "layer 0, head 1\nfirst 70 %,\nprevious 50 %")
    weights = np.ma.filled(np.ma.asarray(axes.images[0].get_array()).astype(float), math.nan)
    near = np.exp(np.array([-3.0, 0.0, -6.0, -6.0, -6.0, -6.0]))
    assert weights[5] == pytest.approx(near[::-1] / near.sum())
    with pytest.raises(NothingToShowError, match=r"prior_terms.*of the scheme 'GOAT'"):
        prior_parts.prior_terms(results, "GOAT")


def test_maps_before_the_mask_show_what_it_hides(results):
    axes = _panel(prior_parts.prior_logits(results, "GOAT"), "layer 0, head 1\nfirst 70 %,\nprevious 50 %")
    shown = np.ma.filled(np.ma.asarray(axes.images[0].get_array()).astype(float), math.nan)
    row = np.array([2.0 + 0, -3.0, 1.0, 2.0, 3.0, 4.0])  # of query 1, first seed: the key before, its own, four ahead
    assert shown[1] == pytest.approx(row - row.mean())
    assert np.isnan(shown[0]).tolist() == [False] * 5 + [True]  # five ahead: hidden by the prior itself
    assert np.nanmean(shown, 1) == pytest.approx(0, abs=1e-9)
    for term in results["prior_terms"]:
        term.pop("ahead", None)
    with pytest.raises(NothingToShowError, match="prior_terms"):
        prior_parts.prior_logits(results, "GOAT")  # of before this was kept


def test_the_table_of_masses_says_what_is_multiplied(results):
    (before,) = (grid.caption for grid in result_grids(results) if grid.stem == "prior_mass")
    for row in results["prior_mass"]:
        row["scaled"] = True
    (after,) = (grid.caption for grid in result_grids(results) if grid.stem == "prior_mass")
    assert "logit scale" not in before
    assert "the prior alone, multiplied by the logit scale where attention does so, gives to the first key" in after


def test_maps_are_causal_probabilities(results):
    axes = _panel(prior_parts.prior_weights(results, "GOAT"), "layer 0, head 1\nfirst 70 %,\nprevious 50 %")
    weights = np.ma.filled(np.ma.asarray(axes.images[0].get_array()).astype(float), math.nan)
    assert weights.shape == (6, 6)
    assert np.isnan(weights[np.triu_indices(6, 1)]).all()
    assert np.nansum(weights, axis=1) == pytest.approx(np.ones(6))
    logits = np.array([2.0 - 6, -6, 0.0, -3.0])  # query 3, first seed
    assert weights[3, :4] == pytest.approx(np.exp(logits) / np.exp(logits).sum())


def test_the_strongest_sink_is_drawn_against_its_signal(results):
    (axes,) = prior_parts.sink_mass(results).axes
    x, y = _line(axes, "sink:GOAT")
    assert x == list(FACTORS)  # of head 0
    for factor, there in zip(FACTORS, y, strict=True):
        assert there == pytest.approx(100 * sum(0.9 / (1 + factor + seed) for seed in (0, 1)) / 2)


def test_without_rows_there_is_nothing_to_draw(results):
    results |= {"copying": [], "sink_mass": []}
    for draw in (copying.copying_by_length, prior_parts.sink_mass):
        with pytest.raises(NothingToShowError):
            draw(results)
