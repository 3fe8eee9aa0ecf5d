"""The numbers and intervals of a study's tables."""

import math
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np
import pytest
from study_rows import (
    EXTENDED,
    FIRST,
    LENGTHS,
    LONGER,
    SEEDS,
    SHIFTED,
    SWEPT_LENGTHS,
    SWEPT_SEEDS,
    TRAINED,
    Rows,
    asked_row,
    attention_on_the_key,
    loss_row,
    study,
)  # fmt: skip

from attention_priors.lab.data.genomes import NUCLEOTIDES
from attention_priors.lab.intervals import over_seeds, wilson_interval
from attention_priors.lab.report.comparisons import comparisons, overview
from attention_priors.lab.report.estimates import KINDS, best_shares, own_passkeys, shares_by_length
from attention_priors.lab.report.table import ABSENT, Cell, Table
from attention_priors.lab.report.tables import Losses, heads, passkey_overview, tables


def table(rows: Rows, name: str) -> Any:
    return tables(rows.results(), [name])[name]


def line(shown: Table, *words: str) -> list:
    """Return the first line that begins with these cells."""
    return next(list(line) for line in shown.lines if tuple(line[: len(words)]) == words)


def numbers(shown: Table) -> list[Cell]:
    return [cell for line in shown.lines for cell in line if isinstance(cell, Cell)]


# ---- pass keys


def test_accuracies_have_both_intervals(swept):
    shown = table(swept, "passkey")
    assert shown.header == ["scheme", "over", *map(str, SWEPT_LENGTHS)]
    pooled, seeds = line(shown, "BAM", "texts"), line(shown, "BAM", f"{len(SWEPT_SEEDS)} seeds")
    for column, length in enumerate(SWEPT_LENGTHS, start=2):
        own = swept.of("retrieval", scheme="BAM", length=length)
        correct, trials = (sum(row[key] for row in own) for key in ("correct", "trials"))
        low, high = wilson_interval(correct, trials)
        assert pooled[column] == Cell(f"{100 * correct / trials:.0f}", f"[{100 * low:.0f}, {100 * high:.0f}]")
        of_seeds = [fmean(row["correct"] / 2 for row in own if row["seed"] == seed) for seed in SWEPT_SEEDS]
        mean, low, high = over_seeds(of_seeds)
        assert seeds[column] == Cell(f"{100 * mean:.0f}", f"[{100 * max(low, 0):.0f}, {100 * min(high, 1):.0f}]")


def test_shares_pool_depths_and_seeds(rows):
    cells = shares_by_length(own_passkeys(rows.results()))
    for cell in cells.itertuples():
        own = rows.of("retrieval", scheme=cell.scheme, length=cell.length)
        assert (cell.correct, cell.trials) == (sum(row["correct"] for row in own), len(own))
        assert (cell.low, cell.high) == pytest.approx(wilson_interval(cell.correct, cell.trials))
        assert cell.complete == ({row["seed"] for row in own} == set(SEEDS))
    assert [*dict.fromkeys(cells.scheme)] == rows.results().names
    assert not cells.complete.all()


def test_stopped_seeds_are_marked(rows):
    shown = table(rows, "passkey")
    assert any(cell.text.endswith("†") for cell in numbers(shown))
    assert any("–" in line for line in shown.lines)


def test_the_overview_marks_best_missing_and_incomplete_results(rows):
    shown = passkey_overview(rows.results())
    assert shown.header[-1] == "8192\n51×"
    assert "†: without the seeds that had stopped" in shown.caption
    stopped, best = line(shown, "NoPE"), line(shown, "BAM <SSMax>")
    assert stopped[-1] == "–"
    assert any(str(cell).split()[0].endswith("†") for cell in stopped[1:])
    assert [cell.text for cell in best[1:] if cell.best].count("100") == 4
    assert not any(isinstance(cell, Cell) and cell.best for cell in stopped[4:])


def test_incomplete_shares_and_zeros_are_never_best():
    rows = study({}, ["BAM", "RoPE"])
    for scheme, seed, length, correct in (
        ("BAM", 0, 64, 2), ("BAM", 1, 64, 2), ("RoPE", 0, 64, 4), ("RoPE", 1, 128, 0), ("BAM", 0, 256, 0),
        ("BAM", 1, 256, 0),
    ):  # fmt: skip
        rows.append({"scheme": scheme, "seed": seed} | asked_row(length, 0.0, correct, trials=4))
    assert best_shares(shares_by_length(own_passkeys(rows.results()))) == {64: 0.5}


