"""Report of a study, or the tables and figures of a hand-written page about it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from attention_priors._io import write_bytes
from attention_priors.lab.report.estimates import by_scheme, loss_measure, own_passkeys, shares_by_length
from attention_priors.lab.report.figures import illustrations, write_pngs
from attention_priors.lab.report.figures.scales import DEPTH_OF_CUT
from attention_priors.lab.report.figures.style import looks, png
from attention_priors.lab.report.pages import embedded_figure, render
from attention_priors.lab.report.table import Table
from attention_priors.lab.report.tables import accuracy, heads, passkey_overview, tables, write_tables
from attention_priors.lab.report.wording import percent, wording
from attention_priors.lab.results import Frame, Results

PAGE = "README.md"
"""File name of a hand-written page about results."""

HOLDS = 0.95
"""Smallest share of retrieved pass keys at which a scheme holds a length."""

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_MARK = re.compile(r"<!-- (table: [\w-]+|end of table) -->")
_FIGURE = re.compile(r"\(figures/([^()/]+)\.png\)")


class MissingDataError(ValueError):
    """Error for a page with tables or figures for which its results have no data.

    Attributes:
        page: Path of the page.
    """

    def __init__(self, page: Path, names: Iterable[str]) -> None:
        super().__init__(f"{page} shows tables or figures, but its results have no data for: {', '.join(names)}")
        self.page = page


def write_report(results: Results, folder: Path) -> Path:
    """Redraw the figures and tables of a study.

    If the folder has a hand-written page ``README.md`` with tables or figures of the study, only these are updated. A
    table is enclosed by the lines ``<!-- table: NAME -->`` and ``<!-- end of table -->``. A figure is an image
    ``figures/NAME.png``. Otherwise, everything with data is written to ``tables``, ``figures`` and ``report.html``,
    which needs no other file and no network.

    Args:
        results: Results of the study.
        folder: Folder of the study.

    Returns:
        Path of the page.

    Raises:
        ValueError: a mark on the page lacks its counterpart.
        MissingDataError: the page has tables or figures without data; all others were updated.
    """
    page = folder / PAGE
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if _MARK.search(text) or _FIGURE.search(text):
        _refresh(results, page, text)
        return page
    page, made = folder / "report.html", tables(results)
    drawn = [(one, png(figure)) for one in illustrations(results) if (figure := one.draw())]
    write_pngs([(one.stem, content) for one, content in drawn], folder / "figures")
    write_tables(made, folder / "tables")
    figures: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one, content in drawn:
        figures[one.kind].append(embedded_figure(content, one.alt) | {"scheme": one.scheme})
    recipe = yaml.safe_dump(results.study["recipe"], sort_keys=False, allow_unicode=True, width=88)
    rendered = render(
        "study.html", study=results.study, schemes=results.schemes, recipe=recipe, summary=summarize(results),
        trained=results.context_lengths, losses=loss_measure(results), overview=passkey_overview(results),
        tables={name: table for name, table in made.items() if table.lines}, looks=looks(results), figures=figures,
        head_tables={name: heads(own) for name, own in by_scheme(results["prior"])}, cut=DEPTH_OF_CUT,
    )  # fmt: skip
    write_bytes(page, rendered.encode())
    return page


def _refresh(results: Results, page: Path, text: str) -> None:
    """Update the tables and figures of a page, and leave its text unchanged."""
    if len(_MARK.findall(text)) != 2 * len(_TABLE.findall(text)):
        raise ValueError(f"{page}: each '<!-- table: NAME -->' must be followed by one '<!-- end of table -->'")
    asked, shown = [name for _, name, _ in _TABLE.findall(text)], dict.fromkeys(_FIGURE.findall(text))
    made = tables(results, asked)
    drawn = {one.stem: figure for one in illustrations(results) if one.stem in shown and (figure := one.draw())}
    missing = [name for name in asked if name not in made or not made[name].lines]
    missing += [stem for stem in shown if stem not in drawn]
    fresh = _TABLE.sub(
        lambda match: match[0] if match[2] in missing else f"{match[1]}\n{made[match[2]].markdown()}\n{match[3]}", text
    )
    if fresh != text:
        write_bytes(page, fresh.encode())
    write_pngs([(stem, png(figure)) for stem, figure in drawn.items()], page.parent / "figures")
    if missing:
        raise MissingDataError(page, missing)


def overview_table(results: Results) -> Table:
    """Return the most important table of a study; its lines are empty without data."""
    return accuracy(results) if results.of_images else passkey_overview(results)


def reach(results: Results) -> list[dict[str, Any]]:
    """Return the longest length that each scheme with pass keys holds.

    Lengths at which some seeds were not evaluated do not count.

    Returns:
        For each scheme, ``scheme``, ``length`` and ``dip``. ``length`` is the longest length that the scheme holds, or
        0. ``dip`` describes the worst shorter length that the scheme does not hold, or is empty.
    """
    reached = []
    for name, cells in by_scheme(shares_by_length(own_passkeys(results))):
        cells = cells[cells.complete]
        length = cells.length[cells.share >= HOLDS].max() if (cells.share >= HOLDS).any() else 0
        before = cells[(cells.length < length) & (cells.share < HOLDS)].sort_values("share", kind="stable")
        dips = [f"{name} only {percent(dip.share)} % at {dip.length} tokens" for dip in before.itertuples()]
        reached.append({"scheme": name, "length": length, "dip": next(iter(dips), "")})
    return reached


def summarize(results: Results) -> str:
    """Summarize the comparison and the length that each scheme holds."""
    if results.of_images:
        return wording("study_of_images")
    measure, texts, reached = loss_measure(results), results["perplexity"], reach(results)
    seeds = sorted(own.seed.nunique() for _, own in by_scheme(results["run"])) or [len(results.study["seeds"])]
    curves = [measure.by_position(own).assign(scheme=name) for name, own in by_scheme(texts[texts.plan.isna()])]
    points: Frame = pd.concat(curves) if curves else pd.DataFrame(columns=["x", "mean"])
    farthest = points[points.x == points.x.max()].sort_values("mean", kind="stable")
    return wording(
        "study", names=results.names, trained=results.context_lengths, seeds=seeds, reached=reached,
        lengths=sorted(own_passkeys(results).length.unique()), holds=f"{100 * HOLDS:.0f}", measure=measure,
        missing=[name for name in results.names if name not in [one["scheme"] for one in reached]],
        best=None if farthest.empty else dict(farthest.iloc[0]),
    )  # fmt: skip
