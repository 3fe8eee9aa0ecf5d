"""Page of ``attention-priors tour``: how far the examples retrieve, and the heads of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention_priors._io import write_bytes
from attention_priors.lab.evaluate import Summary
from attention_priors.lab.machine import now, processor, versions
from attention_priors.lab.report.estimates import own_passkeys
from attention_priors.lab.report.figures import curves
from attention_priors.lab.report.figures import heads as drawn
from attention_priors.lab.report.figures.attention import last_weights
from attention_priors.lab.report.figures.style import png
from attention_priors.lab.report.pages import embedded_figure, render
from attention_priors.lab.report.pages.inspection import inspection_results
from attention_priors.lab.report.pages.study import reach
from attention_priors.lab.report.tables import passkey_overview
from attention_priors.lab.report.wording import percent, wording
from attention_priors.lab.results import FORMAT, Results

_WIDTH, _DOTS_PER_INCH = 4.2, 200
"""Width of a figure in inches, so that its text is legible on a phone, and resolution."""


def tour_results(summaries: Mapping[str, Summary], trained: int) -> Results:
    """Return the results of the examples as those of a study.

    Args:
        summaries: Results of each example, by scheme.
        trained: Length of the examples' training rows in tokens.
    """
    study = {"row": "study", "format": FORMAT, "recipe": {"name": "Tour", "training": {"context_length": trained}}}
    schemes = [{"row": "scheme", "scheme": scheme} for scheme in summaries]
    rows = [{"scheme": scheme, "seed": 0} | row for scheme, summary in summaries.items() for row in summary.rows]
    return Results.of([study, *schemes, *rows])


def write_tour(results: Results, inspected: str, found: Mapping[str, Any], path: Path) -> None:
    """Write the page of the tour as one HTML file that needs no other file and no network.

    Args:
        results: Results from :func:`tour_results`.
        inspected: Scheme of the inspected example.
        found: Its inspection (:func:`attention_priors.lab.inspect.inspect_model`), with attention maps.
        path: Target file; its folder is created if missing.
    """
    rows, passkey = own_passkeys(results), found["passkey"]
    of_heads = inspection_results(dict(found) | {"title": inspected})
    best = max(passkey["heads"], key=lambda row: row["needle"])
    name = f"head {best['layer']}.{best['head']}"
    shown = next(one for one in passkey["maps"] if (one["layer"], one["head"]) == (best["layer"], best["head"]))
    texts = int(rows.groupby(["scheme", "length"], observed=True).trials.sum().max())
    drawings = {
        "reach": (curves.scores_by_length(results, rows), "Pass keys retrieved against context length, by scheme"),
        "priors": (drawn.prior_curves(of_heads["prior"], inspected), "Log-prior of each head against distance"),
        "weights": (
            last_weights(passkey, shown, f"{name}, last token of the question"),
            f"Weights of {name} on a prompt with a pass key",
        ),
    }
    figures = {}
    for kind, (figure, alt) in drawings.items():
        if figure is not None:
            figure.set_figwidth(_WIDTH)
            figures[kind] = [embedded_figure(png(figure, (_DOTS_PER_INCH,)), f"{alt}.")]
    page = render(
        "tour.html", found=found, best=best | {"name": name, "share": percent(best["needle"])}, inspected=inspected,
        summary=wording("tour", reached=reach(results), trained=results.context_lengths[0]),
        table=passkey_overview(results), texts=texts,
        figures=figures,
        made={"created": now(), "processor": processor(), "versions": versions(("attention-priors", "torch"))},
    )  # fmt: skip
    write_bytes(path, page.encode())
