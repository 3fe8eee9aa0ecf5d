"""Tables and figures of synthetic results."""

import copy
from typing import Any

import numpy as np
import pytest
from bench_cases import WAYS
from matplotlib.lines import Line2D

from attention_priors.lab.bench.figures import against_length, write_figures
from attention_priors.lab.bench.results import growth
from attention_priors.lab.bench.tables import failures, markdown_tables, seconds_text, tables

LENGTHS = (1024, 8192, 16384, 32768)


def make_results() -> dict[str, Any]:
    rows = []
    for name, way in WAYS.items():
        for length in LENGTHS:
            row: dict[str, Any] = {"pass": "forward", "length": length, "way": name}
            if way.kind == "others" and length > 8192:
                row |= {"status": "not run", "reason": "needs 99.0 GiB; 20.0 GiB may be used"}
            elif name == "goat":
                row |= {"status": "cannot run", "reason": "goat-attention is not installed"}
            else:
                seconds = 1e-9 * length ** (1 if name == "attend-window" else 2)
                row |= {
                    "status": "measured", "seconds": [seconds], "median_seconds": [seconds, seconds, seconds],
                    "calls": 1, "error": 2e-7, "peak_bytes": length * 1024, "baseline": way.baseline,
                    "ratios": [1.25], "median_ratio": [1.25, 1.2, 1.3],
                }  # fmt: skip
            rows.append(row)
    fits = []
    for name in WAYS:
        mine = [row for row in rows if row["way"] == name and row["status"] == "measured"]
        fit = growth({row["length"]: row["median_seconds"][0] for row in mine})
        if fit is not None:
            fits.append({"pass": "forward", "way": name, "of": "time", "exponent": fit[0], "lengths": fit[1]})
    return {
        "format": 1,
        "created": "2026-11-21T12:00:00+00:00",
        "settings": {
            "device": "cpu", "threads": 2, "dtype": "float32", "batch": 1, "heads": 8, "head_dim": 64, "repetitions": 9,
        },
        "versions": {"torch": "2.13.0", "goat-attention": None},
        "machine": {"processor": "a processor"},
        "ways": [
            {key: getattr(way, key) for key in ("name", "label", "kind", "times", "baseline", "counterpart")}
            for way in WAYS.values()
        ],
        "rows": rows,
        "comparisons": [
            {"pass": "forward", "length": 1024, "way": "formula-alibi", "counterpart": "attend-alibi",
             "ratios": [12.0], "median_ratio": [12.0, 11.0, 13.0]},
        ],
        "growth": fits,
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    return copy.deepcopy(make_results())


def drawn(axes: Any) -> dict[str, Line2D]:
    return {line.get_gid(): line for line in axes.lines if line.get_gid()}


def test_lines_show_the_medians(results):
    figure = against_length(results, "forward", "time")
    ours, others = figure.axes
    lines = drawn(ours)
    x, y = lines["ours:attend-window"].get_data()
    assert np.array_equal(x, LENGTHS)
    assert np.array_equal(y, [1e-9 * length for length in LENGTHS])
    assert ours.get_xscale() == others.get_yscale() == "log"
    # The limit is in both panels, this library in one.
    assert "others:plain" in drawn(others)
    assert "others:attend-window" not in drawn(others)


def test_legends_distinguish_missing_memory_from_errors(results):
    for row in results["rows"]:
        if row["way"] == "bloom":
            row |= {"status": "not run", "reason": "needs 99.0 GiB; 20.0 GiB may be used"}
    legends = [axes.get_legend() for axes in against_length(results, "forward", "time").axes]
    texts = [text.get_text() for legend in legends if legend is not None for text in legend.get_texts()]
    assert "transformers, BLOOM's ALiBi: not run" in texts
    assert "goat-attention: cannot run" in texts


def test_legends_show_powers_and_failures(results):
    ours, others = against_length(results, "forward", "time").axes
    legends = [legend for axes in (ours, others) if (legend := axes.get_legend()) is not None]
    texts = [text.get_text() for legend in legends for text in legend.get_texts()]
    assert "attend, window of 1024, L^1.00" in texts
    assert "attend, ALiBi, L^2.00" in texts
    assert "goat-attention: cannot run" in texts
    assert "not measured beyond (see table)" in texts
    assert "stopped:formula-alibi" in drawn(others)
    assert "stopped:attend-alibi" not in drawn(ours)


def test_lines_of_a_panel_have_distinct_styles(results):
    for axes in against_length(results, "forward", "time").axes:
        looks = [
            (line.get_color(), line.get_marker(), line.get_linestyle())
            for gid, line in drawn(axes).items()
            if not gid.startswith("stopped")
        ]
        assert len(set(looks)) == len(looks)
        assert sum(color == "#000000" for color, *_ in looks) == 1


def test_figures_are_written(results, tmp_path):
    assert [path.name for path in write_figures(results, tmp_path)] == ["time_forward.png", "memory_forward.png"]
    for row in results["rows"]:
        if row["status"] == "measured":
            row["peak_bytes"] = None
    assert [path.name for path in write_figures(results, tmp_path)] == ["time_forward.png"]


def test_tables_show_medians_and_ratios(results):
    by_title = {table.caption: table for table in tables(results)}
    time = by_title["Time: forward"]
    assert time.header == ["", *(f"L = {length}" for length in LENGTHS), "growth"]
    lines = {line[0]: [*map(str, line[1:])] for line in time.lines}
    assert lines["plain SDPA, no prior"] == ["1.05 ms", "67.1 ms", "268 ms", "1.07 s", "L^2.00 (8192–32768)"]
    assert lines["attend, GGD"][0] == "1.05 ms · 1.25× (1.20–1.30)"
    assert lines["goat-attention"] == ["cannot run", "cannot run", "not run", "not run", "–"]
    memory = {line[0]: [*map(str, line[1:])] for line in by_title["Peak memory above the inputs: forward"].lines}
    assert memory["attend, GGD"][0] == "1.00 MiB · 1.00×"
    (compared,) = by_title["How many times as long others take for the same function: forward"].lines
    assert [*map(str, compared)] == ["dense formula, ALiBi", "attend, ALiBi", "12.0× (11.0–13.0)"]


def test_pages_name_every_failure(results):
    text = "\n".join(failures(results))
    assert "goat-attention, forward, 1024 and 8192 tokens: cannot run: goat-attention is not installed" in text
    assert "BLOOM's ALiBi, forward, 16384 and 32768 tokens: not run: needs 99.0 GiB; 20.0 GiB may be used" in text
    page = markdown_tables(results)
    assert text.splitlines()[0] in page
    assert page.startswith("2 threads of a processor; float32, batch 1, H = 8, D = 64; 21 November 2026, 12:00 UTC")
    assert "`attend-ggd`" in page
    assert "None" not in page


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5e-7, "0.25 µs"),
        (8.5e-4, "850 µs"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.00 s"),
        (4.567, "4.57 s"),
        (123.4, "123 s"),
    ],
)
def test_times_have_three_digits(seconds, text):
    assert seconds_text(seconds) == text
