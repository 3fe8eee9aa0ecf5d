import math
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from artists import by_gid
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from synthetic_results import LENGTHS, SEEDS, THETA_BETA, TRAINED

from attention_priors.lab.report import write_figures
from attention_priors.lab.report.figures import comparison, gallery
from attention_priors.lab.report.figures.drawing import PERPLEXITY_RANGE
from attention_priors.lab.report.figures.style import COLOURS, label, looks
from attention_priors.lab.report.pages import images
from attention_priors.lab.report.selections.passkeys import passkey_table
from attention_priors.lab.results_format import SECTIONS


def points(line) -> dict[float, float]:
    """What a line goes through."""
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def named(axes, label) -> Line2D:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def containers(figure) -> dict:
    """The error bars of the passkey figure by label."""
    return {container.get_label(): container for container in figure.axes[0].containers}


def legend_colours(figure) -> dict[str, str]:
    legend = figure.legends[0]
    return {
        text.get_text(): to_hex(handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor())
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
    }


def test_passkey_lines_and_intervals_are_the_table(results):
    bars = containers(comparison.passkey_by_length(results))
    for scheme in (scheme["name"] for scheme in results["schemes"]):
        cells = [cell for cell in passkey_table(results) if cell.scheme == scheme]
        for complete, name in ((True, scheme), (False, f"{scheme}, without stopped seeds")):
            expected = [cell for cell in cells if cell.complete == complete]
            assert (name in bars) == bool(expected)
            if not expected:
                continue
            line, _, (segments,) = bars[name]
            assert line.get_ydata() == pytest.approx([100 * cell.share for cell in expected])
            # Moved sideways by less than half of the way to the next length.
            assert line.get_xdata() == pytest.approx([cell.length for cell in expected], rel=0.2)
            ends = np.array([segment[:, 1] for segment in segments.get_segments()])
            assert ends[:, 0] == pytest.approx([100 * cell.low for cell in expected])
            assert ends[:, 1] == pytest.approx([100 * cell.high for cell in expected])


def test_points_of_different_schemes_do_not_coincide(results):
    bars = containers(comparison.passkey_by_length(results))
    first = [bars[scheme["name"]][0].get_xdata()[0] for scheme in results["schemes"]]
    assert len(set(first)) == len(first)


def test_seed_lines_are_drawn_only_where_there_are_several(results):
    several = comparison.passkey_by_length(results)
    (line,) = by_gid(several, "seed:BAM:1")
    mine = [row for row in results["passkey"] if (row["scheme"], row["seed"]) == ("BAM", 1)]
    shares = [100 * np.mean([row["correct"] for row in mine if row["length"] == n]) for n in LENGTHS]
    assert line.get_ydata() == pytest.approx(shares)
    results["passkey"] = [row for row in results["passkey"] if row["seed"] == 0]
    assert not by_gid(comparison.passkey_by_length(results), "seed:BAM:0")


def test_a_cross_ends_the_stopped_lines_and_no_others(results):
    figure = comparison.passkey_by_length(results)
    for run in results["runs"]:
        crosses = by_gid(figure, f"stopped:{run['scheme']}:{run['seed']}")
        assert len(crosses) == (run["stopped"] is not None)
        for cross in crosses:
            lengths = [
                r["length"] for r in results["passkey"] if (r["scheme"], r["seed"]) == (run["scheme"], run["seed"])
            ]
            assert cross.get_xdata()[0] == pytest.approx(max(lengths), rel=0.2)
            assert cross.get_ydata()[0] == 0


def test_token_axes_show_tokens_and_multiples_and_the_training_length(results):
    for draw in (comparison.passkey_by_length, comparison.perplexity_by_position):
        figure = draw(results)
        figure.savefig(BytesIO())  # ticks are made when drawn
        axes = figure.axes[0]
        (line,) = by_gid(figure, "training length")
        assert list(line.get_xdata()) == [TRAINED, TRAINED]
        (above,) = axes.child_axes
        assert "1×" in [tick.get_text() for tick in above.get_xticklabels()]
        shown = [tick.get_text() for tick in axes.get_xticklabels()]
        assert "4096" in shown
        assert all(text.isdigit() for text in shown)
    assert [tick.get_text() for tick in comparison.passkey_by_length(results).axes[0].get_xticklabels()] == [
        str(length) for length in LENGTHS
    ]


