"""A page that someone writes about results: the words are theirs, and its tables are kept as the results have them."""

from __future__ import annotations

import re
from pathlib import Path

from attention_priors._io import write_bytes

PAGE = "README.md"
"""The page's file, in the folder of the results."""

_TABLE = re.compile(r"(?P<opening><!-- table: (?P<stem>[\w-]+) -->\n).*?(?P<closing><!-- end of table -->)", re.DOTALL)
_MARK = re.compile(r"<!-- (table: [\w-]+|end of table) -->")


def refresh_page(folder: Path) -> list[str]:
    """Put the tables of a comparison into its page, where that has one: ``README.md``.

    A table stands between the lines ``<!-- table: NAME -->`` and ``<!-- end of table -->``, where ``NAME.md`` is a file
    of the folder ``tables``. Nothing else of the page is changed; where there is no such file, neither is the table.

    Args:
        folder: of the comparison.

    Returns:
        The names of tables that the page has a place for, and the results do not have.

    Raises:
        ValueError: a mark has no other half.
    """
    page = folder / PAGE
    if not page.exists():
        return []
    text = page.read_text(encoding="utf-8")
    missing: list[str] = []

    def filled(match: re.Match[str]) -> str:
        path = folder / "tables" / f"{match['stem']}.md"
        if not path.exists():
            missing.append(match["stem"])
            return match[0]
        return f"{match['opening']}\n{path.read_text(encoding='utf-8')}\n{match['closing']}"

    fresh, count = _TABLE.subn(filled, text)
    if len(_MARK.findall(text)) != 2 * count:
        raise ValueError(f"{page}: each '<!-- table: NAME -->' must be followed by one '<!-- end of table -->'")
    if fresh != text:
        write_bytes(page, fresh.encode())
    return missing
