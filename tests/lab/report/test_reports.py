"""Reports of studies, and hand-written pages about studies."""

import base64
import copy
import os
import re
from pathlib import Path

import pytest
from jinja2 import DictLoader
from study_rows import Rows, asked_row, study
from typer.testing import CliRunner

from attention_priors import _io
from attention_priors.lab import report
from attention_priors.lab.cli import app
from attention_priors.lab.report import overview_table, pages, write_report
from attention_priors.lab.report.figures import illustrations
from attention_priors.lab.report.pages import study as page_of_study
from attention_priors.lab.report.pages.study import reach, summarize
from attention_priors.lab.report.tables import tables
from attention_priors.lab.results import write_rows
from html_pages import Page


@pytest.fixture
def quick(rows):
    """Keep rows of few cells of heatmaps, because figures of many cells take long."""
    rows[:] = [row for row in rows if row["row"] != "retrieval" or row["depth"] in (0, 1)]


@pytest.fixture
def few(quick, one_of_each):
    """Use few rows and figures in tests of other things."""


@pytest.fixture
def one_of_each(monkeypatch):
    """Make one figure of each kind."""
    monkeypatch.setattr(
        page_of_study, "illustrations", lambda rows: {one.kind: one for one in illustrations(rows)}.values()
    )


def written(rows: Rows, folder: Path) -> Page:
    return Page(write_report(rows.results(), folder).read_text(encoding="utf-8"))


def test_a_report_holds_every_scheme_number_and_figure(rows, quick, tmp_path):
    page = written(rows, tmp_path)
    for scheme in rows.of("scheme"):
        assert scheme["scheme"] in page.text
        assert scheme["description"] in page.text
    assert page.open == []  # every tag is closed
    for words in (rows[0]["recipe"]["name"], "context_length: 160", "20 November 2026, 14:00 UTC", "6 min 52 s"):
        assert words in page.text
    assert rows.of("run")[0]["stopped"] in page.text
    pictures = page.all("img")
    stems = {one.stem for one in illustrations(rows.results()) if one.draw() is not None}
    assert len(pictures) == len(stems) == 12
    assert all(picture["alt"] for picture in pictures)
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == stems
    assert (tmp_path / "tables" / "passkey.md").read_text(encoding="utf-8") == tables(rows.results())[
        "passkey"
    ].markdown()
    # The page loads nothing from elsewhere.
    for _, attributes in page.tags:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith(("data:", "#"))
    assert not page.all("script")
    assert not page.all("link")


def test_pictures_are_embedded_in_full(rows, tmp_path, drawn):
    for kind in ("perplexity", "prior", "retrieval"):
        rows.put(kind, [])
    (picture,) = written(rows, tmp_path).all("img")
    head, content = picture["src"].split(",")
    assert head == "data:image/png;base64"
    (file,) = (tmp_path / "figures").iterdir()
    assert base64.b64decode(content) == file.read_bytes()


def test_names_are_escaped(rows, quick, tmp_path):
    evil = '<script>alert("x")</script>'
    for row in rows:
        row |= {"scheme": evil} if row.get("scheme") == "BAM" else {}
    rows[0]["recipe"]["name"] = evil
    page = written(rows, tmp_path)
    assert not page.all("script")
    assert evil in page.text
    assert any(evil in picture["alt"] for picture in page.all("img"))


def test_missing_results_are_omitted(rows, few, tmp_path):
    whole = written(rows, tmp_path).text
    for kind, gone in {
        "retrieval": ["Passkey retrieval", "Wilson"],
        "perplexity": ["Language modelling", "e to the mean loss"],
        "prior": ["Clusters of heads", "The Generalized Gaussian prior is"],
        "logit_scale": ["Logit scales"],
        "run": ["Final loss"],
    }.items():
        text = written(copy.deepcopy(rows).put(kind, []), tmp_path).text
        assert [words for words in gone if words not in whole] == [], kind
        assert [words for words in gone if words in text] == [], kind


