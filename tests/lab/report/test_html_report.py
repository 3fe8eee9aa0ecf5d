import base64
import os
import re

import pytest
from jinja2 import DictLoader

from attention_priors import _io
from attention_priors.lab.report import render_text_table, write_figures, write_report
from attention_priors.lab.report.figures import gallery
from attention_priors.lab.report.figures.drawing import NothingToShowError
from attention_priors.lab.report.pages import rendering
from attention_priors.lab.results_format import SECTIONS
from html_pages import Page


@pytest.fixture
def quick(results, monkeypatch):
    """Figures take seconds; where they are not what is tested, they are small and never rendered."""
    results["passkey"] = [row for row in results["passkey"] if row["depth"] in (0, 1)]
    monkeypatch.setattr(gallery, "png", lambda _: b"\x89PNG")


@pytest.fixture
def page(results, quick, tmp_path):
    write_report(results, tmp_path / "report.html")
    return Page((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_report_holds_every_scheme_number_and_figure(results, page):
    for scheme in results["schemes"]:
        assert scheme["name"] in page.text
        assert scheme["description"] in page.text
    assert page.open == []  # every tag is closed
    assert results["recipe"]["name"] in page.text
    assert "context_length: 160" in page.text
    assert "20 November 2026, 14:00 UTC" in page.text
    assert "6 min 52 s" in page.text
    assert results["runs"][0]["stopped"] in page.text
    pictures = page.all("img")
    assert len(pictures) == len(list(gallery.illustrations(results))) == 12
    assert all(picture["alt"] for picture in pictures)


def test_report_needs_nothing_from_elsewhere(page):
    for _, attributes in page.tags:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith(("data:", "#"))
    assert not page.all("script")
    assert not page.all("link")


def test_names_cannot_become_markup(results, tmp_path, quick):
    evil = '<script>alert("x")</script>'
    for section in SECTIONS:
        for row in results[section]:
            row["scheme"] = evil if row["scheme"] == "BAM" else row["scheme"]
    results["schemes"][3]["name"] = evil
    results["recipe"]["name"] = evil
    write_report(results, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not page.all("script")
    assert evil in page.text
    assert any(evil in picture["alt"] for picture in page.all("img"))


def test_pictures_are_whole(results, tmp_path):
    for section in ("perplexity", "priors", "passkey"):
        results[section] = []
    write_report(results, tmp_path / "report.html")
    (picture,) = Page((tmp_path / "report.html").read_text(encoding="utf-8")).all("img")
    (written,) = write_figures(results, tmp_path)
    head, content = picture["src"].split(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(content) == written.read_bytes()


@pytest.mark.parametrize(
    ("section", "gone"),
    [
        ("passkey", ["Finding a pass key", "Wilson"]),
        ("perplexity", ["Predicting text", "e to the mean loss"]),
        ("priors", ["Local heads and retrieval heads", "The Generalized Gaussian prior is"]),
        ("logit_scales", ["Logit scales"]),
        ("runs", ["final loss"]),
    ],
)
def test_a_missing_section_is_left_out(results, tmp_path, quick, page, section, gone):
    assert all(words in page.text for words in gone)
    del results[section]
    write_report(results, tmp_path / "report.html")
    text = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert not any(words in text for words in gone)


def test_an_empty_experiment_still_has_a_report(results, tmp_path):
    for section in SECTIONS:
        results[section] = []
    del results["recipe"]["description"]
    write_report(results, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not page.all("img")
    assert "How it was made" in page.text
    assert "NoPE" in page.text


def test_numbers_that_do_not_exist_are_dashes(results, tmp_path, quick):
    results["runs"] = [results["runs"][0] | {"final_loss": None, "train_seconds": None, "stopped": None}]
    results["priors"][-1]["parameters"]["alpha"] = float("nan")
    results["priors"][-2]["parameters"]["alpha"] = float("inf")
    write_report(results, tmp_path / "report.html")
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.search(r"<td>500</td><td>–</td>\s*<td>–</td><td>1 min 0 s</td><td class=\"words\">–</td>", source)
    assert "<td>∞</td>" in source
    assert not re.search(r"\b(nan|None|inf)\b", source)


@pytest.mark.parametrize("call", [write_report, write_figures, lambda results, _: render_text_table(results)])
def test_an_unknown_format_is_refused(results, tmp_path, call):
    results["format"] = 2
    with pytest.raises(ValueError, match=r"results\['format'\] must be 1, .*; it is 2"):
        call(results, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("section", SECTIONS)
def test_a_row_of_an_unknown_scheme_is_refused(results, tmp_path, section):
    results[section].append({"scheme": "stranger", "seed": 0})
    with pytest.raises(ValueError, match=f"{section}.*'stranger'"):
        write_report(results, tmp_path / "report.html")


@pytest.mark.parametrize("length", [None, 0, "160"])
def test_a_missing_training_length_is_named(results, tmp_path, length):
    results["recipe"]["training"]["context_length"] = length
    with pytest.raises(ValueError, match=r"context_length.*positive integer"):
        write_report(results, tmp_path / "report.html")


def test_a_failing_template_leaves_the_old_report(results, tmp_path, quick, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    template = DictLoader({"comparison.html": "{{ results.recipe.name }} {{ nowhere }}"})
    monkeypatch.setattr(rendering, "PackageLoader", lambda _: template)
    with pytest.raises(Exception, match="nowhere"):
        write_report(results, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_move_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(source, target):
        assert os.path.getsize(source) == 3  # all is written before anything is moved
        raise OSError("disk")

    monkeypatch.setattr(_io.os, "replace", fail)
    with pytest.raises(OSError, match="disk"):
        _io.write_bytes(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_bug_in_a_figure_is_not_taken_for_missing_data(results, monkeypatch):
    def broken(results):
        raise ValueError("a bug")

    monkeypatch.setattr(gallery.comparison, "passkey_by_length", broken)
    with pytest.raises(ValueError, match="a bug") as caught:
        list(gallery.illustrations(results))
    assert caught.type is not NothingToShowError