def test_a_scheme_has_one_colour_in_every_figure(results):
    look = looks(results)
    for draw in (comparison.passkey_by_length, comparison.perplexity_by_position, comparison.theta_scatter):
        for name, colour in legend_colours(draw(results)).items():
            if name in look:
                assert colour == look[name].color.lower()
    bars = containers(comparison.passkey_by_length(results))
    dots = by_gid(comparison.theta_scatter(results), "theta:BAM")
    (histogram,) = comparison.logit_scale_histogram(results).axes
    assert {bars["BAM"][0].get_color()} == {dot.get_color() for dot in dots} == {look["BAM"].color}
    assert to_hex(histogram.patches[0].get_facecolor()) == look["BAM <SSMax>"].color.lower()


def test_dots_of_schemes_have_different_colours(results):
    """Also where lines of one colour would be told apart by their style."""
    (heads,) = [[row for row in results["priors"] if row["scheme"] == "BAM"]]
    names = ["BAM", *(f"scheme {index}" for index in range(len(COLOURS) - 1)), "another"]
    results["schemes"] = [{"name": name} for name in names]
    results["priors"] = [row | {"scheme": name} for row in heads for name in ("BAM", "another")]
    assert looks(results)["BAM"].color == looks(results)["another"].color
    for section in ("runs", "passkey", "perplexity", "logit_scales"):
        results[section] = []
    colours = legend_colours(comparison.theta_scatter(results))
    assert colours["BAM"] != colours["another"]


def test_seeds_are_dashed_as_their_scheme_is(results):
    first = looks(results)["BAM"].linestyle
    results["schemes"] = [*({"name": f"scheme {index}"} for index in range(len(COLOURS))), *results["schemes"]]
    later = looks(results)["BAM"].linestyle
    figure = comparison.passkey_by_length(results)
    seeds = [line.get_linestyle() for seed in SEEDS for line in by_gid(figure, f"seed:BAM:{seed}")]
    assert later != first
    assert seeds == [later] * len(SEEDS)


def test_many_schemes_all_look_different(results):
    results["schemes"] = [{"name": f"scheme {index}"} for index in range(28)]
    seen = looks(results).values()
    assert len({(look.color, look.linestyle) for look in seen}) == 28


@pytest.mark.parametrize(("scheme", "stopped"), [("NoPE", True), ("BAM <SSMax>", False)])
def test_heatmap_cells_and_means(results, scheme, stopped):
    figure = comparison.passkey_heatmap(results, scheme)
    (axes,) = figure.axes
    # Cells lie at (column, line); the means are a third of a cell away from them.
    numbers = {(round(x - 0.5, 2), round(y - 0.5, 2)): t.get_text() for t in axes.texts for x, y in [t.get_position()]}
    mine = [row for row in results["passkey"] if row["scheme"] == scheme]
    depths = sorted({row["depth"] for row in mine})
    evaluated = sorted({row["length"] for row in mine})

    def percent(selected) -> str:
        return f"{100 * np.mean([row['correct'] for row in selected]):.0f}"

    for column, length in enumerate(evaluated):
        assert numbers[column, 20.33] == percent([row for row in mine if row["length"] == length])
        for line, depth in enumerate(depths):
            cell = [row for row in mine if (row["length"], row["depth"]) == (length, depth)]
            assert numbers[column, line] == percent(cell)
    for line, depth in enumerate(depths):
        # The mean of the lengths before it stopped would flatter it.
        mean = "–" if stopped else percent([row for row in mine if row["depth"] == depth])
        assert numbers[len(LENGTHS) + 0.33, line] == mean
    assert len(numbers) == (len(depths) + 1) * len(evaluated) + len(depths)
    hatched = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_hatch()]
    assert len(hatched) == (len(LENGTHS) - len(evaluated)) * (len(depths) + 1)
    assert bool(hatched) == stopped
    assert axes.yaxis_inverted()


def test_a_heatmap_tells_lengths_that_lack_seeds(results):
    last, seed = LENGTHS[-1], SEEDS[0]
    whole = comparison.passkey_heatmap(results, "BAM <SSMax>").axes[0]
    assert [tick.get_text() for tick in whole.get_xticklabels()] == [*map(str, LENGTHS), "mean"]
    results["passkey"] = [
        row for row in results["passkey"] if (row["scheme"], row["seed"], row["length"]) != ("BAM <SSMax>", seed, last)
    ]
    axes = comparison.passkey_heatmap(results, "BAM <SSMax>").axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [*map(str, LENGTHS[:-1]), f"{last}†", "mean"]
    assert sum(text.get_text() == "–" for text in axes.texts) == 20


