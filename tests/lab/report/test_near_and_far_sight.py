"""How far heads look by their priors alone: counted in a table, drawn in a figure."""

from typing import Any

import numpy as np
import pytest
from artists import by_gid

from attention_priors.lab.report.figures.drawing import NothingToShowError
from attention_priors.lab.report.figures.prior_reach import prior_reach
from attention_priors.lab.report.selections.reach import Reach
from attention_priors.lab.report.tables.comparison import result_grids

HALVES: dict[str, list[list[int]]] = {
    # At 64, 128 and 256 tokens.
    "steady": [[0, 0, 0], [8, 8, 8], [32, 64, 128], [8, 16, 32]],
    "loses": [[2, 60, 1], [8, 9, 200], [9, 9, 9], [32, 32, 31]],
}


@pytest.fixture
def results() -> dict[str, Any]:
    found = {
        (scheme, seed, index): dict(zip(("64", "128", "256"), halves, strict=True))
        for scheme, heads in HALVES.items()
        for seed in (0, 1)
        for index, halves in enumerate(heads)
    }
    return {
        "format": 1,
        "recipe": {"name": "Sights", "training": {"context_length": 64}},
        "seeds": [0, 1],
        "schemes": [{"name": name, "context_length": 64} for name in ("NoPE", *HALVES)],
        "prior_reach": [
            {"scheme": scheme, "seed": seed, "layer": index // 2, "head": index % 2, "half": half}
            for (scheme, seed, index), half in found.items()
        ],
    }


def test_what_heads_are_called():
    assert Reach({64: 8, 128: 9, 256: 32}).trained == "near-sighted"
    assert [Reach({64: 8, 128: 9, 256: 32}).sight(length) for length in (128, 256)] == ["between", "far-sighted"]
    assert Reach({64: 8}).sight(64) == "near-sighted"  # as far as an eighth of so short a text is near


def test_those_are_counted_that_stay_what_they_were(results):
    (grid,) = (grid for grid in result_grids(results) if grid.stem == "prior_reach")
    assert grid.header == ["scheme", "heads", "of", "64", "128", "256"]
    assert grid.groups == [
        [["steady", "near-sighted", "8", "6", "4", "4"], ["", "far-sighted", "8", "2", "2", "2"]],
        [["loses", "near-sighted", "8", "4", "0", "2"], ["", "far-sighted", "8", "4", "2", "0"]],
    ]


def test_schemes_of_several_lengths_have_what_they_were_asked(results):
    for row in results["prior_reach"]:
        if row["scheme"] == "loses":
            del row["half"]["64"]
    (grid,) = (grid for grid in result_grids(results) if grid.stem == "prior_reach")
    # Of each seed, two heads look far at its first length, 128: half and a quarter of the text.
    assert [line[3:] for line in grid.groups[1]] == [["–", "0", "0"], ["–", "4", "0"]]


def test_every_head_has_its_line(results):
    figure = prior_reach(results)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}
    assert list(panels) == ["steady", "loses"]
    lines = by_gid(panels["loses"], "reach:loses:near-sighted")
    assert [np.asarray(line.get_ydata()).tolist() for line in lines] == HALVES["loses"][:2] * 2
    assert np.asarray(lines[0].get_xdata()).tolist() == [64, 128, 256]
    near, far = lines[0].get_color(), by_gid(panels["loses"], "reach:loses:far-sighted")[0].get_color()
    assert near != far
    del results["prior_reach"]
    with pytest.raises(NothingToShowError, match="prior_reach"):
        prior_reach(results)
