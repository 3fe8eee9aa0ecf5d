import math
from functools import partial
from typing import Any

import pytest

from attention_priors.lab.report.figures.comparison import theta_scatter
from attention_priors.lab.report.numbers import decimals, duration, listing, moment, multiple, percent, quantity
from attention_priors.lab.report.pages.summary import reach, summarize
from attention_priors.lab.report.selections.heads import gaussian_heads, role
from attention_priors.lab.report.tables.heads import head_table
from attention_priors.lab.results_format import SECTIONS


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


def test_summary_counts_the_seeds_of_each_scheme(results):
    """The seeds of all together would be those of none, where schemes have others."""
    runs = results["runs"]
    results["runs"] = [row for row in runs if row["seed"] == (row["scheme"] == "BAM")]
    assert "each with 1 seed." in summarize(results)
    results["runs"] = [row for row in runs if row["scheme"] != "BAM" or row["seed"] == 0]
    assert "each with 1 to 2 seeds." in summarize(results)
    results["runs"] = runs
    assert "each with 2 seeds." in summarize(results)


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
        (quantity, -1.7e-16, "0"),
        (quantity, 1e-9, "1e−09"),
        (partial(decimals, digits=2), -0.126, "−0.13"),
        (partial(decimals, digits=2), -0.004, "0.00"),
        (partial(decimals, digits=0), 12.3, "12"),
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


def test_gaussians_within_sums_are_heads_of_their_own(results):
    def of(lead: str, theta_alpha: float, beta: float | None) -> dict[str, float | None]:
        return {f"{lead}beta": beta, f"{lead}theta_alpha": theta_alpha, f"{lead}mu": 0.0}

    common = {"scheme": "BAM", "seed": 0, "layer": 1, "distance": [0], "log_prior": [0.0]}
    first, second = of("generalized_gaussian.", 0.5, 0.7), of("generalized_gaussian_2.", -1.0, -0.3)
    results["priors"] = [
        common | {"head": 0, "prior": "generalized_gaussian + window", "parameters": first},
        common
        | {"head": 1, "prior": "generalized_gaussian + key_sink + generalized_gaussian"}
        | {"parameters": {**first, "key_sink.bump": 3.0, **second}},
        common | {"head": 2, "prior": "generalized_gaussian", "parameters": of("", 0.1, 0.2)},
        # Heads that have none, and results from before summands had their θα.
        common | {"head": 3, "prior": "generalized_gaussian", "parameters": of("", 0.1, None)},
        common
        | {"head": 4, "prior": "generalized_gaussian + window", "parameters": {"generalized_gaussian.beta": 0.7}},
        common | {"head": 5, "prior": "spectral + key_sink", "parameters": {"key_sink.bump": 3.0}},
    ]
    found = gaussian_heads(results, "BAM")
    assert [(row["head"], row["parameters"]["theta_alpha"], row["parameters"]["beta"]) for row in found] == [
        (0, 0.5, 0.7), (1, 0.5, 0.7), (1, -1.0, -0.3), (2, 0.1, 0.2),
    ]  # fmt: skip
    assert all(row["layer"] == 1 for row in found)
    dots: list[Any] = [line for line in theta_scatter(results).axes[0].lines if line.get_gid() == "theta:BAM"]
    assert {(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots} == {(0.5, 0.7), (-1.0, -0.3), (0.1, 0.2)}
