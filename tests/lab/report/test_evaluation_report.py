"""Tables and figures of an evaluation."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artists import by_gid

from attention_priors.lab.evaluate import Summary
from attention_priors.lab.evaluate.summary import summarize
from attention_priors.lab.report import evaluation, evaluation_results, evaluation_tables, write_evaluation_figures
from attention_priors.lab.report.table import Cell


def text(task: str, length: int, depth: float | None, score: float, **others: Any) -> dict[str, Any]:
    return {"run": task, "task": task, "length": length, "depth": depth, "score": score} | others


def document(length: int, name: int, task: str = "perplexity") -> dict[str, Any]:
    """Return losses in three ranges: 1, 2-3 and 4-7."""
    ranges = [[1, 1, 5.0], [2, 3, 8.0], [4, 7, 14.0 + name / 10]]
    return {"run": task, "task": task, "length": length, "document": str(name), "losses": ranges}


RECORDS = [
    *(text("passkey", 1024, depth, 1.0, token_accuracy=0.999) for depth in (0.0, 0.5, 1.0) for _ in range(2)),
    *(text("passkey", 2048, depth, score) for depth in (0.0, 0.5, 1.0) for score in (float(depth == 1.0), 0.0)),
    {"run": "passkey", "stopped_before": 4096, "reason": "nothing | right"},
    *(text("niah_multivalue", 1024, None, score) for score in (0.25, 0.75)),
    *(document(64, name) for name in range(3)),
    document(128, 0),
    *({"run": "w", "task": "passkey_weight", "length": length, "weights": [[0.1 * head, 0.9 - head / 20]]}
      for length in (64, 128) for head in range(3)),
    {"run": "t", "task": "timing", "length": 512, "pass": "forward", "passes": 3, "mean_ms": 12.34, "std_ms": 1.0,
     "median_ms": 12.0, "peak_bytes": 3 << 20},
]  # fmt: skip


@pytest.fixture
def summary() -> Summary:
    return summarize(RECORDS)


def shown(summary: Summary) -> dict[str, Any]:
    return {table.name: table for table in evaluation_tables(evaluation_results(summary, "gpt2"))}


def losses_of(summary: Summary) -> Summary:
    rows, totals = ([row for row in found if row["row"] == "perplexity"] for found in (summary.rows, summary.totals))
    return Summary(rows, totals)


def drawn(summary: Summary) -> dict[str, Any]:
    return dict(evaluation._figures(summary, evaluation_results(summary, "gpt2")))


def test_tables_show_the_results(summary: Summary):
    found = shown(summary)
    assert [*found] == [
        "retrieval", "answer_tokens", "stopped", "losses", "losses_by_position", "needle_weights", "timing",
    ]  # fmt: skip
    assert found["retrieval"].header == ["task", "texts", "1024", "2048"]
    assert found["retrieval"].lines == [
        ["passkey", "6", Cell("100", "[61, 100]"), Cell("17", "[3, 56]")],
        ["niah_multivalue", "2", Cell("50", "[9, 91]"), "–"],
    ]
    assert found["answer_tokens"].lines == [["passkey, answer's tokens", "1024", Cell(">99")]]
    assert found["stopped"].lines == [["passkey", "nothing | right"]]
    assert r"nothing \| right" in found["stopped"].markdown()
    (loss,) = (row for row in summary.totals if row["row"] == "perplexity" and row["length"] == 64)
    nats = Cell(f"{27.1 / 7:.3f}", f"[{loss['low']:.3f}, {loss['high']:.3f}]")
    assert found["losses"].lines == [
        ["perplexity", "64", "3", nats, f"{math.exp(27.1 / 7):.3g}", f"{27.1 / 7 / math.log(2):.3f}"],
        ["perplexity", "128", "1", Cell("3.857"), "47.3", "5.565"],
    ]
    assert found["losses_by_position"].lines[1] == ["2", "4", "4"]
    assert found["timing"].lines == [["forward", Cell("12", "± 1"), Cell("3")]]
    assert [line[0] for line in found["needle_weights"].lines] == ["0.1", "0.0"]
    assert found["needle_weights"].lines[0][1].text == "85.0"


def test_losses_that_are_not_finite_are_shown_as_such():
    broken = document(64, 0) | {"losses": [[1, 1, None], [2, 3, 8.0]]}
    (losses, places) = shown(summarize([broken])).values()
    assert losses.lines == [["perplexity", "64", "1", Cell("not finite"), "–", "nan"]]
    assert places.lines == [["1", "–"], ["2", "4"]]


def test_losses_of_bases_are_bits_without_perplexity(summary: Summary):
    of_bases = replace(losses_of(summary), of_bases=True)
    losses = shown(of_bases)["losses"]
    assert "per base" in losses.caption
    assert losses.header == ["task", "tokens", "documents", "nats", "bits per base"]
    axes = drawn(of_bases)["perplexity_by_position"].axes[0]
    assert (axes.get_ylabel(), axes.get_yscale()) == ("bits per base", "linear")


@pytest.mark.usefixtures("drawn")
def test_figures_need_results(summary: Summary, tmp_path: Path):
    results = evaluation_results(summary, "gpt2")
    files = write_evaluation_figures(summary, results, tmp_path)
    names = ["accuracy_by_length", "heatmap_passkey", "perplexity_by_position"]
    assert [file.name for file in files] == [f"{name}.png" for name in names]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    (tmp_path / "photo.png").write_bytes(b"someone's own")
    fewer = losses_of(summary)
    (kept,) = write_evaluation_figures(fewer, evaluation_results(fewer, "gpt2"), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, "photo.png"}
    nothing = Summary([], [])
    assert write_evaluation_figures(nothing, evaluation_results(nothing, "gpt2"), tmp_path / "none") == []
    assert shown(nothing) == {}


def test_tasks_are_lines_with_wilson_intervals(summary: Summary):
    figure = drawn(summary)["accuracy_by_length"]
    axes = figure.axes[0]
    for container, task in zip(axes.containers, ("passkey", "niah_multivalue"), strict=True):
        (bars,) = container[2]
        own = [row for row in summary.totals if row.get("task") == task]
        assert container.get_label() == task
        for segment, one in zip(bars.get_segments(), own, strict=True):
            expected = (100 * min(one["low"], one["mean"]), 100 * max(one["high"], one["mean"]))
            assert sorted(segment[:, 1]) == pytest.approx(expected)
            assert segment[0, 0] == pytest.approx(one["length"], rel=0.1)
    assert len(by_gid(figure, "stopped:passkey:0")) == 1
    assert not by_gid(figure, "training length")


def test_heatmaps_have_means_at_their_edges(summary: Summary):
    axes = drawn(summary)["heatmap_passkey"].axes[0]
    # Cells row by row. Means of rows are at their ends, and means of columns below.
    assert [text.get_text() for text in axes.texts] == [
        "100", "0", "50", "100", "0", "50", "100", "50", "75", "100", "17",
    ]  # fmt: skip
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "50", "100", "mean"]


def test_perplexity_is_drawn_against_position(summary: Summary):
    axes: Any = drawn(summary)["perplexity_by_position"].axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert {"3 texts of 64 tokens", "1 text of 128 tokens"} <= {*lines}
    line = lines["1 text of 128 tokens"]
    assert list(line.get_xdata()) == pytest.approx([1.0, math.sqrt(6), math.sqrt(28)])
    assert list(line.get_ydata()) == pytest.approx([math.exp(loss) for loss in (5.0, 4.0, 3.5)])


def test_perplexities_beyond_float_are_drawn():
    found = document(64, 0)
    found["losses"].append([8, 15, 8 * 800.0])
    axes: Any = drawn(summarize([found]))["perplexity_by_position"].axes[0]
    assert 1e200 < axes.lines[0].get_ydata()[3] < math.inf
    assert 2 < len(axes.get_yticks()) < 12  # no more labels than can be read


def test_genome_completions_have_a_table_and_a_figure():
    bases = "ACGT" * 50
    records = [
        {"run": "g", "task": "genome_completion", "length": 256, "document": name, "expected": bases}
        | {"continuation": bases if name == "a" else "A" * 200}
        for name in ("a", "b")
    ]
    (table,) = shown(summarize(records)).values()
    identity = Cell("62.5", table.lines[0][3].interval)
    assert table.lines[0][:5] == ["256", "2", "1", identity, "25.0"]
    assert identity.interval.startswith("[−")
    figure = drawn(summarize(records))["genome_completion"]
    assert figure.axes[1].get_yticklabels()[0].get_text() == "100 %"