def test_a_single_seed_has_wilson_intervals_only(swept):
    swept[:] = [row for row in swept if row.get("seed", 0) == 0]
    assert {line[1] for line in table(swept, "passkey").lines} == {"texts"}
    assert all(cell.interval for cell in numbers(table(swept, "passkey")))
    assert not any(cell.interval for cell in numbers(table(swept, "perplexity")))


# ---- losses


def test_perplexities_come_from_the_mean_loss_over_seeds(swept):
    shown = table(swept, "perplexity")
    found = line(shown, "BAM")
    within = []
    for seed in SWEPT_SEEDS:
        # Ranges 1-1, 2-3, ..., 64-127. The next range ends beyond 160 tokens.
        own = [row for row in swept.of("perplexity", scheme="BAM", seed=seed) if row["position"] < 128 / math.sqrt(2)]
        within.append(np.average([row["nll"] for row in own], weights=[row["tokens"] for row in own]))
    mean, low, high = (math.exp(value) for value in over_seeds(within))
    assert found[1:3] == [str(len(SWEPT_SEEDS)), Cell(f"{mean:.3g}", f"[{low:.3g}, {high:.3g}]")]
    assert shown.header[3] == "181"  # the first range that begins beyond the shortest training length, 80
    there = [row["nll"] for row in swept.of("perplexity", scheme="BAM") if 180 < row["position"] < 182]
    mean, low, high = (math.exp(value) for value in over_seeds(there))
    assert found[3] == Cell(f"{mean:.3g}", f"[{low:.3g}, {high:.3g}]")


@pytest.mark.parametrize(("trained", "first"), [(128, "181"), (160, "362"), (256, "362"), (257, "724")])
def test_ranges_beyond_training_begin_beyond_it(trained, first):
    """The range 128-255 is neither within 160 tokens nor beyond them, although its middle is beyond."""
    rows = study({"training": {"context_length": trained}}, ["BAM"])
    rows += [{"scheme": "BAM", "seed": 0} | loss_row(math.sqrt(2**k * (2 ** (k + 1) - 1)), 3.0, 9) for k in range(13)]
    shown = table(rows, "perplexity")
    assert shown.header[3] == first
    assert ("is in neither" in shown.caption) == (trained in (160, 257))


def test_ranges_that_end_with_the_training_length_are_within_training():
    """Texts have the training length, 160 tokens, so the last range is 128-159."""
    places = [math.sqrt(2**k * (2 ** (k + 1) - 1)) for k in range(7)] + [math.sqrt(128 * 159)]
    cells = []
    for read in (places, places[:-1]):
        rows = study({}, ["BAM"])
        rows += [{"scheme": "BAM", "seed": 0} | loss_row(p, 3.0 + 6 * (p > 128), 9) for p in read]
        losses = Losses(rows.results(), rows.results()["perplexity"])
        cells.append(losses.within_training("BAM"))
        assert losses.within_training("BAM") == losses.cell(losses.rows)
    assert cells[0] != cells[1]


def test_losses_on_genomes_are_bits_per_base():
    rows = study({"tokenizer": NUCLEOTIDES}, ["ALiBi"])
    for seed, nll in ((0, 1.2), (1, 1.3)):
        own = {"scheme": "ALiBi", "seed": seed}
        texts = {"plan": "held out", "task": "perplexity_windows", "length": 512}
        rows += [own | loss_row(2.5, nll, 10), own | loss_row(2.5, nll, 10, **texts)]
    mean, low, high = (value / math.log(2) for value in over_seeds([1.2, 1.3]))
    for name in ("perplexity", "losses"):
        shown = table(rows, name)
        assert "Bits per base" in shown.caption
        assert "erplexity" not in shown.caption
        assert Cell(f"{mean:.3f}", f"[{low:.3f}, {high:.3f}]") in numbers(shown)


