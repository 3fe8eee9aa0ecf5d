"""Attention on what is asked for, against length: whose head, followed how."""

from typing import Any

import numpy as np
import pytest
from synthetic_results import make_results

from attention_priors.lab.report import write_figures, write_tables
from attention_priors.lab.report.figures.drawing import NothingToShowError
from attention_priors.lab.report.figures.needle_weights import needle_weight_by_length
from attention_priors.lab.report.selections.needle_weights import mean_weights, plans_with_weights


def results() -> dict[str, Any]:
    made = make_results()
    rows = made["needle_weights"]
    # In the first seed head 1 gives most at first, in the second head 0, and it loses what it looked for.
    weights = {(0, 0): (0.1, 0.9), (0, 1): (0.8, 0.7), (1, 0): (0.6, 0.2), (1, 1): (0.5, 0.5)}
    for (seed, head), values in weights.items():
        for length, weight in zip((160, 8192), values, strict=True):
            row = {"scheme": "ALiBi", "seed": made["seeds"][seed], "plan": "drowning", "length": length}
            rows.append(row | {"layer": 1, "head": head, "texts": 5, "weight": weight})
    return made


def test_the_head_that_gives_most_at_first_is_followed() -> None:
    found = mean_weights(results(), "drowning", "ALiBi")
    assert {length: round(one.mean, 9) for length, one in found.items()} == {160: 0.7, 8192: 0.45}
    assert found[160].low < 0.7 < found[160].high
    assert mean_weights(results(), "drowning", "BAM") == {}


def test_figure_and_table(tmp_path: Any) -> None:
    assert plans_with_weights(results()) == ["drowning"]
    (line,) = [
        line
        for line in needle_weight_by_length(results(), "drowning").axes[0].lines
        if line.get_gid() == "needle_weight:ALiBi"
    ]
    assert np.asarray(line.get_xdata()).tolist() == [160, 8192]
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx([70, 45])
    (path,) = [path for path in write_tables(results(), tmp_path) if path.name == "needle_weights.md"]
    # Student's interval of two seeds is far wider than a share can be.
    assert "| drowning | ALiBi | 70.0 [0.0, 100.0] | 45.0 [0.0, 100.0] |" in path.read_text(encoding="utf-8")
    assert tmp_path / "needle-weights-drowning.png" in write_figures(results(), tmp_path)


def test_a_line_for_each_seed_and_a_panel_for_each_group() -> None:
    told = results()
    told["recipe"] = told["recipe"] | {"panels": {"One": ["ALiBi"], "Other": ["BAM"]}}
    for given in (told, results()):
        (axes,) = needle_weight_by_length(given, "drowning").axes[:1]
        lines = {line.get_gid(): list(np.asarray(line.get_ydata())) for line in axes.lines}
        assert lines[f"seed:ALiBi:{given['seeds'][0]}"] == pytest.approx([80, 70])
        assert lines[f"seed:ALiBi:{given['seeds'][1]}"] == pytest.approx([60, 20])
    # Nothing was measured of the other panel's scheme.
    assert [axes.get_title(loc="left") for axes in needle_weight_by_length(told, "drowning").axes] == ["One"]


def test_single_seeds_are_named_only_where_there_are_several() -> None:
    for panels in ({}, {"One": ["ALiBi"]}):
        told = results()
        told["recipe"] = told["recipe"] | {"panels": panels}
        assert "thin: single seeds" in needle_weight_by_length(told, "drowning").axes[0].get_ylabel()
        told["needle_weights"] = [row for row in told["needle_weights"] if row["seed"] == told["seeds"][0]]
        assert needle_weight_by_length(told, "drowning").axes[0].get_ylabel() == "attention on the pass key, %"


def test_without_weights_there_is_nothing_to_show() -> None:
    with pytest.raises(NothingToShowError):
        needle_weight_by_length(make_results(), "drowning")
