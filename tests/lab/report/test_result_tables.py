"""The tables that a comparison writes: their numbers, their intervals, and their two forms."""

import math
import re
from statistics import fmean, median, pstdev, stdev

import pytest
from scipy.stats import t
from swept_results import EXTENDED, FIRST, LENGTHS, LONGER, SEEDS, SHIFTED, TRAINED, make_swept_results

from attention_priors.lab.intervals import over_seeds, wilson_interval
from attention_priors.lab.report import write_tables
from attention_priors.lab.report.selections.axes import comparisons, overview
from attention_priors.lab.report.tables.cells import Losses
from attention_priors.lab.report.tables.comparison import result_grids
from attention_priors.lab.report.tables.grid import Cell, Grid, latex, latex_text, markdown
from attention_priors.lab.report.tables.runs import timing_grid


@pytest.fixture(scope="module")
def swept() -> dict:
    return make_swept_results()


@pytest.fixture(scope="module")
def grids(swept) -> dict[str, Grid]:
    return {grid.stem: grid for grid in result_grids(swept)}


def _line(grid: Grid, *words: str) -> list:
    """The line that begins with words, in the group where they stand first."""
    for group in grid.groups:
        for line in group:
            if all(part == word for part, word in zip(line, words, strict=False)):
                return list(line)
    raise AssertionError(words)


def _cells(grid: Grid) -> list[Cell]:
    """Those that hold numbers with intervals, or could."""
    return [cell for group in grid.groups for line in group for cell in line if isinstance(cell, Cell)]


# ---- intervals


def test_over_seeds_is_students_interval():
    values = [3.0, 4.5, 5.1, 2.2]
    half = t.ppf(0.975, 3) * stdev(values) / math.sqrt(4)
    assert over_seeds(values) == pytest.approx((fmean(values), fmean(values) - half, fmean(values) + half))
    assert over_seeds([2.0, 2.0]) == (2.0, 2.0, 2.0)


def test_one_seed_has_no_interval():
    mean, low, high = over_seeds([2.5])
    assert mean == 2.5
    assert math.isnan(low)
    assert math.isnan(high)
    with pytest.raises(ValueError, match="one seed at least"):
        over_seeds([])


# ---- what they say


def test_accuracies_have_both_intervals(swept, grids):
    grid = grids["passkey"]
    assert grid.header == ["scheme", "over", *map(str, LENGTHS)]
    pooled, seeds = next(group for group in grid.groups if group[0][0] == "BAM")
    assert (pooled[1], seeds[1]) == ("texts", f"{len(SEEDS)} seeds")
    for column, length in enumerate(LENGTHS, start=2):
        mine = [row for row in swept["passkey"] if (row["scheme"], row["length"]) == ("BAM", length)]
        correct, trials = (sum(row[key] for row in mine) for key in ("correct", "trials"))
        low, high = wilson_interval(correct, trials)
        assert pooled[column] == Cell(f"{100 * correct / trials:.0f}", f"[{100 * low:.0f}, {100 * high:.0f}]")
        of_seeds = [
            sum(row["correct"] for row in mine if row["seed"] == seed) / (trials / len(SEEDS)) for seed in SEEDS
        ]
        mean, low, high = over_seeds(of_seeds)
        assert seeds[column].text == f"{100 * mean:.0f}"
        assert seeds[column].interval == f"[{100 * max(low, 0):.0f}, {100 * min(high, 1):.0f}]"


def test_perplexities_are_over_seeds_of_the_mean_loss(swept, grids):
    grid = grids["perplexity"]
    line = _line(grid, "BAM")
    within = {}
    for seed in SEEDS:
        mine = [row for row in swept["perplexity"] if (row["scheme"], row["seed"]) == ("BAM", seed)]
        # Ranges 1-1, 2-3, ..., 64-127: the next one ends beyond 160 tokens.
        inside = [row for row in mine if row["position"] < 128 / math.sqrt(2)]
        assert len(inside) == 7
        tokens = sum(row["tokens"] for row in inside)
        within[seed] = sum(row["nll"] * row["tokens"] for row in inside) / tokens
    mean, low, high = (math.exp(value) for value in over_seeds(list(within.values())))
    assert line[1:3] == [str(len(SEEDS)), Cell(f"{mean:.3g}", f"[{low:.3g}, {high:.3g}]")]
    assert grid.header[3] == "181"  # the first range that begins beyond the shortest training length, 80
    there = [row["nll"] for row in swept["perplexity"] if row["scheme"] == "BAM" and 180 < row["position"] < 182]
    mean, low, high = (math.exp(value) for value in over_seeds(there))
    assert line[3] == Cell(f"{mean:.3g}", f"[{low:.3g}, {high:.3g}]")