def test_losses_of_copies_are_shown_above_the_optimum():
    rows = study({}, ["GOAT", "RoPE"])
    for place, scheme in enumerate(("GOAT", "RoPE")):
        for seed in SEEDS:
            for index, kind in enumerate(KINDS):
                nll = 2.1 + 0.1 * (1 - index) + 0.01 * seed + place
                loss = {"kind": kind, "expected_nll": 2.0, "optimal_nll": 2.1, "nll": nll, "tokens": 100}
                rows += [
                    {"row": "copying", "scheme": scheme, "seed": seed, "length": length} | loss for length in (64, 128)
                ]
    shown = table(rows, "copying")
    assert [found[:3] for found in shown.lines[:4]] == [["the optimum", words, "2.000"] for words in KINDS.values()]
    mean, low, high = over_seeds([0.1, 0.11])
    assert line(shown, "GOAT", "all tokens")[2] == Cell(f"{mean:.3f}", f"[{low:.3f}, {high:.3f}]")
    assert line(shown, "GOAT", KINDS["noise"])[2].text.startswith("−0.1")
    assert line(shown, "RoPE", "all tokens")[2].text == "1.105"


# ---- plans


def plan_row(scheme: str, seed: int, length: int, right: int, stopped: str | None = None) -> dict:
    """Return rows of two texts of eight digits, the first of which are right."""
    told = {"token_accuracy": right / 8, "tokens_right": [2 * (place < right) for place in range(8)]}
    own = {"scheme": scheme, "seed": seed, "plan": "digits", "task": "passkey_8", "stopped": stopped}
    return asked_row(length, 0.5, 2 * (right == 8), trials=2, **told) | own


def test_answers_are_shown_by_tokens_too():
    rows = study({}, ["NoPE", "ALiBi"])
    rows += [plan_row("ALiBi", seed, length, right) for seed in SEEDS for length, right in ((240, 8), (512, 6))]
    scores = table(rows, "retrieval")
    assert scores.header == ["plan and task", "scheme", "over", "240", "512"]
    assert [cell.text for cell in line(scores, "digits: passkey_8", "ALiBi", "texts")[3:]] == ["100", "0"]
    tokens = table(rows, "answer_tokens")
    assert tokens.header == ["plan and task", "scheme", "length", "all", *map(str, range(1, 9))]
    cells = line(tokens, "digits: passkey_8, answer's tokens", "ALiBi", "512")[3:]
    assert [cell.text for cell in cells] == ["75", *["100"] * 6, *["0"] * 2]
    assert cells[1].interval == "[51, 100]"  # Wilson's interval of 4 of 4
    assert "margin" not in tokens.caption.lower()


def test_margins_are_averaged_over_texts_and_then_over_seeds():
    rows = study({}, ["ALiBi", "BAM"])
    for seed, margins in zip(SEEDS, ((1.0, 3.0), (-2.0, 1.0)), strict=False):
        rows += [plan_row("ALiBi", seed, 240, 8) | {"margin": margin} for margin in margins]
    rows.append(plan_row("BAM", 0, 240, 8))
    tokens = table(rows, "answer_tokens")
    assert tokens.header[-1] == "margin"
    assert "Margin: logit" in tokens.caption
    mean, low, high = over_seeds([2.0, -0.5])
    cell = Cell(f"{mean:.1f}", f"[{low:.1f}, {high:.1f}]")
    assert line(tokens, "digits: passkey_8, answer's tokens", "ALiBi", "240")[-1] == cell
    assert line(tokens, "digits: passkey_8, answer's tokens", "BAM", "240")[-1] == ABSENT


def test_answers_without_tokens_show_only_the_share():
    rows = study({}, ["ALiBi"])
    rows.append(plan_row("ALiBi", 0, 240, 4) | {"tokens_right": None})
    assert table(rows, "answer_tokens").header == ["plan and task", "scheme", "length", "all"]


def test_the_head_with_the_most_weight_at_first_is_followed():
    rows = attention_on_the_key()
    # Student's interval of two seeds is far wider than the range of a share.
    cells = [Cell("70.0", "[0.0, 100.0]"), Cell("45.0", "[0.0, 100.0]")]
    assert table(rows, "needle_weights").lines == [["drowning", "ALiBi", "1, 1", *cells]]


