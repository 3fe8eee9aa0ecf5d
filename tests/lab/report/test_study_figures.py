"""The figures of a study, with and without data."""

import math
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from artists import by_gid
from matplotlib import pyplot
from matplotlib.colors import to_hex
from PIL import Image
from study_rows import (
    FIRST,
    LENGTHS,
    LONGER,
    SEEDS,
    SHIFTED,
    SWEPT_SEEDS,
    THETA_BETA,
    TRAINED,
    Rows,
    asked_row,
    attention_on_the_key,
    loss_row,
    study,
)  # fmt: skip

from attention_priors.lab.data.genomes import NUCLEOTIDES
from attention_priors.lab.intervals import over_seeds
from attention_priors.lab.report.comparisons import comparisons, panels
from attention_priors.lab.report.estimates import KINDS, by_task, gaussian_heads, own_passkeys, shares_by_length
from attention_priors.lab.report.figures import curves, heads, heatmaps, illustrations, style, write_pngs
from attention_priors.lab.report.figures.heatmaps import depth_rows
from attention_priors.lab.report.figures.style import COLOURS, label, look, looks


def drawn(rows: Rows, stem: str) -> Any:
    """Draw the figure of a file name."""
    (one,) = (one for one in illustrations(rows.results()) if one.stem == stem)
    return one.draw()


def points(line: Any) -> dict[float, float]:
    return dict(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))


def named(axes: Any, name: str) -> Any:
    (line,) = (line for line in axes.lines if line.get_label() == name)
    return line


def bars(axes: Any) -> dict[str, Any]:
    return {container.get_label(): container for container in axes.containers}


