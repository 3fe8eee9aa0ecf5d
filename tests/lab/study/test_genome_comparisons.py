"""A comparison on a genome with repeats, from the FASTA file to the completion of its end."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import carry_out, write_genome
from rich.console import Console

from attention_priors.lab.report import write_report
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
    completions = results["completion"]
    assert [*zip(completions.scheme, completions.pieces, completions.continuations, strict=True)] == [
        ("ALiBi", 3, 2),
        ("NoPE", 3, 2),
    ]
    assert completions.identity.between(0.1, 0.5).all()
    assert completions.chance.tolist() == pytest.approx([0.25, 0.25], abs=0.02)
    # Bases are almost uniform, and the model has learned almost nothing.
    assert (results["perplexity"].nll < 2 * math.log(4)).all()
    page = write_report(results, folder).read_text(encoding="utf-8")
    assert "Genome continuations" in page
    assert "Bits per base" in page
    assert "Perplexity" not in page
    table = (folder / "tables" / "completions.md").read_text(encoding="utf-8")
    assert f"| going on: 3 pieces of 64 tokens | ALiBi | {100 * completions.identity[0]:.1f} " in table


def test_genomes_have_no_pass_keys(genome: Path, tmp_path: Path):
    asked = recipe(genome, evaluation={"passkey": {"lengths": [64], "depths": 2}})
    with pytest.raises(RecipeError, match="cannot write '12345'"):
        compare(Recipe.model_validate(asked), tmp_path / "out", console=Console(file=io.StringIO()))