def test_the_deviation_of_passes_covers_all_seeds():
    rows = study({}, ["BAM"])
    passes = {0: [9.0, 10.0, 11.0], 1: [19.0, 20.5, 21.5], 2: [12.0, 14.0, 40.0]}
    for seed, times in passes.items():
        own = {"scheme": "BAM", "seed": seed, "plan": "short", "length": 512, "pass": "forward", "peak_bytes": 2**20}
        times = {"mean_ms": fmean(times), "std_ms": pstdev(times), "median_ms": median(times)}
        rows.append({"row": "timing"} | own | times)
    everything = [time for times in passes.values() for time in times]
    assert table(rows, "timing").header[2:] == ["512 tokens,\nms", "512 tokens,\nMiB"]
    (found,) = table(rows, "timing").lines
    assert found == ["forward", "BAM", Cell("14.8", f"± {pstdev(everything):.3g}"), Cell("1")]
    for row in rows.of("timing"):
        row["std_ms"] = row["peak_bytes"] = None  # of one pass, on a CPU
    (found,) = table(rows, "timing").lines
    assert found[2:] == [Cell("14.8"), Cell("–")]


def test_equal_lengths_of_two_plans_are_told_apart():
    rows = study({}, ["BAM"])
    pass_ = {"scheme": "BAM", "seed": 0, "length": 512, "pass": "forward", "mean_ms": 1.0, "std_ms": 0.1}
    rows += [{"row": "timing"} | pass_ | {"plan": plan, "median_ms": ms} for plan, ms in (("a", 1.0), ("b", 2.0))]
    found = table(rows, "timing")
    assert found.header[2::2] == ["a: 512 tokens,\nms", "b: 512 tokens,\nms"]
    assert [cell.text for cell in found.lines[0][2::2]] == ["1", "2"]


# ---- axes and extensions


def test_schemes_are_compared_if_they_differ_along_one_axis(swept):
    found = {one.axis: one for one in comparisons(swept.results())}
    assert list(found) == ["init", "length", "s", "extension"]
    init = {"BAM": "uniform (base)", "BAM · init=laplace": "laplace", "BAM · init=sampled": "sampled"}
    assert found["init"].values == init
    assert list(found["length"].values.values()) == ["80", "160 (base)", "320"]  # numbers are sorted
    # Before its extension, a model is compared with unextended models.
    assert list(found["s"].values) == ["BAM", "BAM · s=ssmax(init=0.2)"]
    assert found["extension"].values == {FIRST: "before", LONGER: "trained on", SHIFTED: "another prior"}
    assert all(one.title == axis for axis, one in found.items())


def test_comparisons_of_a_product_name_the_fixed_values():
    stands = [{"scheme": "X", "init": init, "size": size} for init in ("a", "b") for size in (1, 2)]
    found = comparisons(study({}, {str(one): {"axes": one} for one in stands}).results())
    assert [one.title for one in found] == ["init (size=1)", "init (size=2)", "size (init=a)", "size (init=b)"]
    assert [list(one.values.values()) for one in found] == [["a", "b"]] * 2 + [["1", "2"]] * 2


def test_hand_written_axes_have_no_base():
    """Without a sweep, no scheme is a base whose axes vary one at a time."""
    results = study({}, {"a": {"axes": {"size": 64}}, "b": {"axes": {"size": 128}}, "c": {}}).results()
    (found,) = comparisons(results)
    assert [*found.values.values()] == ["64", "128"]
    assert overview(results) == ["a", "b", "c"]


def test_axes_share_one_table(swept):
    shown = table(swept, "axes")
    assert list(dict.fromkeys(line[0] for line in shown.lines)) == ["init", "length", "s", "extension"]
    assert line(shown, "init", "uniform (base)")[3:7] == line(table(swept, "passkey"), "BAM")[2:]
    assert line(shown, "init", "uniform (base)")[7] == line(table(swept, "perplexity"), "BAM")[2]
    assert {len(line) for line in shown.lines} == {len(shown.header)}