def keys(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def titled(figure: Any) -> dict[str, Any]:
    """Return the visible panels by their titles."""
    return {" ".join(axes.get_title(loc="left").split()): axes for axes in figure.axes if axes.get_visible()}


# ---- scores


def test_lines_and_intervals_match_the_table(rows):
    figure = drawn(rows, "passkey_by_length")
    shown = bars(figure.axes[0])
    cells = shares_by_length(own_passkeys(rows.results()))
    for scheme in rows.results().names:
        for complete, name in ((True, scheme), (False, f"{scheme}, without stopped seeds")):
            expected = cells[(cells.scheme == scheme) & (cells.complete == complete)]
            assert (name in shown) == bool(len(expected))
            if len(expected):
                line, _, (segments,) = shown[name]
                assert line.get_ydata() == pytest.approx(100 * expected.share)
                # Points are shifted sideways by less than half of the distance to the next length.
                assert line.get_xdata() == pytest.approx(expected.length, rel=0.2)
                ends = np.array([segment[:, 1] for segment in segments.get_segments()])
                assert ends == pytest.approx(100 * expected[["low", "high"]].to_numpy(), abs=1e-9)
    first = [shown[scheme][0].get_xdata()[0] for scheme in rows.results().names]
    assert len(set(first)) == len(first)


def test_seed_lines_need_several_seeds(rows):
    (line,) = by_gid(drawn(rows, "passkey_by_length"), "seed:BAM:1")
    shares = [
        np.mean([row["correct"] for row in rows.of("retrieval", scheme="BAM", seed=1, length=n)]) for n in LENGTHS
    ]
    assert line.get_ydata() == pytest.approx([100 * share for share in shares])
    rows[:] = [row for row in rows if row.get("seed", 0) == 0]
    assert not by_gid(drawn(rows, "passkey_by_length"), "seed:BAM:0")


@pytest.mark.parametrize("schemes", [curves.MOST_BANDS, 2 * curves.MOST_BANDS])
def test_many_schemes_have_no_seed_lines_and_lie_within_the_axes(schemes):
    names = [f"scheme {place}" for place in range(schemes)]
    rows = study({}, names)
    for name in names:
        for seed in range(2):
            rows += [{"scheme": name, "seed": seed} | asked_row(n, None, 9, 20) for n in (128, 512, 2048, 8192)]
    axes = drawn(rows, "passkey_by_length").axes[0]
    assert bool(by_gid(axes, "seed:scheme 0:1")) == (schemes <= curves.MOST_BANDS)
    places = [line.get_xdata() for line, *_ in bars(axes).values()]
    assert axes.get_xlim()[0] < np.min(places) < np.max(places) < axes.get_xlim()[1]


def test_crosses_mark_stopped_lines_only(rows):
    figure = drawn(rows, "passkey_by_length")
    for run in rows.of("run"):
        crosses = by_gid(figure, f"stopped:{run['scheme']}:{run['seed']}")
        assert len(crosses) == (run["stopped"] is not None)
        for cross in crosses:
            asked = [row["length"] for row in rows.of("retrieval", scheme=run["scheme"], seed=run["seed"])]
            assert cross.get_xdata()[0] == pytest.approx(max(asked), rel=0.2)
            assert cross.get_ydata()[0] == 0


def test_plans_mark_stopped_schemes():
    rows = study({}, ["NoPE", "ALiBi"])
    for scheme, lengths in (("NoPE", (240, 512)), ("ALiBi", (240, 512, 1024))):
        for seed in SEEDS:
            for length in lengths:
                why = "nothing right" if scheme == "NoPE" and length == 512 else None
                own = {"scheme": scheme, "seed": seed, "plan": "digits", "task": "passkey_8", "stopped": why}
                rows.append(asked_row(length, 0.5, 0.5) | own)
    figure = drawn(rows, "retrieval-digits-passkey-8")
    assert figure.axes[0].get_ylabel() == "score, % (bars: 95 % interval)"
    assert figure.get_suptitle() == "digits: passkey_8"
    for seed in SEEDS:
        (cross,) = by_gid(figure, f"stopped:NoPE:{seed}")
        assert cross.get_xdata()[0] == pytest.approx(512, rel=0.2)
        assert not by_gid(figure, f"stopped:ALiBi:{seed}")


def test_answers_are_drawn_by_tokens_too():
    rows = study({}, ["ALiBi"])
    told = {"plan": "digits", "task": "passkey_8", "token_accuracy": 0.75, "scheme": "ALiBi", "seed": 0}
    rows += [asked_row(length, 0.5, 0, trials=4) | told for length in (240, 512)]
    figure = drawn(rows, "retrieval-digits-passkey-8-answer-s-tokens")
    assert figure.axes[0].get_ylabel().startswith("answer's tokens right, %")
    assert bars(figure.axes[0])["ALiBi"][0].get_ydata() == pytest.approx([75, 75])


def test_token_axes_show_tokens_and_multiples_and_the_training_length(rows):
    for stem in ("passkey_by_length", "perplexity_by_position"):
        figure = drawn(rows, stem)
        figure.savefig(BytesIO())  # ticks are made during drawing
        axes = figure.axes[0]
        (line,) = by_gid(figure, "training length")
        assert list(line.get_xdata()) == [TRAINED, TRAINED]
        (above,) = axes.child_axes
        assert "1×" in [tick.get_text() for tick in above.get_xticklabels()]
        ticks = [tick.get_text() for tick in axes.get_xticklabels()]
        assert "4096" in ticks
        assert all(text.isdigit() for text in ticks)
        if stem == "passkey_by_length":
            assert ticks == [str(length) for length in LENGTHS]


# ---- colours and files


def test_a_scheme_has_one_colour_in_every_figure(rows):
    shown = looks(rows.results())
    for stem in ("passkey_by_length", "perplexity_by_position", "theta_scatter", "logit_scale_histogram"):
        legend = drawn(rows, stem).legends[0]
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
            if text.get_text() in shown:
                assert to_hex(handle.get_color()) == shown[text.get_text()].color.lower()
    assert {dot.get_color() for dot in by_gid(drawn(rows, "theta_scatter"), "theta:BAM")} == {shown["BAM"].color}


def test_many_schemes_have_distinct_styles(rows):
    assert len({(look(index).color, look(index).linestyle) for index in range(28)}) == 28
    first = looks(rows.results())["BAM"].linestyle
    more = [{"row": "scheme", "scheme": f"scheme {index}"} for index in range(len(COLOURS))]
    rows[:] = [rows[0], *more, *rows[1:]]
    later = looks(rows.results())["BAM"].linestyle
    figure = drawn(rows, "passkey_by_length")
    seeds = [line.get_linestyle() for seed in SEEDS for line in by_gid(figure, f"seed:BAM:{seed}")]
    assert seeds == [later] * len(SEEDS) != [first] * len(SEEDS)


def test_names_are_not_parsed_as_mathematics():
    assert label("cost $5 or $6") == r"cost \$5 or \$6"
    assert not label("_private").startswith("_")


def test_files_are_small_and_figures_leave_no_state(rows):
    figure = drawn(rows, "passkey_heatmap_04_BAM")
    content = style.png(figure)
    picture = Image.open(BytesIO(content))
    assert picture.mode == "P"
    assert picture.width == pytest.approx(120 * figure.get_figwidth(), abs=1)
    assert len(content) <= 100_000
    assert pyplot.get_fignums() == []


def test_large_figures_have_a_lower_resolution_and_fewer_colours(monkeypatch):
    figure, axes = style.start(4.0)
    axes.imshow(np.random.default_rng(0).random((300, 300)), cmap="viridis", interpolation="nearest")
    monkeypatch.setattr(style, "_LARGEST_FILE", 0)
    picture = Image.open(BytesIO(style.png(figure)))
    assert picture.width == pytest.approx(80 * style.WIDTH, abs=1)
    assert len(picture.getcolors() or []) in range(1, 49)


# ---- heatmaps

TENTHS = ["0–10", "10–20", "20–30", "30–40", "40–50", "50–60", "60–70", "70–80", "80–90", "90–100"]


def test_few_common_depths_are_rows():
    depths = [index / 19 for index in range(20)]
    names, row_of = depth_rows([depths, {*depths}])
    assert (names[:3], names[-1]) == (["0", "5", "11"], "100")
    assert [row_of[depth] for depth in depths] == [*range(20)]


@pytest.mark.parametrize("measured", [[[0.3], [0.6]], [[0.3, 0.6], [0.3]], [[index / 20 for index in range(21)]]])
def test_other_depths_are_grouped_by_tenths(measured):
    names, row_of = depth_rows(measured)
    assert names == TENTHS
    assert {row_of[depth] for found in measured for depth in found} <= {*range(10)}


def test_depths_on_an_edge_belong_to_the_farther_tenth():
    edges = [index / 10 for index in range(11)]
    _, row_of = depth_rows([[*edges, 1 - 0.9, 0.29, 0.05], [0.5]])
    assert [row_of[edge] for edge in edges] == [*range(10), 9]
    assert (row_of[1 - 0.9], row_of[0.29], row_of[0.05]) == (1, 2, 0)


def cells_of(axes: Any) -> dict[tuple[int, int], str]:
    """Return the numbers by (column, line). Means come after the others."""
    places = ((text.get_text(), *text.get_position()) for text in axes.texts)
    return {(round(x - 0.5), round(y - 0.5)): text for text, x, y in places}


@pytest.mark.parametrize(("stem", "scheme"), [("01_NoPE", "NoPE"), ("05_BAM-SSMax", "BAM <SSMax>")])
def test_heatmaps_have_cells_and_means(rows, stem, scheme):
    (axes,) = drawn(rows, f"passkey_heatmap_{stem}").axes
    shown, own = cells_of(axes), rows.of("retrieval", scheme=scheme)
    evaluated = sorted({row["length"] for row in own})
    share = lambda found: f"{100 * np.mean([row['correct'] for row in found]):.0f}"  # noqa: E731
    for column, length in enumerate(evaluated):
        here = [row for row in own if row["length"] == length]
        assert shown[column, 20] == share(here)
        for line in range(20):
            assert shown[column, line] == share([row for row in here if row["depth"] == line / 19])
    for line in range(20):
        # Without the lengths after the stop, the mean would be too high.
        whole = share([row for row in own if row["depth"] == line / 19])
        assert shown[len(LENGTHS), line] == (whole if evaluated == [*LENGTHS] else "–")
    assert len(by_gid(axes, "not evaluated")) == (len(LENGTHS) - len(evaluated)) * 21
    assert axes.yaxis_inverted()


def test_heatmaps_mark_lengths_with_missing_seeds(rows):
    last = LENGTHS[-1]
    for row in rows.of("retrieval", scheme="BAM <SSMax>", seed=0, length=last):
        rows.remove(row)
    (axes,) = drawn(rows, "passkey_heatmap_05_BAM-SSMax").axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [*map(str, LENGTHS[:-1]), f"{last}†", "mean"]
    assert sum(text.get_text() == "–" for text in axes.texts) == 20


def test_drawn_depths_are_grouped_by_tenths():
    rows = study({}, ["NoPE", "ALiBi"])
    # At each length: two texts of the fourth tenth, one of them right, and one text alone in its tenth.
    for length, depths in {240: (0.3, 0.37, 0.02), 512: (0.31, 0.36, 0.6), 1024: (0.32, 0.39, 0.7)}.items():
        for scheme in ("NoPE", "ALiBi"):
            own = {"scheme": scheme, "seed": 0, "plan": "needles", "task": "niah_single_1"}
            rows += [asked_row(length, depth, float(place == 0)) | own for place, depth in enumerate(depths)]
    (axes,) = drawn(rows, "retrieval_heatmap_needles-niah-single-1_01_NoPE").axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [*TENTHS, "mean"]
    shown = cells_of(axes)
    inside = {place: text for place, text in shown.items() if place[0] < 3 and place[1] < 10}
    assert inside == {**dict.fromkeys([(0, 3), (1, 3), (2, 3)], "50"), (0, 0): "0", (1, 6): "0", (2, 7): "0"}
    assert shown[3, 3] == "50"
    assert {shown[column, 10] for column in range(3)} == {"33"}
    assert len(by_gid(axes, "not evaluated")) == 3 * 10 - 6
    assert "score in needles: niah_single_1" in " ".join(axes.get_title(loc="left").split())


# ---- losses


def test_perplexity_comes_from_the_mean_loss_over_seeds(swept):
    axes = drawn(swept, "perplexity_by_position").axes[0]
    (band,) = by_gid(axes, "interval:BAM")
    edges = band.get_paths()[0].vertices
    for position, value in points(named(axes, "BAM")).items():
        losses = [row["nll"] for row in swept.of("perplexity", scheme="BAM", position=position)]
        assert len(losses) == len(SWEPT_SEEDS)
        mean, low, high = map(math.exp, over_seeds(losses))
        assert value == pytest.approx(mean)
        heights = edges[np.isclose(edges[:, 0], position), 1]
        assert (heights.min(), heights.max()) == pytest.approx((low, high))
    swept[:] = [row for row in swept if row.get("seed", 0) == 0]
    assert not by_gid(drawn(swept, "perplexity_by_position"), "interval:BAM")


def test_perplexities_beyond_the_axis_are_labelled_and_do_not_compress_others(rows):
    rows.of("perplexity")[0]["nll"] = 5000.0
    axes = drawn(rows, "perplexity_by_position").axes[0]
    lowest = min(points(named(axes, "BAM <SSMax>")).values())
    assert axes.get_ylim()[1] == pytest.approx(curves.PERPLEXITY_RANGE * lowest)
    assert "NoPE (up to" in axes.get_title(loc="left")
    assert "<SSMax>" not in axes.get_title(loc="left")
    rows.put("perplexity", rows.of("perplexity", scheme="BAM <SSMax>"))
    axes = drawn(rows, "perplexity_by_position").axes[0]
    assert axes.get_title(loc="left") == ""
    assert max(points(named(axes, "BAM <SSMax>")).values()) < axes.get_ylim()[1] < curves.PERPLEXITY_RANGE * lowest


def test_positions_without_a_loss_are_omitted(rows):
    missing = rows.of("perplexity")[0]
    missing["nll"] = None
    axes = drawn(rows, "perplexity_by_position").axes[0]
    assert missing["position"] not in points(named(axes, missing["scheme"]))
    for row in rows.of("perplexity"):
        row["nll"] = None
    assert drawn(rows, "perplexity_by_position") is None


def test_many_schemes_have_seed_lines_instead_of_bands(swept):
    swept[0]["recipe"]["panels"] = {"All": ["*"]}
    (axes,) = titled(drawn(swept, "perplexity_by_position")).values()
    assert "thin: single seeds" in axes.get_ylabel()
    assert not by_gid(axes, "interval:BAM")
    for seed in SWEPT_SEEDS:
        (line,) = by_gid(axes, f"seed:BAM:{seed}")
        losses = [row["nll"] for row in swept.of("perplexity", scheme="BAM", seed=seed)]
        assert list(line.get_ydata()) == pytest.approx([math.exp(loss) for loss in losses])


def test_losses_on_genomes_are_drawn_in_bits_on_a_linear_axis():
    rows = study({"tokenizer": NUCLEOTIDES}, ["ALiBi", "BAM"])
    for place, scheme in enumerate(("ALiBi", "BAM")):
        rows += [
            {"scheme": scheme, "seed": 0} | loss_row(2.0**k, math.log(4) * (0.9 + place / 50 - k / 500), 9)
            for k in range(8)
        ]
    axes = drawn(rows, "perplexity_by_position").axes[0]
    assert (axes.get_yscale(), axes.get_ylabel()) == ("linear", "bits per base")
    shown = points(named(axes, "ALiBi"))
    assert shown[4.0] == pytest.approx(2 * (0.9 - 2 / 500))
    low, high = axes.get_ylim()
    assert high - low < 0.1  # differences are hundredths of a bit
    rows.of("perplexity", scheme="BAM")[0]["nll"] = 50.0
    axes = drawn(rows, "perplexity_by_position").axes[0]
    assert axes.get_ylim()[1] < 6
    assert "BAM (up to" in axes.get_title(loc="left")


# ---- panels and axes


def test_recipes_define_the_panels(swept):
    """Panels include extended models. Schemes outside of all panels are not in these figures."""
    swept[0]["recipe"]["panels"] = {"Starts": ["BAM · init=*", "BAM"], "Longer": [f"{FIRST}, *"]}
    starts = ["BAM · init=laplace", "BAM · init=sampled", "BAM"]
    for stem in ("passkey_by_length", "perplexity_by_position"):
        shown = titled(drawn(swept, stem))
        assert keys(shown["Starts"])[:3] == starts
        assert keys(shown["Longer"])[:2] == ["trained on", "another prior"]  # of one scheme
    shifted = swept.of("scheme", scheme=SHIFTED)[0]
    shifted["extended_from"] = "BAM"
    (longer,) = (one for one in panels(swept.results()) if one.title == "Longer")
    assert list(longer.values.values()) == [f"{FIRST}: trained on", "BAM: another prior"]
    shifted["axes"]["extension"] = "trained on"
    (longer,) = (one for one in panels(swept.results()) if one.title == "Longer")
    assert list(longer.values.values()) == [FIRST, "BAM"]
    swept[0]["recipe"]["panels"] = {"Longer": ["BAM", f"{FIRST}, *"]}
    assert list(panels(swept.results())[0].values.values()) == ["BAM", f"{FIRST}: trained on", "BAM: trained on"]
    swept[0]["recipe"]["panels"] = {"Sinks": ["GOAT"]}
    assert len(titled(drawn(swept, "passkey_by_length"))) == 1


def test_variants_of_a_scheme_have_its_look_in_all_panels_where_they_are_apart():
    rows = study({}, ["BAM", "ALiBi", "ALiBi, flat+SSMax"])
    for scheme in ("BAM", "ALiBi", "ALiBi, flat+SSMax"):
        own = {"scheme": scheme, "plan": "drowning", "layer": 1, "head": 0, "texts": 5, "weight": 0.5}
        rows += [{"row": "needle_weight", "seed": 0, "length": length} | own for length in (160, 8192)]
    rows[0]["recipe"]["panels"] = {"Plain": ["BAM", "ALiBi"], "Scaled": ["*+SSMax"], "ALiBi": ["ALiBi*"]}
    shown = titled(drawn(rows, "needle-weights-drowning"))
    of_title = {"Plain": {"BAM": 0, "ALiBi": 1}, "Scaled": {"ALiBi, flat+SSMax": 1}}
    of_title["ALiBi"] = {"ALiBi": 0, "ALiBi, flat+SSMax": 1}
    for title, indices in of_title.items():
        lines = {str(line.get_gid()): line.get_color() for line in shown[title].lines}
        assert {name: lines[f"weight:{name}"] for name in indices} == {n: look(i).color for n, i in indices.items()}


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["BAM+SSMax", "ALiBi, flat+SSMax"], ["BAM", "ALiBi, flat"]),
        (["BAM, near and far+SSMax", "T5, near and far+SSMax"], ["BAM", "T5"]),
        (["BAM, far", "T5, so far"], ["BAM, far", "T5, so far"]),  # no comma or plus in what they share
        (["BAM+SSMax"], ["BAM+SSMax"]),
    ],
)
def test_labels_of_a_panel_leave_out_an_ending_that_all_share(names: list[str], labels: list[str]):
    rows = study({}, names)
    rows[0]["recipe"]["panels"] = {"All": ["*"]}
    assert list(panels(rows.results())[0].values.values()) == labels


