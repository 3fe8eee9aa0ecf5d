"""Tables and figures of an evaluation."""

import math
from pathlib import Path
from typing import Any

import pytest

from attention_priors.lab.evaluate import Accuracy, AtDepth, AtPosition, Loss, Summary, summarize
from attention_priors.lab.intervals import Interval, wilson_interval
from attention_priors.lab.report import evaluation_markdown, evaluation_tables, write_evaluation_figures
from attention_priors.lab.report.figures.evaluation import accuracy_by_length, depth_heatmap, perplexity_by_position
from attention_priors.lab.report.selections.losses import measure_of_tokens


def _accuracy(task: str, length: int, found: dict[float, tuple[float, int]], **changes: Any) -> Accuracy:
    by_depth = {depth: AtDepth(*values, None, None) for depth, values in found.items()}
    trials = sum(one.trials for one in by_depth.values()) or 4
    total = sum(one.mean * one.trials for one in by_depth.values())
    values: dict[str, Any] = {
        "task": task,
        "length": length,
        "trials": trials,
        "mean": total / trials,
        "interval": wilson_interval(total, trials),
        "token_accuracy": None,
        "tokens_right": None,
        "by_depth": by_depth,
        "stopped": None,
    }
    return Accuracy(**values | changes)


def _loss(length: int, documents: int = 3) -> Loss:
    by_position = [AtPosition(1.0, 5.0, 3), AtPosition(math.sqrt(6), 4.0, 6), AtPosition(math.sqrt(28), 3.5, 12)]
    return Loss("perplexity", length, documents, 100, 4.0, Interval(3.5, 4.5), by_position)


DEPTHS = (0.0, 0.5, 1.0)


@pytest.fixture
def summary() -> Summary:
    records = [
        {"run": "a", "identity": {"task": "timing"}},
        {"run": "a", "task": "timing", "length": 512, "pass": "forward", "passes": 3, "mean_ms": 12.3456}
        | {"std_ms": None, "median_ms": 12.0, "peak_bytes": 3 * 2**20},
        {"run": "a", "task": "timing", "length": 512, "pass": "forward+backward", "passes": 3, "mean_ms": 1234.5}
        | {"std_ms": 1.0, "median_ms": 12.0, "peak_bytes": 3 * 2**30},
    ]
    found = [
        _accuracy("passkey", 1024, dict.fromkeys(DEPTHS, (1.0, 2)), token_accuracy=0.995),
        _accuracy("passkey", 2048, {0.0: (0.0, 2), 0.5: (0.0, 2), 1.0: (0.5, 2)}, stopped="nothing | right"),
        _accuracy("niah_multivalue", 1024, {}, mean=0.25),
    ]
    return Summary(found, [_loss(64), _loss(128, 1)], [], [], summarize(records).durations)


def test_tables_say_what_was_found(summary: Summary):
    text = evaluation_markdown(summary)
    assert "| passkey | 1024 | 6 | 100 | 61–100 | >99 |" in text
    assert "| passkey | 2048 | 6 | 17 | 3–56 | – |" in text
    assert "| passkey | nothing \\| right |" in text
    assert "| perplexity | 64 | 3 | 4.000 | 3.500–4.500 | 54.6 |" in text
    assert "| forward | 512 | 3 | 12.3 | – | 12 | 3 MiB |" in text
    assert "| forward+backward | 512 | 3 | 1234 | 1 | 12 | 3.00 GiB |" in text
    assert [str(table.title) for table in evaluation_tables(summary)] == [
        "Retrieval, percent",
        "Stopped",
        "Loss, with a t interval over documents",
        "Nats per token by position",
        "Time of one pass",
    ]