def test_the_best_trial_has_the_most_pass_keys_then_the_lowest_loss():
    """Trials with and without a logit scale compete apart. A length that was not reached counts as 0. Losses are means
    over the seeds.
    """
    found = {  # the shares at two lengths, and the loss
        ("0.1", None): ((1.0, None), 2.0), ("0.2", None): ((0.7, 0.4), 3.0),
        ("0.1", "ssmax"): ((1.0, 0.5), 3.0), ("0.2", "ssmax"): ((0.5, 1.0), 2.5), ("0.3", "ssmax"): ((0.9, 0.5), 1.0),
    }  # fmt: skip
    axes = {f"X {rate} {scale}": {"scheme": "X", "rate": rate, "scale": scale} for rate, scale in found}
    recipe = {"schemes": {f"X {rate} {scale}": {"logit_scale": scale} for rate, scale in found}}
    rows = study(recipe, {name: {"axes": own, "context_length": TRAINED} for name, own in axes.items()}, [0, 1])
    for name, (shares, loss) in zip(axes, found.values(), strict=True):
        asked = [asked_row(n, 0.5, 10 * s, 10) for n, s in zip((128, 512), shares, strict=True) if s is not None]
        # The better trial is the worse one in the first seed.
        for seed, change in ((0, 2 * (3 - loss)), (1, 2 * (loss - 3))):
            own = {"scheme": name, "seed": seed}
            rows += [row | own for row in (*asked, loss_row(1.5, loss + change, 8))]
    without, scaled = ([*map(str, line[:5]), line[5].text] for line in table(rows, "best_trials").lines)
    assert without == ["X", "without", "rate=0.2, scale=None", "2", "55", "20.1"]
    assert scaled == ["X", "with", "rate=0.2, scale=ssmax", "3", "75", "12.2"]


def test_the_best_trial_of_the_copy_mixture_has_the_lowest_loss_at_the_shortest_length():
    """The loss of all tokens counts, above the optimum's, at the shortest length. Such a sweep has no table of axes."""
    found = {"0.1": (2.5, 2.4), "0.2": (2.4, 2.9), "0.3": (2.6, 2.2)}  # at 64 and 128 tokens
    axes = {f"X {rate}": {"scheme": "X", "rate": rate} for rate in found}
    rows = study({"schemes": {name: {} for name in axes}}, {name: {"axes": own} for name, own in axes.items()})
    for name, losses in zip(axes, found.values(), strict=True):
        for kind, change in (("all", 0.0), ("noise", -10 * losses[0])):
            for length, loss in zip((64, 128), losses, strict=True):
                numbers = {"nll": loss + change, "optimal_nll": 2.25, "expected_nll": 2.2, "tokens": 10}
                rows.append({"row": "copying", "scheme": name, "seed": 0, "length": length, "kind": kind} | numbers)
    (best,) = table(rows, "best_trials").lines
    assert [*map(str, best)] == ["X", "without", "rate=0.2", "3", "0.150"]
    assert "64 tokens" in table(rows, "best_trials").caption
    assert not table(rows, "axes").lines


def test_sweeps_around_a_base_have_no_best_trials(swept):
    assert not table(swept, "best_trials").lines


def test_schemes_without_pass_keys_keep_the_columns(swept):
    swept[:] = [row for row in swept if row["row"] != "retrieval" or row["scheme"] != "BAM"]
    found = line(table(swept, "axes"), "init", "uniform (base)")
    assert found[2:7] == ["", *["–"] * len(SWEPT_LENGTHS)]
    assert found[7] == line(table(swept, "perplexity"), "BAM")[2]


def test_extensions_follow_their_first_model(swept):
    found = table(swept, "extension").lines
    ways = [[f"{TRAINED} → {EXTENDED}", "trained on", "256"], ["", "another prior", "0"]]
    assert [list(line[:3]) for line in found] == [[FIRST, "before", "–"], *ways]
    for line_found, name, when in zip(found, (LONGER, LONGER, SHIFTED), ("before", "after", "after"), strict=True):
        for column, length in ((3, TRAINED), (4, EXTENDED)):
            losses = [row["loss"][when][str(length)] for row in swept.of("extension", scheme=name)]
            mean, low, high = over_seeds(losses)
            assert line_found[column] == Cell(f"{mean:.3f}", f"[{low:.3f}, {high:.3f}]")
    for line_found, name in zip(found, (FIRST, LONGER, SHIFTED), strict=True):
        assert line_found[5:9] == line(table(swept, "passkey"), name)[2:]


