"""Table with its Markdown, LaTeX and terminal forms; ``templates/parts.html`` has the HTML form for pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
from pylatexenc.latexencode import RULE_DICT, UnicodeToLatexConversionRule, UnicodeToLatexEncoder
from rich.table import Table as TerminalTable
from rich.text import Text

from attention_priors.lab.report.wording import percent

ABSENT = "–"

_LONG = 60
"""Characters in a cell of words beyond which LaTeX wraps its column."""


class Cell(NamedTuple):
    """Formatted number.

    Attributes:
        text: The number.
        interval: Its interval, or another note in small print.
        best: Whether the number is the best of its column.
    """

    text: str
    interval: str = ""
    best: bool = False

    def __str__(self) -> str:
        return f"{self.text} {self.interval}".strip()

    @classmethod
    def of(cls, estimate: Iterable[float], written: Callable[[float], str]) -> Cell:
        """Format a mean and the ends of its interval, which are nan without an interval."""
        mean, low, high = estimate
        if not math.isfinite(mean):
            return cls(ABSENT)
        return cls(written(mean), "" if math.isnan(low) else f"[{written(low)}, {written(high)}]")

    @classmethod
    def of_share(cls, estimate: Iterable[float], mark: str = "", best: bool = False) -> Cell:
        """Format a share from 0 to 1 in percent, with its interval clipped to 0–100."""
        mean, low, high = estimate
        interval = "" if math.isnan(low) else f"[{100 * max(low, 0.0):.0f}, {100 * min(high, 1.0):.0f}]"
        return cls(percent(mean) + mark, interval, best)


Line = Sequence["Cell | str"]


@dataclass(frozen=True)
class Table:
    """Rows of cells with a caption.

    Attributes:
        name: Name of the file, without the extension.
        caption: Caption that defines every number and mark in the table.
        header: One heading per column. Line breaks are kept where the form allows.
        lines: One cell per column in each line.
        words: Number of leading columns that hold words. The others hold numbers.
    """

    name: str
    caption: str
    header: Sequence[str]
    lines: Sequence[Line]
    words: int = 1

    @classmethod
    def across(
        cls,
        name: str,
        caption: str,
        first: Sequence[str],
        columns: Mapping[Any, str],
        lines: Iterable[tuple[Line, Mapping[Any, Cell | str]]],
        words: int | None = None,
    ) -> Table:
        """Return a table from lines whose cells are keyed by column; missing cells become dashes.

        Args:
            name: see the attribute.
            caption: see the attribute.
            first: Headings of the first columns.
            columns: Heading of each further column.
            lines: Leading cells of each line. Further cells are keyed by column.
            words: see the attribute; by default all first columns hold words.
        """
        whole = [[*lead, *(cells.get(column, ABSENT) for column in columns)] for lead, cells in lines]
        return cls(name, caption, [*first, *columns.values()], whole, len(first) if words is None else words)

    @property
    def merged(self) -> list[list[Cell | str]]:
        """Lines without leading words that repeat the line above."""
        merged, above = [], [None] * self.words
        for line in self.lines:
            same = next((column for column in range(self.words) if line[column] != above[column]), self.words)
            merged.append(["" if column < same else cell for column, cell in enumerate(line)])
            above = line
        return merged

    def without(self, *headings: str) -> Table:
        """Return the table without the columns of these headings."""
        kept = [column for column, heading in enumerate(self.header) if heading not in headings]
        pick = lambda line: [line[column] for column in kept]  # noqa: E731
        words = sum(column < self.words for column in kept)
        return Table(self.name, self.caption, pick(self.header), [pick(line) for line in self.lines], words)

    def markdown(self) -> str:
        """Return the table as Markdown, with the caption above."""
        alignment = ["---" if column < self.words else "---:" for column in range(len(self.header))]
        lines = [_markdown(self.header), alignment, *map(_markdown, self.merged)]
        return f"{_markdown([self.caption])[0]}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def latex(self) -> str:
        """Return the table as LaTeX, which needs only the package booktabs."""
        size = "footnotesize" if len(self.header) <= 8 else "scriptsize"
        content = [[_latex(cell) for cell in line] for line in self.merged]
        table = pd.DataFrame(content, columns=[_latex(heading) for heading in self.header]).style.hide(axis="index")
        longest = [max((len(str(line[column])) for line in self.lines), default=0) for column in range(self.words)]
        text = ["l" if length <= _LONG else r"p{0.25\linewidth}" for length in longest]
        columns = "".join(text) + "r" * (len(self.header) - self.words)
        written = table.to_latex(
            hrules=True, position_float="centering", column_format=columns,
            caption=_latex(self.caption), label=f"tab:{self.name}",
        )  # fmt: skip
        small = f"\\{size}\n\\setlength{{\\tabcolsep}}{{3pt}}\n\\begin{{tabular}}"
        return "% Needs \\usepackage{booktabs} in the preamble.\n" + written.replace("\\begin{tabular}", small)

    def terminal(self, *, intervals: bool = True) -> TerminalTable:
        """Return the table for printing with rich.

        Args:
            intervals: Whether to print intervals.
        """
        table = TerminalTable(title=Text(self.caption), title_justify="left", title_style="")
        for column, heading in enumerate(self.header):
            # Fold: truncated digits would give a wrong number.
            table.add_column(Text(heading), justify="left" if column < self.words else "right", overflow="fold")
        for line in self.merged:
            cells = (cell if isinstance(cell, Cell) else Cell(cell) for cell in line)
            table.add_row(*(Text(str(c) if intervals else c.text, "bold" if c.best else "") for c in cells))
        return table


def _markdown(line: Line) -> list[str]:
    texts = ["".join(f"\\{c}" if c in r"\|*_`<>$" else c for c in " ".join(str(cell).split())) for cell in line]
    return [
        f"**{text}**" if isinstance(cell, Cell) and cell.best else text for text, cell in zip(texts, line, strict=True)
    ]


_BRACED = {ord(character): f"{{{character}}}" for character in "[]*"}
"""Characters that LaTeX would read as an argument of the preceding line end."""

_ENCODER = UnicodeToLatexEncoder(
    conversion_rules=[
        UnicodeToLatexConversionRule(RULE_DICT, _BRACED | {ord("|"): r"\ensuremath{|}"}),
        "defaults",
    ],
    unknown_char_policy=lambda character: f"U+{ord(character):04X}",
    unknown_char_warning=False,
)


def _latex(cell: Cell | str) -> str:
    if isinstance(cell, Cell):
        text, small = (_ENCODER.unicode_to_latex(part) for part in cell[:2])
        text = f"\\textbf{{{text}}}" if cell.best else text
        return f"\\shortstack[r]{{{text}\\\\{{\\tiny {small}}}}}" if small else text
    lines = [_ENCODER.unicode_to_latex(" ".join(line.split())) for line in cell.split("\n")]
    return lines[0] if len(lines) == 1 else "\\shortstack[r]{" + r"\\".join(lines) + "}"
