"""The page of a comparison of classifiers of images, and the figures and tables on it as files."""

from __future__ import annotations

from pathlib import Path

import yaml

from attention_priors._io import write_bytes
from attention_priors.lab.report.figures.files import write_pngs
from attention_priors.lab.report.figures.images import accuracy_by_size, prior_maps
from attention_priors.lab.report.figures.style import png
from attention_priors.lab.report.pages.rendering import embedded_figure, render
from attention_priors.lab.report.selections.images import maps_of_first_seed
from attention_priors.lab.report.selections.results import Results
from attention_priors.lab.report.tables.grid import write_grids
from attention_priors.lab.report.tables.images import accuracy_grid, image_training_grid

_NAMES = "accuracy_by_size|prior_maps_.+"
"""Of figures' files, without the ending."""


def write_image_results(results: Results, folder: Path) -> Path:
    """Write ``report.html``, and every figure and table under ``figures`` and ``tables``.

    Figures that an earlier call has left are removed.

    Args:
        results: of classifiers of images.
        folder: the comparison's.

    Returns:
        The page.
    """
    words = "Share of images classified right against their size."
    figures = {"accuracy_by_size": (png(accuracy_by_size(results)), words)}
    for place, entry in enumerate(results["schemes"], start=1):
        if maps_of_first_seed(results, entry["name"]):
            words = f"What the prior of each head says around the middle patch: {entry['name']}."
            figures[f"prior_maps_{place:02d}"] = (png(prior_maps(results, entry["name"])), words)
    write_pngs(((stem, drawing) for stem, (drawing, _) in figures.items()), folder / "figures", _NAMES)
    grids = [accuracy_grid(results), image_training_grid(results)]
    write_grids(grids, folder / "tables")
    page = folder / "report.html"
    recipe = yaml.safe_dump(results["recipe"], sort_keys=False, allow_unicode=True, width=88)
    shown = [embedded_figure(drawing, words) for drawing, words in figures.values()]
    write_bytes(page, render("images.html", results=results, recipe=recipe, figures=shown, grids=grids).encode())
    return page