def test_every_extended_model_has_a_row_before_extension(swept):
    whole = table(swept, "extension").lines
    extended = {(LONGER, 0), (LONGER, 1), (SHIFTED, 1), (SHIFTED, 2)}
    swept[:] = [row for row in swept if row["row"] != "extension" or (row["scheme"], row["seed"]) in extended]
    before, one, other = table(swept, "extension").lines
    assert before[3:5] == whole[0][3:5]
    assert one[3] != other[3]


def test_extensions_to_several_lengths_have_separate_lines(swept):
    for row in swept.of("extension", scheme=SHIFTED):
        row |= {"to": 640, "loss": {when: {"160": 3.1, "640": 3.5} for when in ("before", "after")}}
    assert [list(line[:2]) for line in table(swept, "extension").lines] == [
        [FIRST, "before"], ["160 → 320", "trained on"], [FIRST, "before"], ["160 → 640", "another prior"],
    ]  # fmt: skip


# ---- heads and runs


def test_heads_are_counted_by_cluster(swept):
    shapes = [row["parameters"]["beta"] for row in swept.of("prior", scheme="BAM")]
    local, strong = sum(shape > 0 for shape in shapes), sum(shape < -0.6 for shape in shapes)
    counts = map(str, (local, len(shapes) - local - strong, strong))
    assert line(table(swept, "heads"), "BAM") == ["BAM", *counts, Cell("–")]
    scales = [row["s"] for row in swept.of("logit_scale", scheme=FIRST)]
    ends = f"[{min(scales):.3g}, {max(scales):.3g}]".replace("-", "−")
    assert line(table(swept, "heads"), FIRST)[-1] == Cell(f"{fmean(scales):.3g}", ends)


def test_masses_are_of_the_head_with_the_largest_weight():
    rows = study({}, ["GOAT"])
    for seed in SEEDS:
        for head in (0, 1):
            own = {"scheme": "GOAT", "seed": seed, "layer": 0, "head": head}
            mass = {"first": 0.2 + 0.5 * head, "previous": 0.5, "itself": 0.1 + seed / 5}
            rows.append({"row": "prior_mass"} | own | mass)
    shown = table(rows, "prior_mass")
    (found,) = shown.lines  # with one layer, there is no line for any layer
    assert found[:3] == ["GOAT", "0", "2"]
    assert [cell.text for cell in found[3:]] == ["70", "50", "20"]
    assert found[5].interval == "[0, 100]"  # cut to 0-100
    assert "logit scale" not in shown.caption
    rows.of("prior_mass")[0]["scaled"] = True
    assert "multiplied by the logit scale as in attention" in table(rows, "prior_mass").caption


HALVES: dict[str, list[list[int]]] = {
    # At 64, 128 and 256 tokens.
    "steady": [[0, 0, 0], [8, 8, 8], [32, 64, 128], [8, 16, 32]],
    "loses": [[2, 60, 1], [8, 9, 200], [9, 9, 9], [32, 32, 31]],
}