@pytest.mark.parametrize(("trained", "first"), [(128, "181"), (160, "362"), (256, "362"), (257, "724")])
def test_ranges_beyond_training_begin_there(results, trained, first):
    """The range 128-255 is neither within 160 tokens nor beyond them, although its middle is."""
    results["recipe"]["training"]["context_length"] = trained
    row = {"scheme": "BAM", "seed": 0, "nll": 3.0, "tokens": 9}
    results["perplexity"] = [row | {"position": math.sqrt(2**k * (2 ** (k + 1) - 1))} for k in range(13)]
    (grid,) = (grid for grid in result_grids(results) if grid.stem == "perplexity")
    assert grid.header[3] == first
    assert ("is in neither" in grid.caption) == (trained in (160, 257))


def test_a_range_that_ends_with_the_training_length_is_within_training(swept):
    """As where texts of 160 tokens, the training length, were read: the last range is 128-159."""
    last = {"position": math.sqrt(128 * 159), "nll": 9.0, "tokens": 32}
    full = [row for row in swept["perplexity"] if row["position"] < 128]
    partial = [row | last for row in swept["perplexity"] if 128 < row["position"] < 256]
    whole, without = (Losses(swept | {"perplexity": read}) for read in (full + partial, full))
    assert whole.within_training("BAM") == whole.everywhere("BAM")
    assert whole.within_training("BAM") != without.within_training("BAM")


def test_schemes_are_compared_where_they_differ_along_one_axis_alone(swept):
    found = {comparison.axis: comparison for comparison in comparisons(swept)}
    assert list(found) == ["init", "length", "s", "extension"]
    assert found["init"].values == {
        "BAM": "uniform (base)",
        "BAM · init=laplace": "laplace",
        "BAM · init=sampled": "sampled",
    }
    # Numbers rise.
    assert list(found["length"].values.values()) == ["80", "160 (base)", "320"]
    # Before its extension, a model is compared with those that have none.
    assert list(found["s"].values) == ["BAM", "BAM · s=ssmax(init=0.2)"]
    assert found["extension"].values == {FIRST: "before", LONGER: "trained on", SHIFTED: "another prior"}
    assert all(comparison.title == axis for axis, comparison in found.items())


def test_comparisons_of_a_product_say_where_they_stand(swept):
    made = [{"init": init, "size": size} for init in ("a", "b") for size in (1, 2)]
    swept = swept | {"schemes": [{"name": str(stands), "axes": {"scheme": "X"} | stands} for stands in made]}
    assert [comparison.title for comparison in comparisons(swept)] == [
        "init (size=1)", "init (size=2)", "size (init=a)", "size (init=b)",
    ]  # fmt: skip
    assert [list(comparison.values.values()) for comparison in comparisons(swept)] == [["a", "b"]] * 2 + [
        ["1", "2"]
    ] * 2


def test_axes_that_an_author_wrote_have_no_base(results):
    """There is no sweep, and so no scheme that it varied one axis at a time."""
    for size, entry in zip((64, 128), results["schemes"], strict=False):
        entry["axes"] = {"size": size}
    (found,) = comparisons(results)
    assert [*found.values.values()] == ["64", "128"]
    assert overview(results) == [entry["name"] for entry in results["schemes"]]


def test_schemes_without_pass_keys_keep_the_columns(swept, grids):
    asked = [row for row in swept["passkey"] if row["scheme"] != "BAM"]
    (grid,) = (grid for grid in result_grids(swept | {"passkey": asked}) if grid.stem == "axes")
    assert all(len(line) == len(grid.header) for group in grid.groups for line in group)
    line = _line(grid, "init", "uniform (base)")
    assert line[2:7] == ["", *["–"] * len(LENGTHS)]
    assert line[7] == _line(grids["perplexity"], "BAM")[2]


def test_axes_stand_side_by_side(grids):
    grid = grids["axes"]
    assert [group[0][0] for group in grid.groups] == ["init", "length", "s", "extension"]
    assert [line[1] for line in grid.groups[1]] == ["80", "", "160 (base)", "", "320", ""]
    base = _line(grids["passkey"], "BAM")
    assert _line(grid, "init", "uniform (base)")[3:7] == base[2:]
    assert all(len(line) == len(grid.header) for group in grid.groups for line in group)


