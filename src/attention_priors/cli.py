"""The command line: ``attention-priors compare RECIPE.yaml`` and ``attention-priors bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ModuleNotFoundError as error:  # the laboratory is an extra
    sys.exit(f"attention-priors: {error.name} is missing; the command needs: pip install 'attention-priors[lab]'")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """Attention with positional priors: train short, test long, see what each head learned."""


@app.command()
def compare(
    recipe: Annotated[Path, typer.Argument(help="A recipe: what to train and what to test.")],
    output: Annotated[
        Path | None, typer.Option(help="Where everything goes; runs/NAME-OF-THE-RECIPE by default.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run this scheme alone; may be given more than once.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; by default as many as there are cores for.")
    ] = None,
) -> None:
    """Train every scheme of a recipe, test it far past its training length, and write a report.

    Interrupt it when you like: the same command goes on from there.
    """
    console = Console()
    # The laboratory is imported here: it takes seconds, and --help should not.
    from attention_priors import experiments, report

    output = output or Path("runs") / recipe.stem
    try:
        results = experiments.compare(
            experiments.load_recipe(recipe), output, only=only or (), processes=processes, console=console
        )
        report.write_figures(results, output / "figures")
        page = output / "report.html"
        report.write_report(results, page)
    except KeyboardInterrupt:
        console.print("\nInterrupted. What is done is kept; the same command goes on from here.")
        raise typer.Exit(130) from None
    except (ValueError, OSError, experiments.RunFailedError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(report.render_text_table(results))
    console.print(f"Report: {escape(str(page))}", soft_wrap=True, highlight=False)


@app.command()
def bench(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe, instead of the options below but --output and --memory-limit.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens, with commas between; 512,1024 by default.")] = None,
    passes: Annotated[
        str | None, typer.Option(help="Of forward, forward+backward, decode; with commas between; all by default.")
    ] = None,
    ways: Annotated[
        str | None, typer.Option(help="Contenders, with commas between; all by default. --ways list shows them.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's choice by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default), cuda or cuda:N.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences; 1 by default.")] = None,
    heads: Annotated[int | None, typer.Option(help="8 by default.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="64 by default.")] = None,
    repetitions: Annotated[int | None, typer.Option(help="3 by default; more for figures to be quoted.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of inputs and of the order of runs; 0 by default.")] = None,
    memory_limit: Annotated[
        float | None, typer.Option(min=0.0, help="GiB that a case may take; nine tenths of what is free by default.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where everything goes; runs/NAME by default.")] = None,
) -> None:
    """Measure time and memory of attend() beside attention without a prior, dense formulas and other packages.

    Interrupt it when you like: the same command goes on from there. More lengths, passes and ways may be added to
    the same output.
    """
    console = Console()
    from attention_priors import benchmark
    from attention_priors.files import write_bytes

    if ways is not None and ways.strip() == "list":
        for way in benchmark.WAYS.values():
            console.print(f"[bold]{way.name}[/]: {escape(way.label)}. {escape(way.times)}", highlight=False)
        return
    options = {
        "lengths": None if lengths is None else _split(lengths),
        "passes": None if passes is None else _split(passes),
        "ways": None if ways is None else _split(ways),
        "threads": threads,
        "dtype": dtype,
        "device": device,
        "batch": batch,
        "heads": heads,
        "head_dim": head_dim,
        "repetitions": repetitions,
        "seed": seed,
    }
    given = {name: value for name, value in options.items() if value is not None}
    try:
        if recipe is None:
            plan = benchmark.make_bench_recipe(**{"lengths": ["512", "1024"], "repetitions": 3} | given)
        elif given:
            raise ValueError(
                f"with a recipe, {', '.join('--' + name.replace('_', '-') for name in given)} stands in it"
            )
        else:
            plan = benchmark.load_bench_recipe(recipe)
        output = output or Path("runs") / plan.name
        results = benchmark.bench(plan, output, memory_limit=memory_limit, console=console)
        table = output / "table.md"
        write_bytes(table, benchmark.markdown_tables(results).encode())
        benchmark.write_figures(results, output / "figures")
    except KeyboardInterrupt:
        console.print("\nInterrupted. What is done is kept; the same command goes on from here.")
        raise typer.Exit(130) from None
    except (ValueError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    for part in benchmark.render_text_tables(results):
        console.print(escape(part) if isinstance(part, str) else part, highlight=False)
    console.print(f"Tables: {escape(str(table))}", soft_wrap=True, highlight=False)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def main() -> None:
    """Run the command line."""
    app()