def test_empty_studies_have_a_report(tmp_path):
    page = written(study({}, ["NoPE"]), tmp_path)
    assert not page.all("img")
    assert "Setup" in page.text
    assert not (tmp_path / "tables").exists()


def test_a_report_of_a_sweep_has_axes_and_extensions(swept, one_of_each, tmp_path):
    text = written(swept, tmp_path).text
    for words in ("Comparisons along axes", "Context extension", "another prior", "Student"):
        assert words in text
    assert "× training length" not in text  # training lengths differ, so multiples of one length do not exist


def test_missing_numbers_are_dashes(rows, few, tmp_path):
    rows.put("run", [rows.of("run")[0] | {"final_loss": None, "train_seconds": None, "stopped": None}])
    rows.of("prior")[-1]["parameters"]["alpha"] = None
    source = write_report(rows.results(), tmp_path).read_text(encoding="utf-8")
    line = source[source.rindex("NoPE</td>") :]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", line)[:6] == ["0", "500", "–", "–", "1 min 0 s", "–"]
    assert not re.search(r"\b(nan|None|inf)\b", Page(source).text)


def test_a_failing_template_keeps_the_old_report(rows, few, tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("old")
    template = DictLoader({"study.html": "{{ study.recipe.name }} {{ nowhere }}"})
    monkeypatch.setattr(pages, "PackageLoader", lambda _: template)
    with pytest.raises(Exception, match="nowhere"):
        write_report(rows.results(), tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_failing_move_keeps_the_old_file_only(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(source, target):
        assert os.path.getsize(source) == 3  # everything is written before anything is moved
        raise OSError("disk")

    monkeypatch.setattr(_io.os, "replace", fail)
    with pytest.raises(OSError, match="disk"):
        _io.write_bytes(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# ---- the summary


def asked(scheme, length, correct, seed=0) -> dict:
    return {"scheme": scheme, "seed": seed} | asked_row(length, 0.5, correct, trials=20)


def test_the_summary_names_the_reach_of_each_scheme(rows):
    rows.put("retrieval", [
        *(asked("BAM", length, correct) for length, correct in ((64, 18), (128, 12), (256, 19), (512, 18))),
        *(asked("NoPE", length, correct) for length, correct in ((64, 20), (128, 18))),
        asked("RoPE", 64, 5),
    ])  # fmt: skip
    found = {one["scheme"]: (one["length"], one["dip"]) for one in reach(rows.results())}
    assert found == {"NoPE": (64, ""), "RoPE": (0, ""), "BAM": (256, "BAM only 60 % at 128 tokens")}
    text = summarize(rows.results())
    assert (
        "BAM found at least 95 % of the keys in texts of up to 256 tokens, 1.6× the training length "
        "(but BAM only 60 % at 128 tokens). NoPE found"
    ) in text
    assert "RoPE did not find 95 % of the keys at any length." in text
    assert "Pass keys were not evaluated for ALiBi and BAM <SSMax>." in text


def test_lengths_without_all_seeds_do_not_count(rows):
    rows.put("retrieval", [asked("BAM", 64, 20), asked("BAM", 64, 20, seed=1), asked("BAM", 128, 20)])
    assert [one["length"] for one in reach(rows.results())] == [64]


def test_the_summary_names_the_best_perplexity_at_the_end(rows):
    end = max(row["position"] for row in rows.of("perplexity"))
    for row in rows.of("perplexity", position=end):
        row["nll"] = 2.5 if row["scheme"] == "ALiBi" else 3.8
    assert "ALiBi has the lowest perplexity: 12.2." in summarize(rows.results())


def test_the_summary_counts_seeds_and_schemes(rows):
    alone = study({}, ["NoPE"], seeds=[0])
    assert summarize(alone.results()) == "1 scheme was trained on contexts of 160 tokens, each with 1 seed."
    runs = rows.of("run")
    rows.put("run", [row for row in runs if row["seed"] == (row["scheme"] == "BAM")])
    assert "each with 1 seed." in summarize(rows.results())
    rows.put("run", [row for row in runs if row["scheme"] != "BAM" or row["seed"] == 0])
    assert "each with 1 to 2 seeds." in summarize(rows.results())


# ---- hand-written pages

PAGE = """# What came out

Words before. <!-- a comment -->

<!-- table: passkey -->
| what | stood here before |
<!-- end of table -->

![A figure](figures/logit_scale_histogram.png)

<!-- table: training -->
<!-- end of table -->

Words after.
"""


def test_hand_written_pages_keep_their_text_and_get_new_tables(rows, tmp_path):
    page = tmp_path / "README.md"
    page.write_text(PAGE, encoding="utf-8")
    (tmp_path / "figures").mkdir()
    for name in ("sink_mass.png", "photo.png"):
        (tmp_path / "figures" / name).write_bytes(b"x")
    assert write_report(rows.results(), tmp_path) == page
    passkey, training = (tables(rows.results(), [name])[name].markdown() for name in ("passkey", "training"))
    fresh = page.read_text(encoding="utf-8")
    assert fresh == (
        "# What came out\n\nWords before. <!-- a comment -->\n\n"
        f"<!-- table: passkey -->\n\n{passkey}\n<!-- end of table -->\n\n"
        "![A figure](figures/logit_scale_histogram.png)\n\n"
        f"<!-- table: training -->\n\n{training}\n<!-- end of table -->\n\nWords after.\n"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "figures"}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"logit_scale_histogram.png", "photo.png"}
    before = page.stat().st_mtime_ns
    write_report(rows.results(), tmp_path)
    assert page.stat().st_mtime_ns == before


@pytest.mark.parametrize(("kind", "name"), [("retrieval", "passkey"), ("logit_scale", "logit_scale_histogram")])
def test_tables_without_data_are_named_and_kept(rows, tmp_path, kind, name):
    (tmp_path / "README.md").write_text(PAGE, encoding="utf-8")
    with pytest.raises(ValueError, match=f"no data for: {name}$"):
        write_report(rows.put(kind, []).results(), tmp_path)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert ("| what | stood here before |" in page) == (name == "passkey")
    assert (tmp_path / "figures" / "logit_scale_histogram.png").exists() == (name == "passkey")
    assert tables(rows.results(), ["training"])["training"].markdown() in page


@pytest.mark.parametrize(
    "page",
    [
        "<!-- table: passkey -->\nwithout an end\n",
        "<!-- end of table -->\n",
        "<!-- table: passkey -->\n<!-- table: training -->\n<!-- end of table -->\n",
    ],
)
def test_unbalanced_markers_leave_the_page_unchanged(rows, tmp_path, page):
    (tmp_path / "README.md").write_text(page, encoding="utf-8")
    with pytest.raises(ValueError, match="must be followed by one"):
        write_report(rows.results(), tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == page


def test_notes_without_markers_are_not_a_page(rows, few, tmp_path):
    (tmp_path / "README.md").write_text("My notes.", encoding="utf-8")
    assert write_report(rows.results(), tmp_path).name == "report.html"


def test_the_command_redraws_folders_from_their_rows(rows, quick, tmp_path):
    for name in ("one", "two"):
        write_rows(tmp_path / name, rows)
    (tmp_path / "two" / "README.md").write_text(PAGE, encoding="utf-8")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "one"), str(tmp_path / "two")])
    assert done.exit_code == 0, done.output
    assert f"Report: {tmp_path / 'one' / 'report.html'}" in done.output.replace("\n", "")
    assert "| NoPE | texts |" in (tmp_path / "two" / "README.md").read_text(encoding="utf-8")
    failed = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert failed.exit_code == 1


def test_exported_names_exist():
    assert {name for name in report.__all__ if not hasattr(report, name)} == set()
    assert overview_table(study({}, ["NoPE"]).results()).lines == []