def test_every_extension_stands_after_what_was_before(swept, grids):
    (lines,) = grids["extension"].groups
    assert [line[:3] for line in lines] == [
        [FIRST, "before", "–"],
        [f"{TRAINED} → {EXTENDED}", "trained on", "256"],
        ["", "another prior", "0"],
    ]
    for line, name, when in zip(lines, (LONGER, LONGER, SHIFTED), ("before", "after", "after"), strict=True):
        for column, length in ((3, TRAINED), (4, EXTENDED)):
            losses = [row["loss"][when][str(length)] for row in swept["extensions"] if row["scheme"] == name]
            assert len(losses) == len(SEEDS)
            mean, low, high = over_seeds(losses)
            assert line[column] == Cell(f"{mean:.3f}", f"[{low:.3f}, {high:.3f}]")
    for line, name in zip(lines, (FIRST, LONGER, SHIFTED), strict=True):
        assert line[5:9] == _line(grids["passkey"], name)[2:]


def test_before_an_extension_are_all_models_that_were_extended(swept, grids):
    extended = {(LONGER, 0), (LONGER, 1), (SHIFTED, 1), (SHIFTED, 2)}
    some = [row for row in swept["extensions"] if (row["scheme"], row["seed"]) in extended]
    (grid,) = (grid for grid in result_grids(swept | {"extensions": some}) if grid.stem == "extension")
    ((before, one, other),) = grid.groups
    assert before[3:5] == grids["extension"].groups[0][0][3:5]
    assert one[3] != other[3]


def test_extensions_to_several_lengths_stand_apart(swept):
    longer = {"to": 640, "loss": {when: {"160": 3.1, "640": 3.5} for when in ("before", "after")}}
    farther = [row | longer if row["scheme"] == SHIFTED else row for row in swept["extensions"]]
    (grid,) = (grid for grid in result_grids(swept | {"extensions": farther}) if grid.stem == "extension")
    assert [[line[:2] for line in group] for group in grid.groups] == [
        [[FIRST, "before"], ["160 → 320", "trained on"]],
        [[FIRST, "before"], ["160 → 640", "another prior"]],
    ]


def test_heads_are_counted_by_cluster(swept, grids):
    shapes = [row["parameters"]["beta"] for row in swept["priors"] if row["scheme"] == "BAM"]
    line = _line(grids["heads"], "BAM")
    expected = (
        sum(shape > 0 for shape in shapes),
        sum(-0.6 <= shape <= 0 for shape in shapes),
        sum(shape < -0.6 for shape in shapes),
    )
    assert line == ["BAM", *map(str, expected), "–"]
    assert sum(expected) == len(shapes) == 24


def test_one_seed_alone_has_wilson_intervals_only(swept):
    alone = {
        key: [row for row in value if row.get("seed", 0) == 0] if isinstance(value, list) and key != "seeds" else value
        for key, value in swept.items()
    }
    grids = {grid.stem: grid for grid in result_grids(alone)}
    assert {line[1] for group in grids["passkey"].groups for line in group} == {"texts"}
    assert all(cell.interval for cell in _cells(grids["passkey"]))
    assert not any(cell.interval for cell in _cells(grids["perplexity"]))


def test_how_models_were_made(results):
    first, second = results["schemes"][:2]
    for row, seconds in zip([r for r in results["runs"] if r["scheme"] == first["name"]], (60, 180), strict=True):
        row["train_seconds"], row["final_loss"] = seconds, 2.5
    for row in (r for r in results["runs"] if r["scheme"] == second["name"]):
        row["train_seconds"] = row["final_loss"] = None
    grid = next(grid for grid in result_grids(results) if grid.stem == "training")
    assert list(grid.groups[0][0]) == [
        first["name"], first["description"], "0, 1", "160", "500", "1048576", "32",
        Cell("2.500", "[2.500, 2.500]"), "2.0",
    ]  # fmt: skip
    assert grid.groups[0][1][-2:] == ["–", "–"]
    assert "torch 2.9.0" in grid.caption
    assert "threads per run 1" in grid.caption
    assert "2026-11-20" in grid.caption


def test_the_deviation_of_passes_is_over_all_seeds(results):
    scheme = results["schemes"][0]["name"]
    passes = {0: [9.0, 10.0, 11.0], 1: [19.0, 20.5, 21.5], 2: [12.0, 14.0, 40.0]}
    results["timing"] = [
        {
            "scheme": scheme, "seed": seed, "plan": "short", "length": 512, "pass": "forward", "peak_bytes": 2**20,
            "mean_ms": fmean(times), "std_ms": pstdev(times), "median_ms": median(times),
        }
        for seed, times in passes.items()
    ]  # fmt: skip
    ((line,),) = timing_grid(results).groups
    everything = [time for times in passes.values() for time in times]
    assert line[2:4] == [Cell("14.8"), Cell("17.4", f"± {pstdev(everything):.3g}")]
    for row in results["timing"]:
        row["std_ms"] = None  # of one pass
    ((line,),) = timing_grid(results).groups
    assert line[3] == Cell("17.4")


