"""Figures along axes."""

import math

import numpy as np
import pytest
from artists import by_gid
from matplotlib.colors import to_hex
from swept_results import FIRST, LONGER, SEEDS, SHIFTED, make_swept_results

from attention_priors.lab.intervals import over_seeds
from attention_priors.lab.report.figures import by_axis, comparison, gallery
from attention_priors.lab.report.figures.drawing import NothingToShowError
from attention_priors.lab.report.figures.longest import longest_by_axis
from attention_priors.lab.report.figures.style import look
from attention_priors.lab.report.pages.comparison import write_report
from attention_priors.lab.report.selections import axes as selections
from attention_priors.lab.report.selections.passkeys import passkey_table


@pytest.fixture(scope="module")
def swept() -> dict:
    return make_swept_results()


def _panels(figure) -> dict:
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}


def _keys(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_each_axis_has_a_panel_with_its_values(swept):
    panels = _panels(by_axis.passkey_by_axis(swept))
    assert list(panels) == ["init", "length", "s", "extension"]
    assert _keys(panels["init"]) == ["uniform (base)", "laplace", "sampled", "training length"]
    assert _keys(panels["length"]) == ["80", "160 (base)", "320", "training length"]
    assert _keys(panels["extension"]) == ["before", "trained on", "another prior", "training length"]
    bars = {container.get_label(): container for container in panels["init"].containers}
    for index, scheme in enumerate(("BAM", "BAM · init=laplace", "BAM · init=sampled")):
        cells = [cell for cell in passkey_table(swept) if cell.scheme == scheme]
        line, _, (segments,) = bars[scheme]
        assert line.get_ydata() == pytest.approx([100 * cell.share for cell in cells])
        ends = np.array([segment[:, 1] for segment in segments.get_segments()])
        assert ends == pytest.approx(np.array([[100 * cell.low, 100 * cell.high] for cell in cells]))
        assert line.get_color() == look(index).color


def test_a_line_of_the_chart_for_each_value_at_the_longest_length(swept):
    (axes,) = longest_by_axis(swept, "init").axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["init", "uniform (base)", "laplace", "sampled"]
    cells = {cell.scheme: cell for cell in passkey_table(swept) if cell.length == 8192}
    bars = {bar.get_label(): bar for bar in axes.containers}
    for line, scheme in enumerate(("BAM", "BAM · init=laplace", "BAM · init=sampled"), start=1):
        dot, _, (segments,) = bars[scheme]
        assert (dot.get_xdata()[0], dot.get_ydata()[0]) == pytest.approx((100 * cells[scheme].share, line))
        (segment,) = segments.get_segments()
        assert segment[:, 0] == pytest.approx([100 * cells[scheme].low, 100 * cells[scheme].high])
        for seed in SEEDS:
            mine = [r for r in swept["passkey"] if (r["scheme"], r["seed"], r["length"]) == (scheme, seed, 8192)]
            (tick,) = by_gid(axes, f"seed:{scheme}:{seed}")
            share = sum(r["correct"] for r in mine) / sum(r["trials"] for r in mine)
            assert tick.get_xdata()[0] == pytest.approx(100 * share)
            assert round(float(tick.get_ydata()[0])) == line
    (base,) = by_gid(axes, "base:init")
    assert set(base.get_xdata()) == {100 * cells["BAM"].share}


def test_a_seed_that_stopped_is_a_cross_where_it_was_asked_last(swept):
    def left_out(row):
        return (row["scheme"], row["seed"]) == ("BAM · init=laplace", 1) and row["length"] > 512

    halted = swept | {"passkey": [row for row in swept["passkey"] if not left_out(row)]}
    figure = longest_by_axis(halted, "init")
    (cross,) = by_gid(figure, "seed:BAM · init=laplace:1")
    mine = [row for row in halted["passkey"] if (row["scheme"], row["seed"]) == ("BAM · init=laplace", 1)]
    asked = [row for row in mine if row["length"] == 512]
    assert cross.get_marker() == "x"
    assert cross.get_xdata()[0] == pytest.approx(
        100 * sum(row["correct"] for row in asked) / sum(row["trials"] for row in asked)
    )
    bars = {bar.get_label(): bar for bar in figure.axes[0].containers}
    assert bars["BAM · init=laplace"][0].get_markerfacecolor() == "white"
    keys = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "one seed, where it was asked last" in keys
    assert "without stopped seeds" in keys


def test_training_lengths_that_differ_have_their_schemes_colours(swept):
    panels = _panels(by_axis.passkey_by_axis(swept))
    lines = {line.get_xdata()[0]: line.get_color() for line in by_gid(panels["length"], "training length")}
    assert lines == {80: look(0).color, 160: look(1).color, 320: look(2).color}
    (line,) = by_gid(panels["init"], "training length")
    assert (line.get_xdata()[0], line.get_color()) == (160, "#444444")


def test_one_axis_alone_and_one_that_is_not_there(swept):
    assert list(_panels(by_axis.perplexity_by_axis(swept, "s"))) == ["s"]
    with pytest.raises(NothingToShowError, match="compared along the axis 'depth'"):
        by_axis.perplexity_by_axis(swept, "depth")
    with pytest.raises(NothingToShowError, match="logit_scales"):
        by_axis.logit_scales_by_axis(swept, "init")


def test_bands_are_students_intervals_of_the_mean_loss(swept):
    figure = comparison.perplexity_by_position(swept)
    (band,) = by_gid(figure.axes[0], "interval:BAM")
    found = band.get_paths()[0].vertices
    for position in {row["position"] for row in swept["perplexity"]}:
        losses = [r["nll"] for r in swept["perplexity"] if (r["scheme"], r["position"]) == ("BAM", position)]
        assert len(losses) == len(SEEDS)
        _, low, high = over_seeds(losses)
        heights = found[np.isclose(found[:, 0], position), 1]
        assert (heights.min(), heights.max()) == pytest.approx((math.exp(low), math.exp(high)))


def test_one_seed_has_no_band(swept):
    alone = swept | {"perplexity": [row for row in swept["perplexity"] if row["seed"] == 0]}
    assert not by_gid(comparison.perplexity_by_position(alone).axes[0], "interval:BAM")


def test_every_gaussian_head_of_a_comparison_is_in_its_panel(swept):
    panel = _panels(by_axis.theta_by_axis(swept))["length"]
    for index, scheme in enumerate(("BAM · length=80", "BAM", "BAM · length=320")):
        dots = by_gid(panel, f"theta:{scheme}")
        expected = {
            (row["parameters"]["theta_alpha"], row["parameters"]["beta"])
            for row in swept["priors"]
            if row["scheme"] == scheme
        }
        assert {(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots} == expected
        assert {dot.get_color() for dot in dots} == {look(index).color}
    words = [text.get_text() for text in panel.texts]
    assert words == ["local\nβ > 0", "retrieval\n−0.6 ≤ β ≤ 0", "strong retrieval\nβ < −0.6"]


def test_logit_scales_are_shares_of_heads(swept):
    ((title, panel),) = _panels(by_axis.logit_scales_by_axis(swept)).items()
    assert title == "extension"
    for index, scheme in enumerate((FIRST, LONGER, SHIFTED)):
        (outline,) = by_gid(panel, f"s:{scheme}")
        assert to_hex(outline.get_edgecolor()) == look(index).color.lower()
        # Up and down once for every bin.
        y = outline.get_xy()[:, 1]
        assert sum(y[1:-1:2]) == pytest.approx(100)


def test_the_overview_leaves_out_what_stands_along_axes(swept):
    keys = [text.get_text() for text in comparison.passkey_by_length(swept).legends[0].get_texts()]
    assert keys == ["BAM", "ALiBi"]
    product = swept | {"schemes": [entry for entry in swept["schemes"] if entry["name"] not in ("BAM", "ALiBi")]}
    for section in ("passkey", "perplexity", "priors", "logit_scales", "extensions", "runs"):
        product[section] = [row for row in swept[section] if row["scheme"] not in ("BAM", "ALiBi")]
    with pytest.raises(NothingToShowError):
        comparison.passkey_by_length(product)


def test_axes_with_several_comparisons_have_figures_of_their_own(swept, monkeypatch):
    made = [entry | {"axes": entry["axes"] | {"size": 1}} for entry in swept["schemes"] if entry.get("axes")]
    twin = {"BAM": "BAM twin", "BAM · init=laplace": "laplace twin"}
    more = [e | {"name": twin[e["name"]], "axes": e["axes"] | {"size": 2}} for e in made if e["name"] in twin]
    rows = [row | {"scheme": twin[row["scheme"]]} for row in swept["passkey"] if row["scheme"] in twin]
    wide = swept | {"schemes": [*made, *more], "passkey": [*swept["passkey"], *rows]}
    wide["passkey"] = [row for row in wide["passkey"] if row["scheme"] != "ALiBi"]
    for section in ("perplexity", "priors", "logit_scales", "extensions", "runs"):
        wide[section] = []
    assert by_axis.axes_of_figures(swept) == [None]
    assert by_axis.axes_of_figures(wide) == ["init", "length", "s", "size", "extension"]
    assert list(_panels(by_axis.passkey_by_axis(wide, "size"))) == [
        "size (init=uniform)", "size (init=laplace)",
    ]  # fmt: skip
    stems = [picture.stem for picture in gallery.illustrations(wide) if picture.kind == "passkey_by_axis"]
    assert stems[0] == "passkey_by_axis_01_init"
    assert len(stems) == 5


def test_the_report_has_a_section_for_axes_and_extensions(swept, tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "png", lambda _: b"\x89PNG")
    write_report(swept, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Along each axis" in page
    assert "Extended to a longer context" in page
    assert "another prior" in page
    assert "Student" in page
    # Training lengths differ, so that there is no multiple of one.
    assert "× training" not in page


def test_a_recipe_says_what_stands_together(swept):
    """Extended models too; what is in no panel is not in these figures."""
    recipe = swept["recipe"] | {"panels": {"Starts": ["BAM · init=*", "BAM"], "Longer": [f"{FIRST}, *"]}}
    told = swept | {"recipe": recipe}
    starts = ["BAM · init=laplace", "BAM · init=sampled", "BAM"]
    for draw in (comparison.passkey_by_length, comparison.perplexity_by_position):
        shown = _panels(draw(told))
        assert {title: _keys(axes)[: 3 if title == "Starts" else 2] for title, axes in shown.items()} == {
            "Starts": starts,
            "Longer": ["trained on", "another prior"],  # of one scheme
        }
    assert comparison.passkey_by_length(told, "a task").get_suptitle() == "a task"
    # Of two schemes, the ways do not say which.
    others = [entry | {"extended_from": "BAM"} if entry["name"] == SHIFTED else entry for entry in swept["schemes"]]
    (longer,) = (one for one in selections.panels(told | {"schemes": others}) if one.title == "Longer")
    assert list(longer.values.values()) == [LONGER, SHIFTED]
    none = swept | {"recipe": swept["recipe"] | {"panels": {"Sinks": ["GOAT"]}}}
    assert len(_panels(comparison.passkey_by_length(none))) == 1


def test_many_schemes_have_lines_for_seeds_in_place_of_bands(swept):
    told = swept | {"recipe": swept["recipe"] | {"panels": {"All": ["*"]}}}
    (axes,) = _panels(comparison.perplexity_by_position(told)).values()
    assert "thin: single seeds" in axes.get_ylabel()
    assert not by_gid(axes, "interval:BAM")
    for seed in SEEDS:
        (line,) = by_gid(axes, f"seed:BAM:{seed}")
        rows = [row for row in swept["perplexity"] if (row["scheme"], row["seed"]) == ("BAM", seed)]
        assert list(line.get_ydata()) == pytest.approx([math.exp(row["nll"]) for row in rows])