def test_heatmaps_share_one_scale(results):
    for scheme in ("NoPE", "BAM <SSMax>"):
        (mesh,) = comparison.passkey_heatmap(results, scheme).axes[0].collections
        assert mesh.get_clim() == (0, 100)


def test_perplexity_is_of_the_mean_loss_over_seeds(results):
    axes = comparison.perplexity_by_position(results).axes[0]
    for position, value in points(named(axes, "BAM <SSMax>")).items():
        losses = [r["nll"] for r in results["perplexity"] if (r["scheme"], r["position"]) == ("BAM <SSMax>", position)]
        assert len(losses) == len(SEEDS)
        assert value == pytest.approx(math.exp(np.mean(losses)))


def test_a_perplexity_beyond_the_axis_is_told_and_squashes_nobody(results):
    results["perplexity"][0]["nll"] = 5000.0
    axes = comparison.perplexity_by_position(results).axes[0]
    lowest = min(points(named(axes, "BAM <SSMax>")).values())
    assert axes.get_ylim()[1] == pytest.approx(PERPLEXITY_RANGE * lowest)
    assert "NoPE (up to" in axes.get_title(loc="left")
    assert "<SSMax>" not in axes.get_title(loc="left")

    results["perplexity"] = [row for row in results["perplexity"] if row["scheme"] == "BAM <SSMax>"]
    axes = comparison.perplexity_by_position(results).axes[0]
    assert axes.get_title(loc="left") == ""
    assert max(points(named(axes, "BAM <SSMax>")).values()) < axes.get_ylim()[1] < PERPLEXITY_RANGE * lowest


def test_positions_without_a_loss_are_left_out(results):
    missing = results["perplexity"][0]
    missing["nll"] = None
    axes = comparison.perplexity_by_position(results).axes[0]
    assert missing["position"] not in points(named(axes, missing["scheme"]))


def test_prior_curves_are_measured_from_their_maximum_and_cut(results):
    for row in results["priors"]:
        row["log_prior"] = [value + 7.5 for value in row["log_prior"]]
    figure = comparison.prior_curves(results, "BAM")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "layer 0, seed 0", "layer 1, seed 0", "layer 0, seed 1", "layer 1, seed 1",
    ]  # fmt: skip
    first = next(row for row in results["priors"] if row["scheme"] == "BAM")
    assert min(first["log_prior"]) < -1e20
    (line,) = [line for line in figure.axes[0].lines if line.get_gid() == "head:0"]
    curve = np.array(first["log_prior"])
    assert line.get_ydata() == pytest.approx(np.maximum(curve - curve.max(), -30))
    assert list(points(line)) == first["distance"]
    assert "cut at −30" in figure.axes[0].get_ylabel()


def test_a_prior_that_is_the_same_everywhere_is_drawn_once(results):
    (axes,) = comparison.prior_curves(results, "ALiBi").axes
    assert axes.get_title(loc="left") == "every layer, every seed"
    assert len(axes.lines) == 4


def test_missing_log_priors_are_gaps(results):
    rows = [row for row in results["priors"] if row["scheme"] == "BAM"]
    rows[0]["log_prior"][3] = None
    rows[1]["log_prior"] = [None] * len(rows[1]["log_prior"])
    lines = comparison.prior_curves(results, "BAM").axes[0].lines
    assert list(np.isnan(lines[0].get_ydata()).nonzero()[0]) == [3]
    assert np.isnan(lines[1].get_ydata()).all()


def test_theta_scatter_shows_every_gaussian_head_and_only_those(results):
    figure = comparison.theta_scatter(results)
    for scheme in ("BAM", "BAM <SSMax>"):
        dots = by_gid(figure, f"theta:{scheme}")
        expected = [row["parameters"] for row in results["priors"] if row["scheme"] == scheme]
        assert sorted(dot.get_ydata()[0] for dot in dots) == sorted(len(SEEDS) * THETA_BETA)
        assert {(p.get_xdata()[0], p.get_ydata()[0]) for p in dots} == {
            (parameters["theta_alpha"], parameters["beta"]) for parameters in expected
        }
        assert len({dot.get_marker() for dot in dots}) == 2
    assert not by_gid(figure, "theta:ALiBi")
    bottom, top = figure.axes[0].get_ylim()
    assert bottom < min(THETA_BETA)
    assert max(THETA_BETA) < top