def test_results_without_axes_have_no_tables_of_them(results):
    stems = [grid.stem for grid in result_grids(results)]
    assert stems == ["passkey", "perplexity", "heads", "training"]
    for section in ("passkey", "perplexity", "priors", "logit_scales", "runs"):
        results[section] = []
    assert list(result_grids(results)) == []


def test_stopped_seeds_are_marked(results):
    (grid,) = [grid for grid in result_grids(results) if grid.stem == "passkey"]
    cells = [cell.text for cell in _cells(grid)]
    assert any(text.endswith("†") for text in cells)
    assert "–" in cells


# ---- their forms

GRID = Grid("small", "50 % of $x$", ["a_b", "c\nd"], [[["x|y", Cell("1", "[0, 2]")]], [["[z]", Cell("–")]]], words=1)


def test_markdown_is_escaped():
    assert markdown(GRID) == ("50 % of \\$x\\$\n\n| a\\_b | c d |\n| --- | ---: |\n| x\\|y | 1 [0, 2] |\n| [z] | – |\n")


def test_latex_is_escaped():
    text = latex(GRID)
    assert r"\caption{50 \% of \$x\$}" in text
    assert r"a\_b & \begin{tabular}[b]{@{}r@{}}c\\d\end{tabular} \\" in text
    assert r"x$|$y & \begin{tabular}[t]{@{}r@{}}1\\[-2pt]{\tiny {[}0, 2{]}}\end{tabular} \\" in text
    assert "{[}z{]} & -- \\\\" in text
    assert r"\begin{tabular}{lr}" in text


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("BAM · θβ", r"BAM $\cdot$ $\theta$$\beta$"),
        (r"\input{x}", r"\textbackslash{}input\{x\}"),
        ("a^b~c#d&e", r"a\textasciicircum{}b\textasciitilde{}c\#d\&e"),
        ("café 中", "café U+4E2D"),
        ("λΛ", r"$\lambda$$\Lambda$"),
        ("a\n\nb", "a b"),
    ],
)
def test_any_name_is_shown_as_it_is(name, written):
    assert latex_text(name) == written


def test_latex_is_balanced_and_plain(swept, tmp_path):
    swept = swept | {"schemes": [dict(entry) for entry in swept["schemes"]]}
    evil = "a_b & {c} % \\end{tabular} [*] θ"
    for entry in swept["schemes"]:
        entry["name"] = evil if entry["name"] == "ALiBi" else entry["name"]
    for section in ("runs", "passkey", "perplexity", "priors", "logit_scales", "extensions"):
        swept[section] = [row | {"scheme": evil} if row["scheme"] == "ALiBi" else row for row in swept[section]]
    for path in write_tables(swept, tmp_path):
        if path.suffix != ".tex":
            continue
        text = path.read_text(encoding="utf-8")
        assert text.isascii()
        bare = re.sub(r"\\[{}%&#_$\\]", "", re.sub(r"\\\\\n", "\n", text))
        assert bare.count("{") == bare.count("}")
        assert bare.count("$") % 2 == 0
        assert text.count("\\begin{tabular}") == text.count("\\end{tabular}")
        assert text.count("\\begin{tabular}{") == text.count("\\end{tabular}\n") == 1
        body = bare[bare.index("\\midrule") : bare.index("\\bottomrule")]
        columns = re.search(r"begin\{tabular\}\{([lr]+)\}", text)
        assert columns
        lines = [line for line in body.splitlines() if "&" in line]
        assert {line.count("&") + 1 for line in lines} == {len(columns[1])}
        assert "%" not in body


def test_tables_that_there_is_no_data_for_any_more_are_removed(swept, tmp_path):
    write_tables(swept, tmp_path)
    for name in ("README.md", "main.tex", "heads.txt"):
        (tmp_path / name).write_text("someone's own")
    written = write_tables(swept | {"perplexity": [], "priors": [], "logit_scales": []}, tmp_path)
    assert {path.stem for path in written} == {"passkey", "axes", "extension", "training"}
    others = {path.name for path in tmp_path.iterdir()} - {path.name for path in written}
    assert others == {"README.md", "main.tex", "heads.txt"}


def test_tables_are_written_in_both_forms(swept, tmp_path):
    written = write_tables(swept, tmp_path / "tables")
    assert [path.name for path in written] == [
        f"{stem}.{ending}"
        for stem in ("passkey", "perplexity", "axes", "extension", "heads", "training")
        for ending in ("md", "tex")
    ]
    assert sorted((tmp_path / "tables").iterdir()) == sorted(written)
