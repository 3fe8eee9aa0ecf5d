"""The tables of a comparison, with intervals over texts and over seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attention_priors.lab.report.selections.results import Results, check_results
from attention_priors.lab.report.tables.axes import axis_grid, extension_grid
from attention_priors.lab.report.tables.grid import Grid, write_grids
from attention_priors.lab.report.tables.heads import head_count_grid, prior_mass_grid, prior_reach_grid
from attention_priors.lab.report.tables.losses import completion_grid, copying_grid, loss_grid, perplexity_grid
from attention_priors.lab.report.tables.runs import timing_grid, training_grid
from attention_priors.lab.report.tables.scores import (
    answer_token_grid,
    needle_weight_grid,
    passkey_grid,
    retrieval_grid,
)


def result_grids(results: Results) -> Iterator[Grid]:
    """Every table that the results have data for."""
    return (grid for grid in _grids(results) if grid.groups)


def _grids(results: Results) -> Iterator[Grid]:
    """Every table; those that the results have no data for have no lines."""
    check_results(results)
    makers = (
        passkey_grid, perplexity_grid, copying_grid, retrieval_grid, answer_token_grid, loss_grid, completion_grid,
        needle_weight_grid, timing_grid, axis_grid, extension_grid, head_count_grid, prior_mass_grid,
        prior_reach_grid, training_grid,
    )  # fmt: skip
    for make in makers:
        yield make(results)


def write_tables(results: Results, folder: Path) -> list[Path]:
    """Write every table that the results have data for, as Markdown and as LaTeX.

    Those that an earlier call has left and the results have no data for are removed.

    Args:
        results: A results dictionary.
        folder: Where to; made if it is not there.

    Returns:
        The files.

    Raises:
        ValueError: ``results`` is of an unknown format, or one of its rows names an unknown scheme.
    """
    return write_grids(_grids(results), Path(folder))