def test_figures_are_those_that_there_are_results_for(summary: Summary, tmp_path: Path):
    files = write_evaluation_figures(summary, tmp_path / "figures")
    names = ["accuracy_by_length", "heatmap_passkey", "perplexity_by_position"]
    assert [file.name for file in files] == [f"{name}.png" for name in names]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert write_evaluation_figures(Summary([], [], [], [], []), tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_figures_of_what_is_no_longer_asked_for_are_removed(summary: Summary, tmp_path: Path):
    write_evaluation_figures(summary, tmp_path)
    for name in ("photo.png", "table.md"):
        (tmp_path / name).write_bytes(b"someone's own")
    asked = [one for one in summary.accuracies if one.task != "passkey"]
    (kept,) = write_evaluation_figures(Summary(asked, [], [], [], []), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, "photo.png", "table.md"}


def test_bars_are_wilson_intervals(summary: Summary):
    axes = accuracy_by_length(summary.accuracies).axes[0]
    assert len(axes.containers) == 2
    for container, task in zip(axes.containers, ("passkey", "niah_multivalue"), strict=True):
        (bars,) = container[2]  # pyright: ignore[reportArgumentType]
        mine = [one for one in summary.accuracies if one.task == task]
        for segment, one in zip(bars.get_segments(), mine, strict=True):
            expected = (100 * min(one.interval.low, one.mean), 100 * max(one.interval.high, one.mean))
            assert sorted(segment[:, 1]) == pytest.approx(expected)
            assert segment[0, 0] == pytest.approx(one.length, rel=0.1)
    assert [line.get_gid() for line in axes.lines if line.get_gid()] == ["stopped:passkey"]


def _texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_heatmap_has_means_at_its_edges(summary: Summary):
    figure = depth_heatmap([one for one in summary.accuracies if one.task == "passkey"])
    # Row by row, and the means of rows at their ends, those of columns below.
    assert _texts(figure) == ["100", "0", "50", "100", "0", "50", "100", "50", "75", "100", "17"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "50", "100", "mean"]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1024", "2048", "mean"]


def test_means_count_texts():
    figure = depth_heatmap([_accuracy("passkey", 64, {0.0: (1.0, 3), 1.0: (0.0, 1)})])
    assert _texts(figure) == ["100", "100", "0", "0", "75"]


def test_depths_that_differ_between_lengths_are_put_together_by_tenths():
    first = _accuracy("niah_single_1", 64, {0.02: (1.0, 1), 0.08: (0.0, 1), 1.0: (1.0, 1)})
    figure = depth_heatmap([first, _accuracy("niah_single_1", 128, {0.55: (1.0, 2)})])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"{start}–{start + 10}" for start in range(0, 100, 10)] + ["mean"]
    assert _texts(figure) == ["50", "50", "100", "100", "100", "100", "67", "100"]
    assert sum(patch.get_gid() == "not measured" for patch in figure.axes[0].patches) == 20 - 3 + 10 - 3


def test_perplexity_is_drawn_against_position():
    axes = perplexity_by_position([_loss(64), _loss(128, 1)]).axes[0]
    lines: Any = axes.lines
    assert [list(line.get_xdata()) for line in lines] == [[1.0, math.sqrt(6), math.sqrt(28)]] * 2
    assert list(lines[0].get_ydata()) == pytest.approx([math.exp(loss) for loss in (5.0, 4.0, 3.5)])
    assert [line.get_label() for line in axes.lines] == ["3 texts of 64 tokens", "1 text of 128 tokens"]
    assert axes.get_xlim()[1] > math.sqrt(28)


def test_of_bases_bits_are_drawn():
    axes = perplexity_by_position([_loss(64)], measure_of_tokens(are_bases=True)).axes[0]
    (line,) = axes.lines
    assert line.get_ydata() == pytest.approx([place.nll / math.log(2) for place in _loss(64).by_position])
    assert (axes.get_ylabel(), axes.get_yscale()) == ("bits per base", "linear")


def test_a_perplexity_too_large_for_a_number_is_drawn(tmp_path: Path):
    found = _loss(64)
    found.by_position.append(AtPosition(math.sqrt(8 * 15), 800.0, 24))
    axes = perplexity_by_position([found]).axes[0]
    line: Any = axes.lines[0]
    assert list(line.get_ydata())[:3] == pytest.approx([math.exp(loss) for loss in (5.0, 4.0, 3.5)])
    assert 1e200 < line.get_ydata()[3] < math.inf
    assert 4 < len(axes.get_yticks()) < 12  # no more than can be read
    assert write_evaluation_figures(Summary([], [found], [], [], []), tmp_path)
