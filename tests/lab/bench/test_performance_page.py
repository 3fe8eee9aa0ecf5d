"""The numbers of docs/performance.md are in the results that it links to."""

import json
import re
from pathlib import Path

from attention_priors.lab.bench import markdown_tables
from attention_priors.lab.bench import tables as tables_of

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "performance.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\((benchmarks/[\w-]+)(?:/table\.md|\.json)\)")


def tables() -> list[tuple[str, list[list[str]]]]:
    """Return the rows of each table of the page that shows times or memory, with the last linked folder."""
    found: list[tuple[str, list[list[str]]]] = []
    folder, inside = "", False
    for line in PAGE.splitlines():
        folder = LINK.findall(line)[-1] if LINK.search(line) else folder
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")] if line.startswith("|") else []
        if cells and not inside:
            found.append((folder, []))
        elif cells and not line.startswith("|---"):
            found[-1][1].append(cells)
        inside = bool(cells)
    return [(folder, rows) for folder, rows in found if folder]


def pieces(text: str) -> list[str]:
    return [piece for cell in text.split(" / ") for piece in cell.split(" · ") if piece]


def measured(folder: str) -> dict[str, set[str]]:
    """Return the texts of all cells of the results' tables, by the label of the way."""
    said: dict[str, set[str]] = {}
    of_models = DOCS / f"{folder}.json"
    if of_models.exists():
        for row in json.loads(of_models.read_text(encoding="utf-8"))["results"]:
            time = row["milliseconds"]
            text = f"{time:.3g} ms" if time < 1000 else f"{time / 1000:.3g} s"
            said.setdefault(row["attached"], set()).update((text, f"{row['ratio']:.2f}×"))
        return said
    results = json.loads((DOCS / folder / "results.json").read_text(encoding="utf-8"))
    for table in tables_of(results):
        for label, *cells in table.lines:
            texts = (text for cell in cells for text in (str(cell), getattr(cell, "text", "")))
            said.setdefault(str(label), set()).update(piece for text in texts for piece in pieces(text))
    return said


def test_every_cell_is_in_the_results() -> None:
    assert len(tables()) >= 5
    for folder, rows in tables():
        said = measured(folder)
        for label, *cells in rows:
            for piece in (piece for cell in cells for piece in pieces(cell)):
                assert piece in said[label], (folder, label, piece)


def test_tables_match_their_results() -> None:
    folders = sorted(path.parent for path in (DOCS / "benchmarks").glob("*/results.json"))
    assert folders
    for folder in folders:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        assert (folder / "table.md").read_text(encoding="utf-8") == markdown_tables(results), folder.name
