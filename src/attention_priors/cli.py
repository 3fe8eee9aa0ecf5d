"""The command line: ``attention-priors compare RECIPE.yaml``."""

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


def main() -> None:
    """Run the command line."""
    app()