def test_the_overview_omits_schemes_of_axes(swept):
    legend = drawn(swept, "passkey_by_length").legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["BAM", "ALiBi"]
    swept[:] = [row for row in swept if row.get("scheme") not in ("BAM", "ALiBi")]
    assert drawn(swept, "passkey_by_length") is None


def test_panels_show_the_compared_axes(swept):
    for stem in ("passkey_by_axis", "perplexity_by_axis"):
        shown = titled(drawn(swept, stem))
        assert list(shown) == ["init", "length", "s", "extension"]
        assert keys(shown["length"])[:3] == ["80", "160 (base)", "320"]
        assert len(by_gid(shown["length"], "training length")) == 3
    # Each training length has the colour of its scheme.
    lines = by_gid(titled(drawn(swept, "passkey_by_axis"))["length"], "training length")
    assert [line.get_color() for line in lines] == [look(index).color for index in range(3)]


def test_panels_hold_every_gaussian_head_of_their_comparison(swept):
    panel = titled(drawn(swept, "theta_by_axis"))["length"]
    for index, scheme in enumerate(("BAM · length=80", "BAM", "BAM · length=320")):
        dots = by_gid(panel, f"theta:{scheme}")
        found = [row["parameters"] for row in swept.of("prior", scheme=scheme)]
        assert {(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots} == {
            (one["theta_alpha"], one["beta"]) for one in found
        }
        assert {(dot.get_color(), dot.get_marker()) for dot in dots} == {look(index)[:2]}
    words = [text.get_text() for text in panel.texts]
    assert words == ["local\nβ > 0", "retrieval\n−0.6 ≤ β ≤ 0", "strong retrieval\nβ < −0.6"]


def test_histograms_of_logit_scales_show_shares_of_heads(swept):
    ((title, panel),) = titled(drawn(swept, "logit_scales_by_axis")).items()
    assert title == "extension"
    for index, scheme in enumerate((FIRST, LONGER, SHIFTED)):
        (outline,) = by_gid(panel, f"s:{scheme}")
        assert to_hex(outline.get_edgecolor()) == look(index).color.lower()
        # Each bin has two edges.
        assert sum(outline.get_xy()[1:-1:2, 1]) == pytest.approx(100)


def test_the_longest_length_has_one_line_per_value(swept):
    (axes,) = drawn(swept, "longest_by_axis").axes
    lines = [tick.get_text() for tick in axes.get_yticklabels()]
    assert lines[:5] == ["init", "uniform (base)", "laplace", "sampled", "length"]
    cells = shares_by_length(own_passkeys(swept.results())).query("length == 8192").set_index("scheme")
    for scheme in ("BAM · init=laplace", "BAM"):
        shown = bars(axes)[scheme][0]
        assert shown.get_xdata()[0] == pytest.approx(100 * cells.share[scheme])
    (base,) = by_gid(axes, "base:init")
    assert set(base.get_xdata()) == {100 * cells.share["BAM"]}
    assert len([line for line in axes.lines if str(line.get_gid()).startswith("seed:BAM:")]) == 3 * len(SWEPT_SEEDS)


def test_stopped_seeds_are_crosses_at_their_last_length(swept):
    for row in swept.of("retrieval", scheme="BAM · init=laplace", seed=1, length=8192):
        swept.remove(row)
    (axes,) = drawn(swept, "longest_by_axis").axes
    (seed,) = by_gid(axes, "seed:BAM · init=laplace:1")
    assert seed.get_marker() == "x"
    assert bars(axes)["BAM · init=laplace"][0].get_markerfacecolor() == "white"


def test_axes_with_several_comparisons_have_separate_figures():
    stands = [{"scheme": "X", "init": init, "size": size} for init in ("a", "b") for size in (1, 2)]
    rows = study({}, {str(one): {"axes": one} for one in stands})
    rows += [{"scheme": str(one), "seed": 0} | asked_row(64, 0.5, 1) for one in stands]
    stems = [one.stem for one in illustrations(rows.results()) if one.kind == "passkey_by_axis"]
    assert stems == ["passkey_by_axis_01_init", "passkey_by_axis_02_size"]
    assert list(titled(drawn(rows, stems[1]))) == ["size (init=a)", "size (init=b)"]
    assert drawn(rows, "perplexity_by_axis_01_init") is None


# ---- heads


def test_prior_curves_are_relative_to_their_maximum_and_cut(rows):
    for row in rows.of("prior"):
        row["log_prior"] = [value + 7.5 for value in row["log_prior"]]
    figure = drawn(rows, "prior_curves_04_BAM")
    assert list(titled(figure)) == ["layer 0, seed 0", "layer 1, seed 0", "layer 0, seed 1", "layer 1, seed 1"]
    first = rows.of("prior", scheme="BAM")[0]
    (line,) = by_gid(figure.axes[0], "head:0")
    curve = np.array(first["log_prior"])
    assert curve.min() < -1e20
    assert line.get_ydata() == pytest.approx(np.maximum(curve - curve.max(), -30))
    assert list(points(line)) == first["distance"]


def test_equal_priors_are_drawn_once(rows):
    (axes,) = drawn(rows, "prior_curves_02_ALiBi").axes
    assert axes.get_title(loc="left") == "every layer, every seed"
    assert len(axes.lines) == 4


def test_missing_log_priors_are_gaps(rows):
    found = rows.of("prior", scheme="BAM")
    found[0]["log_prior"][3] = None
    found[1]["log_prior"] = [None] * len(found[1]["log_prior"])
    lines = drawn(rows, "prior_curves_04_BAM").axes[0].lines
    assert list(np.isnan(lines[0].get_ydata()).nonzero()[0]) == [3]
    assert np.isnan(lines[1].get_ydata()).all()


def test_theta_scatter_shows_every_gaussian_head_and_only_those(rows):
    figure = drawn(rows, "theta_scatter")
    for scheme in ("BAM", "BAM <SSMax>"):
        dots = by_gid(figure, f"theta:{scheme}")
        assert sorted(dot.get_ydata()[0] for dot in dots) == sorted(len(SEEDS) * THETA_BETA)
    assert not by_gid(figure, "theta:ALiBi")
    bottom, top = figure.axes[0].get_ylim()
    assert bottom < min(THETA_BETA) < max(THETA_BETA) < top
    # Within one scheme, markers stand for layers.
    rows.put("prior", rows.of("prior", scheme="BAM"))
    figure = drawn(rows, "theta_scatter")
    assert len({dot.get_marker() for dot in by_gid(figure, "theta:BAM")}) == 2
    assert "layer 1" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_gaussians_within_sums_are_separate_heads():
    def of(lead: str, theta_alpha: float, beta: float | None) -> dict[str, Any]:
        return {f"{lead}beta": beta, f"{lead}theta_alpha": theta_alpha, f"{lead}mu": 0.0}

    first, second = of("generalized_gaussian.", 0.5, 0.7), of("generalized_gaussian_2.", -1.0, -0.3)
    priors = [
        ("generalized_gaussian + window", first),
        ("generalized_gaussian + key_sink + generalized_gaussian", {**first, "key_sink.bump": 3.0, **second}),
        ("generalized_gaussian", of("", 0.1, 0.2)),
        # Heads without Gaussians, and results of versions without θα of summands.
        ("generalized_gaussian", of("", 0.1, None)),
        ("generalized_gaussian + window", {"generalized_gaussian.beta": 0.7}),
        ("spectral + key_sink", {"key_sink.bump": 3.0}),
    ]
    rows = study({}, ["BAM"])
    for head, (prior, parameters) in enumerate(priors):
        own = {"scheme": "BAM", "seed": 0, "layer": 1, "head": head, "distance": [0], "log_prior": [0.0]}
        rows.append({"row": "prior"} | own | {"prior": prior, "parameters": parameters})
    found = gaussian_heads(rows.results()["prior"])
    assert [*found[["theta_alpha", "beta"]].itertuples(index=False, name=None)] == [
        (0.5, 0.7), (0.5, 0.7), (-1.0, -0.3), (0.1, 0.2),
    ]  # fmt: skip
    dots = by_gid(drawn(rows, "theta_scatter"), "theta:BAM")
    assert {(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots} == {(0.5, 0.7), (-1.0, -0.3), (0.1, 0.2)}


def test_histograms_count_every_head(rows):
    (axes,) = drawn(rows, "logit_scale_histogram").axes
    (outline,) = by_gid(axes, "s:BAM <SSMax>")
    assert sum(outline.get_xy()[1:-1:2, 1]) == pytest.approx(100)


def test_every_head_has_a_line_of_reach():
    rows = study({}, ["steady", "loses"])
    for index, found in enumerate([[2, 60, 1], [8, 9, 200], [9, 9, 9], [32, 32, 31]]):
        half = dict(zip(("64", "128", "256"), found, strict=True))
        own = {"scheme": "loses", "seed": 0, "layer": index // 2, "head": index % 2}
        rows.append({"row": "prior_reach"} | own | {"half": half})
    shown = titled(drawn(rows, "prior_reach"))
    assert list(shown) == ["loses"]
    lines = by_gid(shown["loses"], "reach:loses:near-sighted")
    assert [points(line) for line in lines] == [{64: 2, 128: 60, 256: 1}, {64: 8, 128: 9, 256: 200}]
    far, _ = by_gid(shown["loses"], "reach:loses:far-sighted")
    assert far.get_color() != lines[0].get_color()


# ---- the copy-mixture task, sinks and sums


def sums() -> Rows:
    """Return two heads of a sum whose sink differs in the second seed, with the masses of its priors."""
    rows = study({"training": {"context_length": 64}}, ["GOAT", "RoPE"])
    for seed in SEEDS:
        for head in (0, 1):
            own = {"scheme": "GOAT", "seed": seed, "layer": 0, "head": head}
            term = {"row": "prior_term"} | own | {"places": list(range(6))}
            near = [-3.0, 0.0, *(-5.0 - head for _ in range(4))]
            rows.append(
                term | {"prior": "spectral", "over": "distance", "log_prior": near}
                | {"ahead": [-3.0, 1.0, 2.0, 3.0, 4.0, None], "scale": None}
            )  # fmt: skip
            sink = [2.0 + seed, 0.0, 0.0, 0.0, 0.0, 0.0]
            rows.append(term | {"prior": "key_sink", "over": "key", "log_prior": sink, "ahead": None, "scale": None})
            rows.append({"row": "prior_mass"} | own | {"first": 0.2 + 0.5 * head, "previous": 0.5, "itself": 0.1})
    return rows


def shown_map(figure: Any) -> np.ndarray:
    (axes,) = (axes for axes in figure.axes if axes.get_title() == "layer 0, head 1\nfirst 70 %,\nprevious 50 %")
    return np.ma.filled(np.ma.asarray(axes.images[0].get_array()).astype(float), math.nan)


def test_summands_are_drawn_below_their_maximum():
    panel = titled(drawn(sums(), "prior_terms_01_GOAT"))["key_sink, layer 0, seed 1"]
    (line,) = by_gid(panel, "head:1")
    assert points(line) == {0: 0, 1: -3, 2: -3, 3: -3, 4: -3, 5: -3}


def test_maps_are_causal_probabilities():
    weights = shown_map(drawn(sums(), "prior_weights_01_GOAT"))
    assert weights.shape == (6, 6)
    assert np.isnan(weights[np.triu_indices(6, 1)]).all()
    assert np.nansum(weights, axis=1) == pytest.approx(np.ones(6))
    logits = np.array([2.0 - 6, -6, 0.0, -3.0])  # query 3, first seed
    assert weights[3, :4] == pytest.approx(np.exp(logits) / np.exp(logits).sum())


def test_maps_show_the_scaled_prior():
    """Two keys differ by ``e^Δ`` without the scale, and by ``e^(c Δ)`` with it."""
    rows, scale = sums(), [0.0, 0.5, 1.0, -1.0, 2.0, 3.0]
    for row in rows.of("prior_term"):
        row["scale"], row["log_prior"][5] = scale, None
    weights = shown_map(drawn(rows, "prior_weights_01_GOAT"))
    # K(1) - K(0) = 3 between neighbours, and key 0 has 2 more.
    for query in range(2, 5):
        assert weights[query, query - 1] / weights[query, query] == pytest.approx(math.exp(3 * scale[query]))
    assert weights[1, 0] / weights[1, 1] == pytest.approx(math.exp(5 * scale[1]))
    assert weights[5, 5] == 0  # hidden by the sink that ends there
    assert np.nansum(weights, 1) == pytest.approx(1)


def test_maps_before_the_mask_show_hidden_keys():
    rows = sums()
    figure = drawn(rows, "prior_logits_01_GOAT")
    shown = shown_map(figure)
    row = np.array([2.0, -3.0, 1.0, 2.0, 3.0, 4.0])  # of query 1, first seed: the previous key, its own, four ahead
    assert shown[1] == pytest.approx(row - row.mean())
    assert np.isnan(shown[0]).tolist() == [False] * 5 + [True]  # five ahead: hidden by the prior itself
    assert np.nanmean(shown, 1) == pytest.approx(0, abs=1e-9)
    assert figure.get_suptitle() == "GOAT"
    for term in rows.of("prior_term"):
        term["ahead"] = None
    assert drawn(rows, "prior_logits_01_GOAT") is None  # of versions that did not store it


def test_priors_of_one_table_have_maps_and_no_summands():
    rows = sums()
    rows.put("prior_term", [row for row in rows.of("prior_term") if row["over"] == "distance"])
    near = np.exp(np.array([-3.0, 0.0, -6.0, -6.0, -6.0, -6.0]))
    assert shown_map(drawn(rows, "prior_weights_01_GOAT"))[5] == pytest.approx(near[::-1] / near.sum())
    assert drawn(rows, "prior_terms_01_GOAT") is None


def test_the_strongest_sink_is_drawn_against_its_signal():
    rows, factors = study({}, ["GOAT"]), (0.0, 1.0, 8.0)
    for seed in SEEDS:
        for head in (0, 1):
            for factor in factors:
                own = {"scheme": "GOAT", "seed": seed, "layer": 0, "head": head, "factor": factor}
                mass = {"signal": factor * (1 + head), "mass": 0.9 / (1 + factor + seed + head)}
                rows.append({"row": "sink_mass"} | own | mass)
    (axes,) = drawn(rows, "sink_mass").axes
    (line,) = by_gid(axes, "sink:GOAT")
    expected = {f: 100 * sum(0.9 / (1 + f + seed) for seed in SEEDS) / 2 for f in factors}  # of head 0
    assert points(line) == pytest.approx(expected)
    (ring,) = (line for line in axes.lines if line.get_markerfacecolor() == "none")
    assert points(ring) == pytest.approx({1.0: expected[1.0]})


def test_losses_of_copies_are_drawn_above_the_optimum():
    rows = study({}, ["GOAT", "RoPE"])
    for place, scheme in enumerate(("GOAT", "RoPE")):
        for seed in SEEDS:
            for index, kind in enumerate(KINDS):
                loss = {"kind": kind, "expected_nll": 2.0, "optimal_nll": 2.1, "tokens": 100}
                nll = 2.1 + 0.1 * (index - 1) + 0.01 * seed + place
                own = {"row": "copying", "scheme": scheme, "seed": seed}
                rows += [own | {"length": length, "nll": nll} | loss for length in (64, 128)]
    shown = titled(drawn(rows, "copying_by_length"))
    for place, (kind, words) in enumerate(KINDS.items()):
        for index, scheme in enumerate(("GOAT", "RoPE")):
            (line,) = by_gid(shown[words], f"copying:{kind}:{scheme}")
            assert points(line) == pytest.approx(dict.fromkeys((64, 128), 0.1 * (place - 1) + 0.005 + index))
        bottom, top = shown[words].get_ylim()
        assert bottom < 0 < top
    assert "bands: 95 % interval" in shown["all tokens"].get_ylabel()
    for row in rows.of("copying"):
        row["nll"] += 50 * row["seed"] - 25
    assert titled(drawn(rows, "copying_by_length"))["all tokens"].get_ylim()[1] < 2  # wide bands are cut off
    rows[0]["recipe"]["panels"] = {"A sink": ["GOAT"], "No sink": ["RoPE"]}
    shown = titled(drawn(rows, "copying_by_length"))
    for index, (title, scheme) in enumerate((("A sink", "GOAT"), ("No sink", "RoPE"))):
        (line,) = by_gid(shown[title], f"excess:{scheme}")
        assert points(line) == pytest.approx(dict.fromkeys((64, 128), -0.1 + 0.005 + index))  # of all tokens


def test_margins_are_drawn_by_seed():
    rows = study({}, ["ALiBi", "BAM"])
    for seed, length, of_texts in ((0, 512, (1.0, 3.0)), (0, 2048, (-1.0, 1.0)), (1, 512, (4.0,)), (1, 2048, (2.0,))):
        own = {"scheme": "ALiBi", "seed": seed, "plan": "digits"}
        rows += [asked_row(length, 0.5, 1, token_accuracy=1.0, margin=margin) | own for margin in of_texts]
    figure = drawn(rows, "margins-digits-passkey")
    lines = {line.get_gid(): list(points(line).values()) for line in figure.axes[0].lines}
    assert lines["margin:ALiBi"] == pytest.approx([3, 1])
    assert lines["seed:ALiBi:0"] == pytest.approx([2, 0])
    assert lines["seed:ALiBi:1"] == pytest.approx([4, 2])
    assert "margin:BAM" not in lines
    for row in rows:
        row |= {"plan": None} if "plan" in row else {}
    assert by_gid(drawn(rows, "passkey_margins").axes[0], "margin:ALiBi")
    assert "thin: single seeds" in figure.axes[0].get_ylabel()


def test_attention_on_the_pass_key_is_drawn_by_seed():
    rows = attention_on_the_key()
    for shown_in in ({}, {"One": ["ALiBi"], "Other": ["BAM"]}):
        rows[0]["recipe"]["panels"] = shown_in
        figure = drawn(rows, "needle-weights-drowning")
        lines = {line.get_gid(): list(points(line).values()) for line in figure.axes[0].lines}
        assert lines["weight:ALiBi"] == pytest.approx([70, 45])
        assert lines["seed:ALiBi:0"] == pytest.approx([80, 70])
        assert lines["seed:ALiBi:1"] == pytest.approx([60, 20])
        assert "thin: single seeds" in figure.axes[0].get_ylabel()
    assert list(titled(figure)) == ["One"]  # the other panel's scheme has no measurements


# ---- files


def test_file_names_are_safe_and_distinct(rows):
    for row in rows:
        row |= (
            {"scheme": {"ALiBi": "a/../b", "BAM": "a b"}.get(row["scheme"], row["scheme"])} if "scheme" in row else {}
        )
    stems = [one.stem for one in illustrations(rows.results())]
    assert {"passkey_heatmap_02_a-..-b", "passkey_heatmap_04_a-b", "prior_curves_04_a-b"} <= {*stems}
    assert len({*map(str.casefold, stems)}) == len(stems)
    asked = [asked_row(64, None, 1) | {"scheme": "NoPE", "seed": 0, "plan": plan} for plan in ("n_1", "n-1")]
    named = [one.stem for one in illustrations(rows.put("retrieval", asked).results()) if one.kind == "retrieval"]
    assert named == ["retrieval-n-1-passkey", "retrieval-n-1-passkey-2"]
    long = study({}, ["x" * 300])
    long.append({"scheme": "x" * 300, "seed": 0} | asked_row(64, 0.5, 1))
    assert all(len(one.stem) < 200 for one in illustrations(long.results()))


def test_files_of_earlier_figures_are_removed(tmp_path):
    for name in ("prior_curves_09_gone.png", "holiday.png", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    written = write_pngs([("sink_mass", b"new")], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"sink_mass.png", "holiday.png", "notes.txt"}
    assert [path.read_bytes() for path in written] == [b"new"]
    assert write_pngs([], tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_figures_without_data_are_not_drawn(rows):
    empty = study({}, ["NoPE"]).results()
    assert [one.stem for one in illustrations(empty) if one.draw() is not None] == []
    axes = comparisons(empty)
    assert heatmaps.longest_by_axis(axes, empty["retrieval"]) is None
    assert heads.thetas(empty, axes) is None
    assert [*by_task(empty["retrieval"])] == []
    (one,) = (one for one in illustrations(rows.results()) if one.stem == "passkey_heatmap_01_NoPE")
    assert one.alt == "Share of pass keys retrieved at each depth and context length: NoPE."
    assert isinstance(one.draw, partial)
