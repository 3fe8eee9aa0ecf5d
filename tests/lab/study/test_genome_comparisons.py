"""A comparison on a genome with repeats: from a FASTA file to what models make of its end."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import carry_out, write_genome
from rich.console import Console

from attention_priors.lab.report import write_report, write_tables
from attention_priors.lab.study import Recipe, RecipeError, compare


def recipe(genome: Path, **changes: Any) -> dict[str, Any]:
    plan = {"tasks": ["genome_completion"], "lengths": [64], "trials": 2, "documents": 3, "corpus": str(genome)}
    return {
        "name": "genome",
        "corpus": {"source": str(genome)},
        "tokenizer": "nucleotides",
        "model": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
        "training": {"context_length": 32, "steps": 3, "batch_size": 2, "learning_rate": 0.01},
        "evaluation": {"perplexity": {"length": 128, "documents": 1}, "plans": {"going on": plan}},
        "schemes": {"ALiBi": {"prior": "laplace"}, "NoPE": {}},
    } | changes


@pytest.fixture
def genome(tmp_path: Path) -> Path:
    return write_genome(tmp_path / "genome.fa")


def test_schemes_are_compared_on_a_genome(genome: Path, tmp_path: Path):
    folder = tmp_path / "out"
    results = carry_out(Recipe.model_validate(recipe(genome)), folder)
    assert [(row["scheme"], row["pieces"], row["continuations"]) for row in results["completions"]] == [
        ("ALiBi", 3, 2),
        ("NoPE", 3, 2),
    ]
    for row in results["completions"]:
        assert 0.1 < row["identity"] < 0.5
        assert row["chance"] == pytest.approx(0.25, abs=0.02)
    # Bases that are next to even, and a model that has learned next to nothing.
    assert {row["nll"] for row in results["perplexity"]}
    assert all(row["nll"] < 2 * math.log(4) for row in results["perplexity"])
    write_report(results, folder / "report.html", [])
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "How genomes go on" in page
    assert "Bits per base" in page
    assert "Perplexity" not in page
    table = next(path for path in write_tables(results, folder) if path.name == "completions.md").read_text()
    first = results["completions"][0]
    assert f"| going on: 3 pieces of 64 tokens | ALiBi | {100 * first['identity']:.1f} " in table


def test_genomes_have_no_pass_keys(genome: Path, tmp_path: Path):
    asked = recipe(genome, evaluation={"passkey": {"lengths": [64], "depths": 2}})
    with pytest.raises(RecipeError, match="cannot write '12345'"):
        compare(Recipe.model_validate(asked), tmp_path / "out", console=Console(file=io.StringIO()))
