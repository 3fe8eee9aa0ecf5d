"""The table of pass keys for the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from attention_priors.lab.report.numbers import multiple, percent
from attention_priors.lab.report.selections.passkeys import PasskeyCell, best_shares, passkey_table
from attention_priors.lab.report.selections.results import Results, common_training_length, scheme_names


def render_text_table(results: Results) -> Table:
    """The share of pass keys retrieved, in percent: schemes as rows, lengths as columns, the best bold."""
    cells = passkey_table(results)
    by_place = {(cell.scheme, cell.length): cell for cell in cells}
    lengths = sorted({cell.length for cell in cells})
    best = best_shares(cells)
    table = Table(title="Pass keys retrieved, % of trials", caption=_caption(cells), caption_justify="left")
    trained = common_training_length(results)
    table.add_column("scheme\n× training length" if trained else "scheme")
    for length in lengths:
        ratio = f"\n{multiple(length / trained)}×" if trained else ""
        table.add_column(f"{length}{ratio}", justify="right", no_wrap=True)
    for scheme in scheme_names(results):
        line = [Text(scheme)]
        for length in lengths:
            cell = by_place.get((scheme, length))
            if cell is None:
                line.append(Text("–"))
            else:
                is_best = cell.complete and cell.share == best.get(length)
                mark = "" if cell.complete else "†"
                line.append(Text(percent(cell.share) + mark, style="bold" if is_best else ""))
        table.add_row(*line)
    return table


def _caption(cells: list[PasskeyCell]) -> str:
    if not cells:
        return "no pass keys were asked for"
    notes = ["columns: context length in tokens; –: not evaluated"]
    if not all(cell.complete for cell in cells):
        notes.append("†: without the seeds that had stopped")
    return "; ".join(notes)