def sights() -> Rows:
    rows = study({}, ["NoPE", *HALVES])
    for scheme, heads_found in HALVES.items():
        for seed in SEEDS:
            for index, found in enumerate(heads_found):
                half = dict(zip(("64", "128", "256"), found, strict=True))
                own = {"scheme": scheme, "seed": seed, "layer": index // 2, "head": index % 2}
                rows.append({"row": "prior_reach"} | own | {"half": half})
    return rows


def test_heads_that_keep_their_class_are_counted():
    shown = table(sights(), "prior_reach")
    assert shown.header == ["scheme", "heads", "of", "64", "128", "256"]
    assert shown.lines == [
        ["steady", "near-sighted", "8", "6", "4", "4"], ["steady", "far-sighted", "8", "2", "2", "2"],
        ["loses", "near-sighted", "8", "4", "0", "2"], ["loses", "far-sighted", "8", "4", "2", "0"],
    ]  # fmt: skip


def test_schemes_show_only_their_requested_lengths():
    rows = sights()
    for row in rows.of("prior_reach", scheme="loses"):
        del row["half"]["64"]
    # In each seed, two heads are far-sighted at the first length, 128, with half and a quarter of the text.
    assert [line[3:] for line in table(rows, "prior_reach").lines[2:]] == [["–", "0", "0"], ["–", "4", "0"]]


def test_margins_stand_beside_the_far_sighted_heads_of_each_layer():
    rows = sights()
    for scheme, seed, margin in (("NoPE", 0, 4.0), ("steady", 0, 1.0), ("steady", 1, 3.0), ("loses", 0, -1.5)):
        for length in (64, 256) if scheme != "loses" else (64,):
            rows.append({"scheme": scheme, "seed": seed} | asked_row(length, 0.5, 1, margin=margin + length / 64))
    for row in rows.of("prior_reach", scheme="loses", seed=1):
        row["half"] = {"64": 40, "256": 40}  # In this seed, all heads are far-sighted.
    shown = table(rows, "margins_and_reach")
    assert "in a text of 256 tokens" in shown.caption
    assert shown.header == ["scheme", "layer 0", "layer 1", "64", "256"]
    assert [[*line[:3], *(cell if cell == ABSENT else cell.text for cell in line[3:])] for line in shown.lines] == [
        ["NoPE", "–", "–", "5.0", "8.0"], ["steady", "0", "2", "3.0", "6.0"], ["loses", "1.5", "1", "-0.5", "–"],
    ]  # fmt: skip
    mean, low, high = over_seeds([2.0, 4.0])
    assert line(shown, "steady")[3] == Cell(f"{mean:.1f}", f"[{low:.1f}, {high:.1f}]")


def test_the_heads_of_a_scheme_are_explained_and_counted(rows):
    shown = heads(rows.results()["prior"].query("scheme == 'BAM'"))
    assert shown.header[:6] == ["seed", "layer", "head", "role", "scale α, tokens", "shape β"]
    assert shown.caption == "16 heads, generalized gaussian: 8 retrieval (β < 0), 6 local (β > 0) and 2 uniform"
    assert [line[4] for line in shown.lines if line[3] == "uniform"] == ["–", "–"]
    assert len({tuple(line[:3]) for line in shown.lines}) == 16


def test_kinds_of_priors_have_separate_counts(rows):
    laplace = rows.of("prior", scheme="ALiBi")[0] | {"scheme": "BAM", "layer": 9}
    laplace["parameters"] = {"slope": 0.25, "bias": [0.0, 1.0, 2.0]}
    rows.put("prior", [rows.of("prior", scheme="BAM")[0], laplace])
    shown = heads(rows.results()["prior"])
    assert "beta" in shown.header  # beta may have another meaning in another prior
    assert [line[3:5] for line in shown.lines] == [["generalized gaussian", "retrieval (β < 0)"], ["laplace", ""]]
    assert [line[-2:] for line in shown.lines] == [["–", "–"], ["0.25", "3 numbers"]]


def test_training_is_described(rows):
    for row, seconds in zip(rows.of("run", scheme="NoPE"), (60, 180), strict=True):
        row["train_seconds"], row["final_loss"] = seconds, 2.5
    for row in rows.of("run", scheme="ALiBi"):
        row["train_seconds"] = row["final_loss"] = None
    shown = table(rows, "training")
    made = ["NoPE", "nope()", "0, 1", "160", "500", "1048576", "32", Cell("2.500", "[2.500, 2.500]"), "2.0"]
    assert shown.lines[0] == made
    assert shown.lines[1][-2:] == [Cell("–"), "–"]
    assert "Training of the models of 'Five schemes & a needle'" in shown.caption
    assert "torch 2.9.0. Machine: cores 2, threads per run 1." in shown.caption
    assert "0.1 hours, last collected 2026-11-20" in shown.caption
    runs = table(rows, "runs")
    assert runs.lines[0][:6] == ["NoPE", "0", "500", "2.5", "1 min 0 s", "1 min 0 s"]
    assert "passkey accuracy 0 at two lengths running" in str(runs.lines[0][6])


def test_results_without_data_have_no_tables(rows):
    named = [name for name, shown in tables(rows.results()).items() if shown.lines]
    assert named == ["passkey", "passkey_by_seed", "perplexity", "best", "differences", "heads", "training", "runs"]
    empty = study({}, ["NoPE"])
    assert not any(shown.lines for shown in tables(empty.results()).values())
    assert len(LENGTHS) == len(passkey_overview(rows.results()).header) - 1
