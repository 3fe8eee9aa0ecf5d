"""Benchmarks of ``attend()`` against plain attention, dense formulas and other packages: time and memory."""

from attention_priors.lab.bench.figures import write_figures
from attention_priors.lab.bench.run import BenchRecipe, bench, load_bench_recipe, make_bench_recipe
from attention_priors.lab.bench.tables import failures, markdown_tables, tables
from attention_priors.lab.bench.ways import WAYS

__all__ = [
    "WAYS",
    "BenchRecipe",
    "bench",
    "failures",
    "load_bench_recipe",
    "make_bench_recipe",
    "markdown_tables",
    "tables",
    "write_figures",
]
