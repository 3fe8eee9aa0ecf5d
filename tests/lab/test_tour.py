"""The tour, the examples it asks, and progress without a terminal."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.collections import LineCollection
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from attention_priors import Prior
from attention_priors.lab import examples, progress, tour
from attention_priors.lab.cli import app
from attention_priors.lab.evaluate import evaluate
from attention_priors.lab.examples import EXAMPLES, TRAINED, example_folder, example_model
from attention_priors.lab.report.figures.attention import last_weights
from attention_priors.lab.tasks import EvaluationPlan, Subject
from browsing import Opened, in_a_browser
from html_pages import Page

SHORT_PLAN = EvaluationPlan(tasks=("passkey_corpus",), lengths=(123, 256), depths=2)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_bfloat16_retrieves_pass_keys_at_its_training_length(name: str, tmp_path: Path):
    plan = EvaluationPlan(tasks=("passkey_corpus",), lengths=(TRAINED - 5,), depths=20)
    subject = Subject.load(example_folder(name), dtype="bfloat16", device="cpu")
    assert evaluate(subject, plan, tmp_path).totals[0]["mean"] >= 0.95


def test_examples_are_small_and_differ_only_in_their_positions():
    size = sum(path.stat().st_size for name in EXAMPLES for path in example_folder(name).rglob("*"))
    assert size <= 2e6 * len(EXAMPLES)
    models = {name: example_model(name) for name in EXAMPLES}
    assert {model.dtype for model in models.values()} == {torch.float32}
    positions = {"encoding", "prior", "layer_pattern", "layer_kinds", "logit_scale"}
    positions |= {"_name_or_path", "attention_priors_training"}
    configs = [
        {key: value for key, value in model.config.to_dict().items() if key not in positions}
        for model in models.values()
    ]
    assert all(config == configs[0] for config in configs)
    with_prior = {name for name, model in models.items() if any(isinstance(x, Prior) for x in model.modules())}
    assert with_prior == {*EXAMPLES} - {"rope"}
    texts = [AutoTokenizer.from_pretrained(example_folder(name))("The pass key is 12345.") for name in EXAMPLES]
    assert all(text["input_ids"] == texts[0]["input_ids"] for text in texts)


def test_rope_and_alibi_with_local_layers_first_trained_longer_as_the_page_says():
    trained = {name: example_model(name).config.attention_priors_training["steps"] for name in EXAMPLES}
    steps = {name: text.split()[0] for name, text in trained.items()}
    assert steps == dict.fromkeys(EXAMPLES, "2500") | {"rope": "4000", "alibi-local-first": "4000"}


def test_an_unknown_example_is_refused_with_the_names():
    with pytest.raises(ValueError, match=f"name must be one of {', '.join(EXAMPLES)}; got 'bam_ssmax'"):
        example_model("bam_ssmax")


@pytest.fixture(scope="module")
def short_tour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tour of two lengths."""
    folder = tmp_path_factory.mktemp("tour")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(tour, "PLAN", SHORT_PLAN)
        patch.setattr(tour, "LENGTHS", SHORT_PLAN.lengths)
        patch.setattr("webbrowser.open", lambda url: pytest.fail("a browser opens without a terminal"))
        first = CliRunner().invoke(app, ["tour"])
    assert first.exit_code == 0, first.output
    return folder / "runs" / "tour"


def test_the_tour_writes_one_page_and_reuses_its_answers(short_tour: Path, monkeypatch: pytest.MonkeyPatch):
    answers = (short_tour / "results.jsonl").read_text()
    lines = [json.loads(line) for line in answers.splitlines()]
    assert sum("depth" in line for line in lines) == len(EXAMPLES) * 2 * 2
    page = Page((short_tour / "tour.html").read_text(encoding="utf-8"))
    assert all(scheme in page.text for scheme in EXAMPLES.values())
    assert len(page.all("img")) == 3
    assert all(image["src"].startswith("data:image/png;base64,") and image["alt"] for image in page.all("img"))
    # Nothing is asked again.
    monkeypatch.chdir(short_tour.parents[1])
    monkeypatch.setattr(tour, "PLAN", SHORT_PLAN)
    monkeypatch.setattr("attention_priors.lab.tasks.passkey.PasskeyTexts.sample", None)
    second = CliRunner().invoke(app, ["tour"])
    assert second.exit_code == 1, second.output
    assert (short_tour / "results.jsonl").read_text() == answers


@in_a_browser
@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_is_legible_at_the_width(browser: Any, short_tour: Path, width: int):
    opened = Opened(browser, short_tour / "tour.html", width)
    opened.check()
    # 8.5 points of a figure of 4.2 inches.
    assert min(opened.each("img", "8.5 / (4.2 * 72) * e.clientWidth")) >= 9
    assert not any(opened.each(".scroll", "e.scrollWidth > e.clientWidth"))
    opened.context.close()


def test_weights_of_the_last_token_stand_beside_the_pass_key():
    weights = torch.rand(6, 6).tril()
    figure = last_weights({"needle": [1, 3]}, {"weights": weights}, "head 0.0")
    (axes,) = figure.axes
    (lines,) = axes.collections
    assert isinstance(lines, LineCollection)
    assert [tuple(top) for _, top in lines.get_segments()] == list(enumerate(weights[-1].tolist()))
    (place,) = axes.patches
    assert [*place.get_extents().transformed(axes.transData.inverted()).intervalx] == pytest.approx([1, 3])


def test_the_code_on_the_page_runs():
    template = (Path(examples.__file__).parents[1] / "report/pages/templates/tour.html").read_text(encoding="utf-8")
    code = re.search(r"<pre>(import.+?)</pre>", template, re.DOTALL)
    assert code is not None
    variables: dict = {}
    exec(code[1], variables)
    assert variables["out"].shape == (1, 8, 1024, 64)


def test_bars_print_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    output = io.StringIO()
    with progress.Bars(Console(file=output), "{task.percentage:>3.0f} %") as bars:
        for done in range(9):
            bars.show("model", "[a] model", done, 10, "some text")
        lines = output.getvalue().splitlines()
    assert 1 < len(lines) < 5
    assert all(re.fullmatch(r"\[a\] model: \d0 % some text", line) for line in lines)


def test_bars_show_the_remaining_time_once_the_pace_is_known():
    now = 0.0
    bars = progress.Bars(Console(file=io.StringIO(), get_time=lambda: now))

    def left(key: str, seconds: float, done: float) -> str:
        nonlocal now
        now = seconds
        bars.show(key, key, done, 100)
        return progress.RemainingTime().render(bars.tasks[-1]).plain

    assert [left("short", 5 * done, done) for done in range(5)] == ["-:--:--"] * 5
    assert left("short", 25, 5) == "0:07:55"  # 95 % at 1 % in 5 seconds
    assert [left("long", 30 + 20 * done, done / 4) for done in range(3)] == ["-:--:--"] * 3
    assert left("long", 90, 0.75) == "2:12:20"  # 99.25 % at 0.25 % in 20 seconds
