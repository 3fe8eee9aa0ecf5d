import math

import pytest

from attention_priors.report.numbers import duration, listing, moment, multiple, percent, quantity
from attention_priors.report.pages.summary import reach, summarize
from attention_priors.report.selections.heads import role
from attention_priors.report.tables.heads import head_table
from attention_priors.results_format import SECTIONS


def gaussian(beta) -> dict:
    return {"prior": "generalized_gaussian", "parameters": {"beta": beta}}


def asked(scheme, length, correct, seed=0) -> dict:
    return {"scheme": scheme, "seed": seed, "length": length, "depth": 0.5, "trials": 20, "correct": correct}


def test_reach_is_the_longest_length_held_and_tells_the_worst_before_it(results):
    results["passkey"] = [
        *(asked("BAM", length, correct) for length, correct in ((64, 18), (128, 12), (256, 19), (512, 18))),
        *(asked("NoPE", length, correct) for length, correct in ((64, 20), (128, 18))),
        asked("RoPE", 64, 5),
    ]
    reached = reach(results)
    assert [(name, found.farthest and found.farthest.length) for name, found in reached.items()] == [
        ("NoPE", 64), ("RoPE", None), ("BAM", 256),
    ]  # fmt: skip
    assert reached["BAM"].dip is not None
    assert reached["BAM"].dip.length == 128
    assert reached["NoPE"].dip is None
    text = summarize(results)
    assert (
        "BAM found at least 95 % of the keys in texts of up to 256 tokens, 1.6× the training length "
        "(but BAM only 60 % at 128 tokens)."
    ) in text
    assert "RoPE did not find 95 % of the keys at any length." in text
    assert "No pass keys were asked of ALiBi and BAM <SSMax>." in text


def test_a_length_that_a_seed_was_not_evaluated_at_is_not_held(results):
    results["passkey"] = [asked("BAM", 64, 20), asked("BAM", 64, 20, seed=1), asked("BAM", 128, 20)]
    farthest = reach(results)["BAM"].farthest
    assert farthest is not None
    assert farthest.length == 64


def test_summary_names_the_best_perplexity_at_the_end(results):
    end = max(row["position"] for row in results["perplexity"])
    for row in results["perplexity"]:
        if row["position"] == end:
            row["nll"] = math.log(12.3 if row["scheme"] == "ALiBi" else 45.6)
    assert "ALiBi has the lowest perplexity: 12.3." in summarize(results)


def test_summary_of_one_scheme_and_one_seed_is_in_the_singular(results):
    for section in SECTIONS:
        results[section] = []
    results |= {"schemes": results["schemes"][:1], "seeds": [0]}
    assert summarize(results) == "1 scheme was trained on contexts of 160 tokens, each with 1 seed."


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (gaussian(-5.6), "retrieval"),
        (gaussian(-0.01), "retrieval"),
        (gaussian(0.0), "uniform"),
        (gaussian(-0.004), "uniform"),
        (gaussian(2.6), "local"),
        (gaussian(None), None),
        (gaussian(math.nan), None),
        ({"prior": "spectral", "parameters": {"beta": 1.0}}, None),
    ],
)
def test_roles_follow_the_sign_of_beta(row, expected):
    assert role(row) == expected


def test_head_table_explains_the_gaussian_and_counts_roles(results):
    table = head_table(results, "BAM")
    assert table is not None
    assert table.headings[:6] == ["seed", "layer", "head", "in words", "scale α, tokens", "shape β"]
    assert table.caption == ("16 heads, generalized gaussian: 8 retrieval (β < 0), 6 local (β > 0) and 2 uniform")
    uniform = [line for line in table.lines if line[3] == "uniform"]
    assert [line[4] for line in uniform] == ["–", "–"]
    assert len({tuple(line[:3]) for line in table.lines}) == 16


def test_head_table_leaves_the_terms_of_other_priors(results):
    row = next(row for row in results["priors"] if row["scheme"] == "ALiBi")
    row["parameters"] = {"alpha": 0.5, "bias": [0.0, 1.0, 2.0]}
    results["priors"] = [row]
    table = head_table(results, "ALiBi")
    assert table is not None
    assert table.headings == ["seed", "layer", "head", "alpha", "bias"]
    assert table.lines == [["0", "0", "0", "0.5", "3 numbers"]]
    assert head_table(results, "NoPE") is None


def test_several_kinds_of_prior_are_told_apart(results):
    gaussian_row = next(row for row in results["priors"] if row["scheme"] == "BAM")
    laplace_row = next(row for row in results["priors"] if row["scheme"] == "ALiBi") | {
        "scheme": "BAM",
        "layer": 9,
    }
    results["priors"] = [gaussian_row, laplace_row]
    table = head_table(results, "BAM")
    assert table is not None
    assert "beta" in table.headings
    assert [line[3:5] for line in table.lines] == [
        ["generalized gaussian", "retrieval (β < 0)"],
        ["laplace", ""],
    ]
    assert [line[-1] for line in table.lines] == ["–", "0.25"]


@pytest.mark.parametrize(
    ("write", "value", "expected"),
    [
        (percent, 0.0, "0"),
        (percent, 0.004, "<1"),
        (percent, 0.5, "50"),
        (percent, 0.999, ">99"),
        (percent, 1.0, "100"),
        (multiple, 0.4, "0.4"),
        (multiple, 51.2, "51"),
        (multiple, 819.2, "819"),
        (quantity, None, "–"),
        (quantity, math.nan, "–"),
        (quantity, math.inf, "∞"),
        (quantity, -0.12345, "−0.123"),
        (duration, None, "–"),
        (duration, 41.4, "41 s"),
        (duration, 59.7, "1 min 0 s"),
        (duration, 7500.0, "2 h 5 min"),
        (listing, ["a"], "a"),
        (listing, ["a", "b", "c"], "a, b and c"),
        (listing, [], ""),
        (moment, "2026-11-20T14:00:00+00:00", "20 November 2026, 14:00 UTC"),
        (moment, "2026-01-02T03:04:05", "2 January 2026, 03:04"),
    ],
)
def test_numbers_are_written_for_people(write, value, expected):
    assert write(value) == expected
