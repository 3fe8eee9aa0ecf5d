"""Losses on genomes are shown in bits per base, where those on text are perplexities."""

import math

import numpy as np
import pytest
from synthetic_results import SEEDS

from attention_priors.lab.data import NUCLEOTIDES
from attention_priors.lab.report import write_report
from attention_priors.lab.report.figures import comparison, gallery
from attention_priors.lab.report.figures.gallery import illustrations
from attention_priors.lab.report.selections.plans import loss_views
from attention_priors.lab.report.tables.comparison import result_grids
from attention_priors.lab.report.tables.grid import markdown
from html_pages import Page

SCHEME = "BAM <SSMax>"


@pytest.fixture
def genome(results, monkeypatch):
    """Results of models of a genome: losses about 2 bits, by position and of a plan."""
    monkeypatch.setattr(gallery, "png", lambda _: b"\x89PNG")
    results["recipe"]["tokenizer"] = NUCLEOTIDES
    results["passkey"] = results["priors"] = results["logit_scales"] = []
    for place, row in enumerate(results["perplexity"]):
        row["nll"] = math.log(4) * (0.9 + place / 1000)
    results["losses"] = [
        row | {"plan": "held out", "task": "perplexity_windows", "length": 512} for row in results["perplexity"]
    ]
    return results


def mean_bits(rows: list[dict]) -> float:
    """Over the seeds' means over tokens."""
    of_seeds = []
    for seed in SEEDS:
        mine = [row for row in rows if (row["scheme"], row["seed"]) == (SCHEME, seed)]
        of_seeds.append(np.average([row["nll"] for row in mine], weights=[row["tokens"] for row in mine]))
    return float(np.mean(of_seeds)) / math.log(2)


def test_a_figure_shows_bits_on_a_linear_axis(genome):
    axes = comparison.perplexity_by_position(genome).axes[0]
    curves = {line.get_label(): np.array(line.get_data()).T for line in axes.lines if line.get_marker() != "None"}
    for position, bits in curves[SCHEME]:
        assert bits == pytest.approx(mean_bits([row for row in genome["perplexity"] if row["position"] == position]))
    assert axes.get_yscale() == "linear"
    assert axes.get_ylabel().startswith("bits per base")
    # Differences of hundredths of a bit are what there is to see.
    shown = np.concatenate([curve[:, 1] for curve in curves.values()])
    low, high = axes.get_ylim()
    assert low < shown.min() < shown.max() < high
    assert high - low < 1.5 * (shown.max() - shown.min())


def test_a_model_that_is_lost_squashes_nobody(genome):
    lost = genome["perplexity"][0]
    lost["nll"] = 50.0
    axes = comparison.perplexity_by_position(genome).axes[0]
    assert axes.get_ylim()[1] < 6
    assert f"{lost['scheme']} (up to" in axes.get_title(loc="left")


def test_tables_say_bits(genome):
    grids = {grid.stem: grid for grid in result_grids(genome)}
    for stem in ("perplexity", "losses"):
        assert "Bits per base" in grids[stem].caption
        assert "erplexity" not in grids[stem].caption
    row = next(line for line in markdown(grids["losses"]).splitlines() if "SSMax" in line)
    assert f"| {mean_bits(genome['losses']):.3f} [" in row
    assert [view.measure for view in loss_views(genome)] == ["bits per base"]


def test_a_page_says_bits(genome, tmp_path):
    drawn = [*illustrations(genome)]
    assert [one.alt for one in drawn if one.kind == "losses"] == [
        "Bits per base by scheme: held out: perplexity_windows, texts of 512 tokens."
    ]
    write_report(genome, tmp_path / "report.html", drawn)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "fewest bits per base: 1." in page.text
    assert "a fair die with four sides" in page.text
    assert "Bits per base in numbers" in page.text
    assert "Perplexity" not in page.text.replace("perplexity_windows", "")