def test_histogram_counts_every_head(results):
    (axes,) = comparison.logit_scale_histogram(results).axes
    assert (
        sum(bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle))
        == len(results["logit_scales"])
        == 16
    )


@pytest.mark.parametrize(
    ("section", "draw"),
    [
        ("passkey", comparison.passkey_by_length),
        ("passkey", lambda results: comparison.passkey_heatmap(results, "BAM")),
        ("perplexity", comparison.perplexity_by_position),
        ("priors", lambda results: comparison.prior_curves(results, "BAM")),
        ("priors", comparison.theta_scatter),
        ("logit_scales", comparison.logit_scale_histogram),
    ],
)
def test_a_figure_without_data_is_refused(results, section, draw):
    del results[section]
    with pytest.raises(comparison.NothingToShowError, match=section):
        draw(results)


def test_an_unknown_scheme_is_named(results):
    with pytest.raises(ValueError, match=r"scheme must be one of NoPE, .*; it is 'nope'"):
        comparison.passkey_heatmap(results, "nope")


def test_names_are_not_read_as_mathematics():
    assert label("cost $5 or $6") == r"cost \$5 or \$6"
    assert not label("_private").startswith("_")


def test_write_figures_names_each_file_safely_and_leaves_nothing_else(results, tmp_path):
    for section in SECTIONS:
        results[section] = [row for row in results[section] if row["scheme"] in ("ALiBi", "BAM")]
        for row in results[section]:
            row["scheme"] = {"ALiBi": "a/../b", "BAM": "a b"}[row["scheme"]]
    results["schemes"] = [{"name": "a/../b"}, {"name": "a b"}]
    results["passkey"] = [row for row in results["passkey"] if row["depth"] in (0, 1)]  # for speed
    written = write_figures(results, tmp_path / "new")
    assert [path.name for path in written] == [
        "passkey_by_length.png", "passkey_heatmap_01_a-..-b.png", "passkey_heatmap_02_a-b.png",
        "perplexity_by_position.png", "prior_curves_01_a-..-b.png", "prior_curves_02_a-b.png",
        "theta_scatter.png",
    ]  # fmt: skip
    assert sorted((tmp_path / "new").iterdir()) == sorted(written)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert pyplot.get_fignums() == []


def test_names_of_any_length_have_files(results, tmp_path):
    names = [f"{'a long name, ' * 30}{place}" for place in range(len(results["schemes"]))]
    before = [scheme["name"] for scheme in results["schemes"]]
    for section in ("schemes", *SECTIONS):
        for row in results[section]:
            key = "name" if section == "schemes" else "scheme"
            row[key] = names[before.index(row[key])]
    paths = write_figures(results, tmp_path)
    assert len({path.name for path in paths}) == len(paths) > len(names)
    assert all(len(path.name) < 160 and path.is_file() for path in paths)


def test_figures_that_are_not_drawn_any_more_are_removed(results, tmp_path):
    """As where a scheme comes first, so that the others have other numbers."""
    for section in SECTIONS:
        results[section] = [row for row in results[section] if row["scheme"] == "BAM"]
    results["passkey"] = []
    results["schemes"] = [{"name": "BAM"}]
    write_figures(results, tmp_path)
    for name in ("photo.png", "notes.md"):
        (tmp_path / name).write_bytes(b"someone's own")
    results["schemes"] = [{"name": "ALiBi"}, {"name": "BAM"}]
    results["perplexity"] = []
    written = write_figures(results, tmp_path)
    assert {path.name for path in written} == {"prior_curves_02_BAM.png", "theta_scatter.png"}
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in written} == {"photo.png", "notes.md"}


def test_all_figures_are_known_by_their_names(results):
    """So that they are removed when they are not drawn any more."""
    kept = Path(__file__).parents[3] / "docs" / "results"
    names = [path.stem for path in kept.glob("*/figures/*.png")] + [one.stem for one in gallery.illustrations(results)]
    of_images = re.compile(images._NAMES)
    assert [name for name in names if not (re.fullmatch(gallery._NAMES, name) or of_images.fullmatch(name))] == []


def test_write_figures_of_nothing_writes_nothing(results, tmp_path):
    for section in SECTIONS:
        results[section] = []
    assert write_figures(results, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
