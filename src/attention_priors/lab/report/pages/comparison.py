"""The report of a comparison: one HTML file that holds everything it shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from attention_priors._io import write_bytes
from attention_priors.lab.report.figures.drawing import DEPTH_OF_CUT
from attention_priors.lab.report.figures.gallery import Illustration, illustrations
from attention_priors.lab.report.figures.style import looks
from attention_priors.lab.report.pages.rendering import embedded_figure, render
from attention_priors.lab.report.pages.summary import summarize
from attention_priors.lab.report.selections.losses import loss_measure
from attention_priors.lab.report.selections.passkeys import best_shares, passkey_table
from attention_priors.lab.report.selections.results import (
    Results,
    check_results,
    common_training_length,
    rows,
    scheme_names,
)
from attention_priors.lab.report.tables.comparison import result_grids
from attention_priors.lab.report.tables.heads import head_table


def write_report(results: Results, path: Path, drawn: Iterable[Illustration] | None = None) -> None:
    """Write the report as one HTML file that needs no other file and no network.

    Args:
        results: A results dictionary.
        path: The file; its folder is made if it is not there.
        drawn: The results' :func:`illustrations`, if they are at hand: drawing them is what takes the time.

    Raises:
        ValueError: ``results`` is of an unknown format, lacks the training length, or one of its rows names
            an unknown scheme.
    """
    check_results(results)
    write_bytes(Path(path), _render(results, illustrations(results) if drawn is None else drawn).encode())


def _render(results: Results, drawn: Iterable[Illustration]) -> str:
    cells = passkey_table(results)
    tables = {scheme: head_table(results, scheme) for scheme in scheme_names(results)}
    return render(
        "comparison.html",
        results=results,
        recipe=yaml.safe_dump(results["recipe"], sort_keys=False, allow_unicode=True, width=88),
        summary=summarize(results),
        trained=common_training_length(results),
        losses=loss_measure(results),
        grids={grid.stem: grid for grid in result_grids(results)},
        lengths=sorted({cell.length for cell in cells}),
        cells={(cell.scheme, cell.length): cell for cell in cells},
        best=best_shares(cells),
        complete=all(cell.complete for cell in cells),
        runs=rows(results, "runs"),
        looks=looks(results),
        head_tables={scheme: table for scheme, table in tables.items() if table is not None},
        figures=_embedded(drawn),
        cut=DEPTH_OF_CUT,
    )


def _embedded(drawn: Iterable[Illustration]) -> dict[str, list[dict[str, Any]]]:
    """The figures by kind, as data that a page can hold."""
    embedded = defaultdict(list)
    for illustration in drawn:
        figure = embedded_figure(illustration.png, illustration.alt)
        embedded[illustration.kind].append(figure | {"scheme": illustration.scheme})
    return embedded
