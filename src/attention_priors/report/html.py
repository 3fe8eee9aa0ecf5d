"""The report: one HTML file that holds everything it shows."""

from __future__ import annotations

import base64
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from attention_priors.files import write_bytes
from attention_priors.report.drawing import DEPTH_OF_CUT
from attention_priors.report.gallery import illustrations
from attention_priors.report.heads import head_table
from attention_priors.report.numbers import duration, moment, multiple, percent, quantity
from attention_priors.report.result_grids import result_grids
from attention_priors.report.results import Results, check_results, common_training_length, rows, scheme_names
from attention_priors.report.style import looks
from attention_priors.report.summary import summarize
from attention_priors.report.tables import best_shares, passkey_table


def write_report(results: Results, path: Path) -> None:
    """Write the report as one HTML file that needs no other file and no network.

    Args:
        results: A results dictionary.
        path: The file; its folder is made if it is not there.

    Raises:
        ValueError: ``results`` is of an unknown format, lacks the training length, or one of its rows names
            an unknown scheme.
    """
    check_results(results)
    write_bytes(Path(path), _render(results).encode())


def _render(results: Results) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "duration": duration,
        "moment": moment,
        "multiple": multiple,
        "percent": percent,
        "quantity": quantity,
    }
    template = environment.from_string(_template())
    cells = passkey_table(results)
    tables = {scheme: head_table(results, scheme) for scheme in scheme_names(results)}
    return template.render(
        results=results,
        recipe=yaml.safe_dump(results["recipe"], sort_keys=False, allow_unicode=True, width=88),
        summary=summarize(results),
        trained=common_training_length(results),
        grids={grid.stem: grid for grid in result_grids(results)},
        lengths=sorted({cell.length for cell in cells}),
        cells={(cell.scheme, cell.length): cell for cell in cells},
        best=best_shares(cells),
        complete=all(cell.complete for cell in cells),
        runs=rows(results, "runs"),
        looks=looks(results),
        head_tables={scheme: table for scheme, table in tables.items() if table is not None},
        figures=_embedded(results),
        cut=DEPTH_OF_CUT,
    )


def _template() -> str:
    return files("attention_priors.report").joinpath("template.html").read_text(encoding="utf-8")


def _embedded(results: Results) -> dict[str, list[dict[str, Any]]]:
    """The figures by kind, as data that a page can hold."""
    embedded = defaultdict(list)
    for illustration in illustrations(results):
        content = base64.b64encode(illustration.png()).decode()
        embedded[illustration.kind].append(
            {
                "source": f"data:image/png;base64,{content}",
                "alt": illustration.alt,
                "scheme": illustration.scheme,
            }
        )
    return embedded
