"""``attend()`` beside attention without a prior, the dense formulas and other people's code: time and memory."""

from attention_priors.benchmark.case import DTYPES, PASSES
from attention_priors.benchmark.figures import write_figures
from attention_priors.benchmark.recipe import BenchRecipe, load_bench_recipe, make_bench_recipe
from attention_priors.benchmark.run import bench
from attention_priors.benchmark.tables import markdown_tables, render_text_tables
from attention_priors.benchmark.ways import WAYS

__all__ = [
    "DTYPES",
    "PASSES",
    "WAYS",
    "BenchRecipe",
    "bench",
    "load_bench_recipe",
    "make_bench_recipe",
    "markdown_tables",
    "render_text_tables",
    "write_figures",
]
