"""A table before it has a form, and its two forms for people who write papers: Markdown and LaTeX."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attention_priors._io import write_bytes


class Cell(NamedTuple):
    """A number as it is written, and its interval."""

    text: str
    interval: str = ""


Line = Sequence["Cell | str"]


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        stem: Its file's name, without the ending.
        caption: What it shows, and what every number and mark in it means.
        header: One heading for each column; a line break in it is kept where there is room for one.
        groups: Lines that belong together; each line has a cell for each column.
        words: How many columns, from the first, hold words; the others hold numbers.
    """

    stem: str
    caption: str
    header: Sequence[str]
    groups: Sequence[Sequence[Line]]
    words: int


def markdown(grid: Grid) -> str:
    """The table in Markdown, its caption above it."""
    alignment = ["---" if column < grid.words else "---:" for column in range(len(grid.header))]
    lines = [[_markdown_text(heading) for heading in grid.header], alignment]
    lines += [[_markdown_cell(cell) for cell in line] for group in grid.groups for line in group]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{_markdown_text(grid.caption)}\n\n{table}\n"


def latex(grid: Grid) -> str:
    """The table in LaTeX, which needs the package booktabs and no other."""
    size = "footnotesize" if len(grid.header) <= 8 else "scriptsize"
    columns = "l" * grid.words + "r" * (len(grid.header) - grid.words)
    groups = ["".join(f"{' & '.join(map(_latex_cell, line))} \\\\\n" for line in group) for group in grid.groups]
    return "".join(
        [
            "% Needs \\usepackage{booktabs} in the preamble.\n",
            "\\begin{table}\n\\centering\n\\setlength{\\belowcaptionskip}{6pt}\n",
            f"\\caption{{{latex_text(grid.caption)}}}\n\\label{{tab:{grid.stem}}}\n",
            f"\\{size}\n\\setlength{{\\tabcolsep}}{{3pt}}\n",
            f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n",
            f"{' & '.join(map(_latex_heading, grid.header))} \\\\\n\\midrule\n",
            "\\addlinespace\n".join(groups),
            "\\bottomrule\n\\end{tabular}\n\\end{table}\n",
        ]
    )


def write_grids(grids: Iterable[Grid], folder: Path) -> list[Path]:
    """Write each table that has lines in both forms, under its ``stem``; the files.

    Those of tables without lines are removed: an earlier call may have left them.
    """
    written: list[Path] = []
    empty: list[Path] = []
    for grid in grids:
        for ending, form in (("md", markdown), ("tex", latex)):
            path = folder / f"{grid.stem}.{ending}"
            if not grid.groups:
                empty.append(path)
                continue
            write_bytes(path, form(grid).encode())
            written.append(path)
    for path in empty:
        path.unlink(missing_ok=True)
    return written


def _markdown_cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return _markdown_text(cell)
    return _markdown_text(f"{cell.text} {cell.interval}".strip())


def _markdown_text(text: str) -> str:
    escaped = "".join(f"\\{character}" if character in r"\|*_`<>$" else character for character in text)
    return " ".join(escaped.split())


def _latex_heading(heading: str) -> str:
    lines = [latex_text(line) for line in heading.split("\n")]
    stack = "\\\\".join(lines)
    return stack if len(lines) == 1 else f"\\begin{{tabular}}[b]{{@{{}}r@{{}}}}{stack}\\end{{tabular}}"


def _latex_cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return latex_text(cell)
    if not cell.interval:
        return latex_text(cell.text)
    stack = f"{latex_text(cell.text)}\\\\[-2pt]{{\\tiny {latex_text(cell.interval)}}}"
    return f"\\begin{{tabular}}[t]{{@{{}}r@{{}}}}{stack}\\end{{tabular}}"


_GREEK = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΥΦΨΩ"
"""Letters that have a command of their own."""


def _greek(letter: str) -> str:
    name = unicodedata.name(letter).split()[-1].replace("LAMDA", "LAMBDA").lower()
    return f"$\\{name if letter.islower() else name.capitalize()}$"


_LATEX = {
    **{character: f"\\{character}" for character in "{}$%&#_"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"${character}$" for character in "<>|"},
    '"': "''",
    # After the end of a line, LaTeX would take these for the argument of that end.
    **{character: f"{{{character}}}" for character in "[]*"},
    "·": r"$\cdot$",
    "–": "--",
    "—": "---",
    "−": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "→": r"$\to$",
    "†": r"$\dagger$",
    "…": r"\dots{}",
    "’": "'",
    **{letter: letter for letter in "ßæœøłÆŒØŁ"},
    **{letter: _greek(letter) for letter in _GREEK},
}

_ACCENTS = {unicodedata.lookup(f"COMBINING {name}") for name in (
    "GRAVE ACCENT", "ACUTE ACCENT", "CIRCUMFLEX ACCENT", "TILDE", "DIAERESIS", "CEDILLA", "CARON", "RING ABOVE",
)}  # fmt: skip


def latex_text(text: str) -> str:
    """Any text as LaTeX shows it as it is; a character that plain LaTeX lacks is named by its number, ``U+4E2D``."""
    return "".join(_latex_character(character) for character in " ".join(text.split()))


def _latex_character(character: str) -> str:
    if character in _LATEX:
        return _LATEX[character]
    plain, *accents = unicodedata.normalize("NFD", character)
    if ord(character) < 0x180 and plain.isascii() and plain.isprintable() and set(accents) <= _ACCENTS:
        return character
    return f"U+{ord(character):04X}"
